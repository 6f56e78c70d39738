"""Losses in plain jnp: arrays in, (loss, metrics) out. They never see a model."""
