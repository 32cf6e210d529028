"""Tasks: what they are, how their rows become examples, and the built-in ones."""
