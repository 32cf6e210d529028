"""Feature cache: hidden states of frozen layers, computed once."""
