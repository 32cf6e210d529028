"""Builds the parts of a run from a config: backbone, task, scorer, initial parameters."""
