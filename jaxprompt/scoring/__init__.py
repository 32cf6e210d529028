"""Evaluation: losses on the device, decisions and metrics on the host."""
