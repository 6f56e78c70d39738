"""The tokens that were there before a step, as processors see them."""

from __future__ import annotations

from typing import NamedTuple

import jax
import jax.numpy as jnp

Number = jax.Array | float


class History(NamedTuple):
    """Rows of tokens, the prompt with its padding on the left and behind it the new tokens: a pytree.

    ids: int32 `[R, T]`; whatever stands at and behind `length` is not looked at, so T need not change with each step.
    length: tokens of the rows before this step, int32 `[]` or `[R]`; traced.
    prompt_length: of these, the padded prompt, int32 `[]` or `[R]`.
    pads: columns on the left of each row that are padding, int32 `[R]`.
    """

    ids: jax.Array
    length: jax.Array
    prompt_length: jax.Array
    pads: jax.Array

    @property
    def lengths(self) -> jax.Array:
        """`length`, as `[R, 1]` or `[1, 1]`."""
        return jnp.reshape(self.length, (-1, 1))

    @property
    def new(self) -> jax.Array:
        """How many tokens are new, as `[R, 1]` or `[1, 1]`."""
        return self.lengths - jnp.reshape(self.prompt_length, (-1, 1))

    def last(self, count: int) -> jax.Array:
        """The last tokens of each row, int32 `[R, count]`; -1 before its first."""
        places = self.lengths - count + jnp.arange(count)
        places = jnp.broadcast_to(places, (self.ids.shape[0], count))
        return jnp.where(places >= 0, jnp.take_along_axis(self.ids, jnp.maximum(places, 0), axis=1), -1)
