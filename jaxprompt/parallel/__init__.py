"""Devices: meshes and shardings, several processes, compiling, and what a compiled program does."""
