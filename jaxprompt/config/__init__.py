"""Every field of a run: its default, its checks, and how a config is loaded. Imports no jax."""
