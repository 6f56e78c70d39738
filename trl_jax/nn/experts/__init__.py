"""Layers of experts: the routers that select some for each token, and their products, grouped by expert."""
