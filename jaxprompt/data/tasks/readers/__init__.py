"""Reads and checks the rows of each kind of task."""
