"""Configs: plain Python, one file a run or a paper table."""
