"""Data on the host: sources, tasks, few-shot splits, templates and batches. Never imports jax."""
