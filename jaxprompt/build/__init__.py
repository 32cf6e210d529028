"""From a config to the parts of a run: backbone, task, scorer, initial parameters."""
