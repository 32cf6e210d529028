"""The kinds of runs, and the files that each writes to its directory."""
