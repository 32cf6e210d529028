"""Few-shot splits: which rows of the training split a run learns from."""
