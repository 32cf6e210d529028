"""Rows of each kind of task, read and checked as examples."""
