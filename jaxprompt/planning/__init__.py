"""Estimates of memory, FLOPs and communication of a run, from shapes alone."""
