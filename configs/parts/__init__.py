"""Functions that fill blocks of a config."""
