"""Rows from local files, the hub, TFDS, the package and memory; submission files."""
