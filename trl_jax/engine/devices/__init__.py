"""Steps on several devices, processes, recomputation instead of memory, and compiled programs."""
