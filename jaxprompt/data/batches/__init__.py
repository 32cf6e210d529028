"""Padded numpy batches of few shapes."""
