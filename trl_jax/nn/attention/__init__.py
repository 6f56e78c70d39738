"""Attention layers and kernels."""
