"""Layers that every backbone is built from."""
