"""What transformers calls each of our parameters, by family."""
