"""Meshes, processes, recomputation instead of memory, and compiled programs."""
