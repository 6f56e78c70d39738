"""Losses in plain jax.numpy: arrays in, `(loss, sums)` out. They know nothing about models."""
