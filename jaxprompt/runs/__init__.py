"""The kinds of runs, and what each leaves in its folder."""
