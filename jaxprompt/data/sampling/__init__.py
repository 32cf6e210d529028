"""Few-shot splits: which rows of the training split a run is trained on."""
