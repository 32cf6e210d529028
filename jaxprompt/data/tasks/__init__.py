"""Tasks: what they are, how their rows become examples, and those that are known by name."""
