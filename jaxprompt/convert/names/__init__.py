"""The names of our parameters in transformers, by family."""
