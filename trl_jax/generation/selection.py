"""Finds thresholds without sorting: one bit after the other, each by counting or adding up the ids beyond it.

XLA sorts a vocabulary on the CPU ten times as slowly as it reads it thirty-two times.
"""

from __future__ import annotations

from collections.abc import Callable

import jax
import jax.numpy as jnp
import numpy as np

_SIGN = np.uint32(2**31)


def among_largest(x_RV: jax.Array, k: jax.Array | int) -> jax.Array:
    """Whether a number is at least as large as the k-th largest of its row: bool `[R, V]`, k or more with ties."""
    keys_RV = _keys(x_RV)
    k = jnp.minimum(k, x_RV.shape[-1])
    return keys_RV >= _largest(lambda t_R1: _total(keys_RV >= t_R1) >= k, x_RV.shape[0])


def leading(order_RV: jax.Array, weights_RV: jax.Array, limit: jax.Array | float) -> jax.Array:
    """Whether an id lies within `limit`: bool `[R, V]`.

    Ids are put in the order of `order_RV`, from the least, equals by their place; one is within where its weight and
    those before it add up to at most `limit`, a number or `[R, 1]`. Equals have equal weights, at least 0.
    """
    keys_RV = _keys(order_RV)

    def before(t_R1):
        return _total(jnp.where(keys_RV < t_R1, weights_RV, 0))

    t_R1 = _largest(lambda t_R1: before(t_R1) <= limit, order_RV.shape[0])
    less_RV, equal_RV = keys_RV < t_R1, keys_RV == t_R1

    def some_of_equals():
        place_RV = jnp.cumsum(equal_RV, axis=-1)
        return less_RV | (equal_RV & (before(t_R1) + place_RV * weights_RV <= limit))

    return jax.lax.cond(jnp.any(_total(equal_RV) > 1), some_of_equals, lambda: less_RV)


def until(order_RV: jax.Array, weights_RV: jax.Array, mass: jax.Array | float) -> jax.Array:
    """Whether an id is among those that first reach `mass`, in the order of `order_RV` from the least: bool `[R, V]`.

    Whatever equals the id that reaches it is among them; all are where none reaches it.
    """
    keys_RV = _keys(order_RV)
    return keys_RV <= _largest(lambda t_R1: _total(jnp.where(keys_RV < t_R1, weights_RV, 0)) < mass, order_RV.shape[0])


def _total(x_RV: jax.Array) -> jax.Array:
    return x_RV.sum(axis=-1, keepdims=True, dtype=jnp.int32 if x_RV.dtype == jnp.bool_ else x_RV.dtype)


def _keys(x: jax.Array) -> jax.Array:
    """int32 in the order of float32, with -0 equal to 0."""
    bits = jax.lax.bitcast_convert_type(jnp.where(x == 0, 0.0, x).astype(jnp.float32), jnp.int32)
    return bits ^ ((bits >> 31) & 0x7FFFFFFF)


def _largest(holds: Callable[[jax.Array], jax.Array], rows: int) -> jax.Array:
    """The largest key of each row for which `holds`, int32 `[R, 1]`: it holds for the least, and up to some key."""

    def key_of(place_R1):
        return jax.lax.bitcast_convert_type(place_R1 ^ _SIGN, jnp.int32)

    def narrow(i, place_R1):
        larger_R1 = place_R1 | (jnp.uint32(1) << (31 - i).astype(jnp.uint32))
        return jnp.where(holds(key_of(larger_R1)), larger_R1, place_R1)

    return key_of(jax.lax.fori_loop(0, 32, narrow, jnp.zeros((rows, 1), jnp.uint32)))
