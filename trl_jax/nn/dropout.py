"""Dropout (Srivastava et al. 2014)."""

from __future__ import annotations

from typing import NamedTuple

import jax
import jax.numpy as jnp


class Dropout(NamedTuple):
    """Zeroes a share `rate` of an array's entries with the random `key`, and scales up the others."""

    rate: float
    key: jax.Array

    def __call__(self, x: jax.Array) -> jax.Array:
        kept = jax.random.bernoulli(self.key, 1 - self.rate, x.shape)
        return jnp.where(kept, x / (1 - self.rate), 0)

    def fold(self, number: int) -> Dropout:
        """The same rate with another key."""
        return self._replace(key=jax.random.fold_in(self.key, number))


def dropout_or_none(rate: float, key: jax.Array | None, number: int) -> Dropout | None:
    """None where nothing is to be dropped; `number` tells the places that share a key apart."""
    return None if key is None or rate == 0.0 else Dropout(rate, key).fold(number)
