"""Training: steps, the training loop, evaluation, checkpoints and the run directory."""
