"""Heads: hidden states to class scores."""
