"""Meshes and shardings, several processes, compilation, and analysis of compiled programs."""
