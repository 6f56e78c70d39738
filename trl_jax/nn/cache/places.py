"""How much of a cache is filled, and arrays with other places."""

from __future__ import annotations

from collections.abc import Sequence
from typing import NamedTuple

import jax
import jax.numpy as jnp
from jax.sharding import PartitionSpec

from trl_jax.core.layer_gather import TENSOR


class CachePlaces(NamedTuple):
    """How much of a cache is filled; all layers share it. The token that is computed comes next.

    prompt_lengths: int32 `[P]`, tokens of each prompt.
    begun: int32 `[P]`, how much was written when the completions of each prompt began: 0, unless they took the place of
        others.
    written: int32 scalar, how many tokens were written; completions have those since they began, the last ones.
    """

    prompt_lengths: jax.Array
    begun: jax.Array
    written: jax.Array

    @property
    def own(self) -> jax.Array:
        """Tokens of each prompt's completions that are in the cache, int32 `[P]`."""
        return self.written - self.begun

    def tokens_back(self, capacity: int) -> jax.Array:
        """How many tokens before the one that is computed each of `capacity` places was written, int32 `[T]`: 1 for the
        last."""
        return (self.written - 1 - jnp.arange(capacity)) % capacity + 1

    def of_completions(self, capacity: int) -> jax.Array:
        """Where in a text, its prompt included, the token at each of `capacity` places stands, int32 `[P, T]`; anywhere
        where there is none yet."""
        return jnp.maximum(self.own[:, None] - self.tokens_back(capacity), 0) + self.prompt_lengths[:, None]


class Room(NamedTuple):
    """The room that a cache makes: `capacity` places for each of `group` completions of a prompt. Layers that see no
    more than `window` tokens keep no more, of a prompt as of a completion; None where they see all."""

    group: int
    capacity: int
    window: int | None = None

    @property
    def places(self) -> int:
        """Places for each completion."""
        return within(self.window, self.capacity)


def within(window: int | None, count: int) -> int:
    """`count` places, or as many as a window has."""
    return count if window is None else min(window, count)


def zeros_by_head(shape: Sequence[int], heads: int, dtype: jnp.dtype) -> jax.Array:
    """Zeros with an axis of heads, on which the devices along `tensor` have them that have the heads' products."""
    zeros, devices = jnp.zeros(shape, dtype), jax.sharding.get_abstract_mesh().shape.get(TENSOR, 1)
    if devices == 1 or shape[heads] % devices:
        return zeros
    axes = [None] * len(shape)
    axes[heads] = TENSOR
    return jax.lax.with_sharding_constraint(zeros, PartitionSpec(*axes))


def of_prompts(lengths: jax.Array, count: int) -> jax.Array:
    """Where in its prompt the token at each of `count` places stands, int32 `[P, S]`: from 0 on, or where a prompt is
    longer those of its last tokens."""
    return jnp.maximum(lengths - count, 0)[:, None] + jnp.arange(count)


def replaced(array: jax.Array, slots: jax.Array, new: jax.Array, axis: int) -> jax.Array:
    """With `new` at these places of an axis; a place that is not there is left out."""
    return array.at[(slice(None),) * axis + (slots,)].set(new.astype(array.dtype), mode="drop")


def sized(array: jax.Array, axis: int, size: int) -> jax.Array:
    """With so many places on an axis, the first ones."""
    there = array.shape[axis]
    return jax.lax.slice_in_dim(array, 0, size, axis=axis) if size < there else wider(array, axis, size - there)


def wider(array: jax.Array, axis: int, more: int) -> jax.Array:
    """With so many more places on an axis."""
    widths = [(0, 0)] * array.ndim
    widths[axis] = (0, more)
    return jnp.pad(array, widths)
