"""Finds thresholds without sorting: one bit after the other, each by counting or adding up the ids beyond it.

XLA sorts a vocabulary on the CPU ten times as slowly as it reads it thirty-two times. Where all that counts lies in few
blocks of ids, as behind top_k, those alone are read.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np

_SIGN = np.uint32(2**31)
_LEAST = np.iinfo(np.int32).min
_BLOCK = 16  # ids of a block
_FEW = 16  # where one in so many blocks counts, it is looked at alone
_WORTHWHILE = 32  # blocks; in smaller vocabularies all are read


def among_largest(x_RV: jax.Array, k: jax.Array | int) -> jax.Array:
    """Whether a number is at least as large as the k-th largest of its row: bool `[R, V]`, k or more with ties.

    The k largest lie in the k blocks whose largest numbers are largest.
    """
    keys_RV = _keys(x_RV)
    k = jnp.minimum(k, x_RV.shape[-1])
    tops_RB = _blocks(keys_RV, _LEAST).max(axis=1)
    least_R1 = _largest(lambda t_R1: _total(tops_RB >= t_R1) >= k, x_RV.shape[0])

    def kth(keys):
        return _largest(lambda t_R1: _total(keys >= t_R1) >= k, x_RV.shape[0])

    return keys_RV >= _of_blocks(kth, tops_RB >= least_R1, (keys_RV, _LEAST))


def leading(order_RV: jax.Array, weights_RV: jax.Array, limit: jax.Array | float) -> jax.Array:
    """Whether an id lies within `limit`: bool `[R, V]`; of ids without weight, whatever comes.

    Ids are put in the order of `order_RV`, from the least, equals by their place; one is within where its weight and
    those before it add up to at most `limit`, a number or `[R, 1]`. Equals have equal weights, at least 0.
    """
    keys_RV = _keys(order_RV)
    t_R1, equals_R1 = _where_weights_reach(keys_RV, weights_RV, lambda before_R1: before_R1 <= limit)

    def some_of_equals():
        less_RV, equal_RV = keys_RV < t_R1, keys_RV == t_R1
        before_R1 = _total(jnp.where(less_RV, weights_RV, 0))
        return less_RV | (equal_RV & (before_R1 + jnp.cumsum(equal_RV, axis=-1) * weights_RV <= limit))

    return jax.lax.cond(jnp.any(equals_R1 > 1), some_of_equals, lambda: keys_RV < t_R1)


def until(order_RV: jax.Array, weights_RV: jax.Array, mass: jax.Array | float) -> jax.Array:
    """Whether an id is among those that first reach `mass`, in the order of `order_RV` from the least: bool `[R, V]`.

    Whatever equals the id that reaches it is among them; all are where none reaches it.
    """
    keys_RV = _keys(order_RV)
    t_R1, _ = _where_weights_reach(keys_RV, weights_RV, lambda before_R1: before_R1 < mass)
    return keys_RV <= t_R1


def _where_weights_reach(
    keys_RV: jax.Array, weights_RV: jax.Array, short_of: Callable[[jax.Array], jax.Array]
) -> tuple[jax.Array, jax.Array]:
    """The largest key before which the sum of the weights is `short_of` something, and how many ids with a weight
    have it, each `[R, 1]`."""

    def search(keys, weights):
        t_R1 = _largest(lambda t_R1: short_of(_total(jnp.where(keys < t_R1, weights, 0))), keys.shape[0])
        return t_R1, _total((keys == t_R1) & (weights > 0))

    heavy_RB = _blocks(weights_RV, 0).max(axis=1) > 0
    return _of_blocks(search, heavy_RB, (keys_RV, _LEAST), (weights_RV, 0))


def _largest(holds: Callable[[jax.Array], jax.Array], rows: int) -> jax.Array:
    """The largest key of each row for which `holds`, int32 `[R, 1]`: it holds for the least, and up to some key."""

    def key_of(place_R1):
        return jax.lax.bitcast_convert_type(place_R1 ^ _SIGN, jnp.int32)

    def narrow(i, place_R1):
        larger_R1 = place_R1 | (jnp.uint32(1) << (31 - i).astype(jnp.uint32))
        return jnp.where(holds(key_of(larger_R1)), larger_R1, place_R1)

    return key_of(jax.lax.fori_loop(0, 32, narrow, jnp.zeros((rows, 1), jnp.uint32)))


def _keys(x: jax.Array) -> jax.Array:
    """int32 in the order of float32, with -0 equal to 0."""
    bits = jax.lax.bitcast_convert_type(jnp.where(x == 0, 0.0, x).astype(jnp.float32), jnp.int32)
    return bits ^ ((bits >> 31) & 0x7FFFFFFF)


def _total(x: jax.Array) -> jax.Array:
    return x.sum(axis=-1, keepdims=True, dtype=jnp.int32 if x.dtype == jnp.bool_ else x.dtype)


def _blocks(x_RV: jax.Array, fill: int) -> jax.Array:
    """`[R, 16, B]`: a block is a column, of ids that lie B apart."""
    rows, vocabulary = x_RV.shape
    filled = jnp.pad(x_RV, ((0, 0), (0, -vocabulary % _BLOCK)), constant_values=fill)
    return filled.reshape(rows, _BLOCK, -1)


def _of_blocks(search: Callable[..., Any], wanted_RB: jax.Array, *arrays: tuple[jax.Array, int]) -> Any:
    """`search` of arrays `[R, V]` whose wanted blocks alone matter, each given with what stands for the others."""
    rows, count = wanted_RB.shape
    most = count // _FEW

    def of_all():
        return search(*(x_RV for x_RV, _ in arrays))

    def of_wanted():
        slots_RB = jnp.where(wanted_RB, jnp.cumsum(wanted_RB, axis=-1) - 1, most)
        blocks_RM = (
            jnp.full((rows, most), count).at[jnp.arange(rows)[:, None], slots_RB].set(jnp.arange(count), mode="drop")
        )

        def gathered(x_RV, fill):
            found = jnp.take_along_axis(_blocks(x_RV, fill), blocks_RM[:, None], axis=2, mode="fill", fill_value=fill)
            return found.reshape(rows, -1)

        return search(*(gathered(x_RV, fill) for x_RV, fill in arrays))

    if most < _WORTHWHILE:
        return of_all()
    return jax.lax.cond(jnp.all(_total(wanted_RB) <= most), of_wanted, of_all)
