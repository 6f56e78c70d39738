"""An activation with parameters."""

from __future__ import annotations

import jax
import jax.numpy as jnp
from flax import nnx


class XIELU(nnx.Module):
    """xIELU (Huang and Schlag 2024, arXiv:2411.13010): `a x^2 + beta x` above 0 and
    `b (exp(min(x, eps)) - 1 - x) + beta x` below, with `a = softplus(alpha_p)` and `b = beta + softplus(alpha_n)`.

    `alpha_p` and `alpha_n` `[1]` train; `beta` and `eps` are scalars that do not.
    """

    def __init__(self):
        self.alpha_p, self.alpha_n = (nnx.Param(jnp.zeros((1,), jnp.float32), axes=("",)) for _ in range(2))
        self.beta, self.eps = (nnx.Param(jnp.zeros((), jnp.float32), axes=()) for _ in range(2))

    def __call__(self, x: jax.Array) -> jax.Array:
        """`[..., F]` to the same, computed in float32."""
        y, dtype = x.astype(jnp.float32), x.dtype
        beta, eps = jax.lax.stop_gradient((self.beta[...], self.eps[...]))
        above, below = jax.nn.softplus(self.alpha_p[...]), beta + jax.nn.softplus(self.alpha_n[...])
        curve = jnp.where(y > 0, above * y * y, (jnp.expm1(jnp.minimum(y, eps)) - y) * below)
        return (curve + beta * y).astype(dtype)
