"""Operations that draw random numbers; each wants a `key`."""

from __future__ import annotations

import jax
import jax.numpy as jnp


def _dropout(x, rate, train=True, *, key):
    """The numbers that are kept, scaled up to the same mean, and the places of those."""
    if not train or rate == 0.0:
        return x, jnp.ones(x.shape, bool)
    kept = jax.random.bernoulli(key, 1.0 - rate, x.shape)
    return jnp.where(kept, x / (1.0 - rate), 0), kept


def _bernoulli(x, probability=None, *, key):
    return jax.random.bernoulli(key, x if probability is None else probability, x.shape)


OPERATIONS = {
    "aten.native_dropout.default": _dropout,
    "aten.bernoulli.p": _bernoulli,
    "aten.bernoulli.default": _bernoulli,
    "aten.rand.default": lambda shape, *, key: jax.random.uniform(key, shape),
    "aten.rand_like.default": lambda x, *, key: jax.random.uniform(key, x.shape),
    "aten.randn.default": lambda shape, *, key: jax.random.normal(key, shape),
    "aten.randn_like.default": lambda x, *, key: jax.random.normal(key, x.shape),
}
