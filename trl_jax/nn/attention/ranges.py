"""Which keys each query of a packed row may see."""

from __future__ import annotations

from collections.abc import Callable
from typing import NamedTuple

import jax
import jax.numpy as jnp

from trl_jax.core.outputs import RowView

# ----------------------------------------------------------------------------------------------------
# The keys that queries along packed rows see, as ranges: common to the kernels.


SAVED = "attended"  # the name of results in checkpoint policies: they cost more to compute again than to keep


class KeyRanges(NamedTuple):
    """The places of the keys that each query sees, from `first` up to but without `end`: int32, `[N]` or in blocks.

    And those from `second` up to but without `second_end`, behind the others; None where there are none. Either may be
    empty.
    """

    first: jax.Array
    end: jax.Array
    second: jax.Array | None = None
    second_end: jax.Array | None = None

    def blocks(self, queries: int, keys: int, count: int) -> jax.Array:
        """Which of the `count` blocks of so many `keys` any of a block of so many `queries` sees: bool `[N, count]`."""
        starts = jnp.arange(count, dtype=jnp.int32) * keys

        def overlaps(first: jax.Array, end: jax.Array) -> jax.Array:
            first, end = (y.reshape(-1, queries, 1) for y in (first, end))
            return jnp.any(jnp.maximum(first, starts) < jnp.minimum(end, starts + keys), axis=1)

        return self._either(overlaps)

    def see(self, keys: jax.Array) -> jax.Array:
        """Whether queries `[..., N]` see the keys at these places `[S]`: bool `[..., N, S]`."""
        return self._either(lambda first, end: (keys >= first[..., None]) & (keys < end[..., None]))

    def _either(self, of_range: Callable[[jax.Array, jax.Array], jax.Array]) -> jax.Array:
        found = of_range(self.first, self.end)
        return found if self.second is None else found | of_range(self.second, self.second_end)


# ----------------------------------------------------------------------------------------------------
# Tokens of packed rows as rows of one text each, and back: for kernels that read rows.


def by_text(x: jax.Array, texts: RowView) -> jax.Array:
    """Tokens of packed rows `[R, T, ...]` as those of their texts `[R x N, L, ...]`, zeros behind each; the tokens that
    several texts begin with are in each of them."""
    rows, count, length = texts.places.shape
    gathered = _to_texts(x.reshape(*x.shape[:2], -1), texts.places.reshape(rows, -1), texts.rows)
    return gathered.reshape(rows * count, length, *x.shape[2:])


def by_token(x: jax.Array, texts: RowView) -> jax.Array:
    """The inverse of `by_text`: tokens of packed rows, one of those that several texts share, which are alike."""
    rows = len(texts.places)
    gathered = _to_tokens(x.reshape(rows, -1, x[0, 0].size), texts.places.reshape(rows, -1), texts.rows)
    return gathered.reshape(*gathered.shape[:2], *x.shape[2:])


def _at(x: jax.Array, places: jax.Array) -> jax.Array:
    """`[R, S, D]` at `[R, M]`; zeros where there is no such place."""
    return jnp.take_along_axis(x, places[..., None], axis=1, mode="fill", fill_value=0)


@jax.custom_vjp
def _to_texts(x, places, rows):
    return _at(x, places)


def _to_texts_backward(saved, gradient):
    _, rows = saved
    parts = (_at(gradient, rows[:, text]).astype(jnp.float32) for text in range(rows.shape[1]))
    return sum(parts).astype(gradient.dtype), None, None


_to_texts.defvjp(lambda x, places, rows: (_at(x, places), (places, rows)), _to_texts_backward)


@jax.custom_vjp
def _to_tokens(x, places, rows):
    return _at(x, rows[:, 0])


def _to_tokens_backward(saved, gradient):
    places, rows = saved
    read = jnp.take_along_axis(rows[:, 0], places, axis=1, mode="fill", fill_value=-1) == jnp.arange(places.shape[1])
    return jnp.where(read[..., None], _at(gradient, places), 0), None, None


_to_tokens.defvjp(lambda x, places, rows: (_at(x, rows[:, 0]), (places, rows)), _to_tokens_backward)
