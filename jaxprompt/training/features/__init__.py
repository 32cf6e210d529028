"""Hidden states of frozen layers, computed once and kept."""
