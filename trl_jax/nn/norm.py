"""Normalisation."""

from __future__ import annotations

import jax
import jax.numpy as jnp
from flax import nnx


class RMSNorm(nnx.Module):
    """Root-mean-square norm over the last axis (Zhang and Sennrich 2019, arXiv:1910.07467).

    Statistics in float32; the result is cast back before it is scaled.
    """

    def __init__(self, features: int, *, eps: float):
        self.weight = nnx.Param(jnp.ones((features,), jnp.float32))
        self.eps = eps

    def __call__(self, x: jax.Array) -> jax.Array:
        x32 = x.astype(jnp.float32)
        scale = jax.lax.rsqrt(jnp.mean(jnp.square(x32), axis=-1, keepdims=True) + self.eps)
        return (x32 * scale).astype(x.dtype) * self.weight[...].astype(x.dtype)
