"""Noise on embeddings: NEFTune (Jain et al. 2023, arXiv:2310.05914)."""

from __future__ import annotations

from typing import NamedTuple

import jax
import jax.numpy as jnp


class Noise(NamedTuple):
    """Adds to `[R, T, D]` what the random `key` draws evenly between -a and a, where a = alpha / sqrt(length * D).

    `length` is that of the longest text, however far rows are padded.
    """

    alpha: float
    key: jax.Array
    length: jax.Array | int

    def __call__(self, x: jax.Array) -> jax.Array:
        bound = self.alpha / jnp.sqrt(self.length * x.shape[-1])
        return x + (bound * jax.random.uniform(self.key, x.shape, jnp.float32, -1.0, 1.0)).astype(x.dtype)
