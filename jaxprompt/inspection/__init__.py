"""Inspection of what a run learned."""
