"""Key ranges of packed rows, and conversion between packed rows and one row per text."""

from __future__ import annotations

from collections.abc import Callable
from typing import NamedTuple

import jax
import jax.numpy as jnp

from trl_jax.core.outputs import RowView

SAVED = "attended"  # name of attention results in checkpoint policies: cheaper to save than to recompute


class KeyRanges(NamedTuple):
    """The keys that each query attends to, `first <= s < end`: int32, `[N]` or in blocks.

    An optional second range follows the first. Either may be empty.
    """

    first: jax.Array
    end: jax.Array
    second: jax.Array | None = None
    second_end: jax.Array | None = None

    def blocks(self, queries: int, keys: int, count: int) -> jax.Array:
        """Which of `count` blocks of `keys` keys any query of a block of `queries` attends to: bool `[N, count]`."""
        starts = jnp.arange(count, dtype=jnp.int32) * keys

        def overlaps(first: jax.Array, end: jax.Array) -> jax.Array:
            first, end = (y.reshape(-1, queries, 1) for y in (first, end))
            return jnp.any(jnp.maximum(first, starts) < jnp.minimum(end, starts + keys), axis=1)

        return self._either(overlaps)

    def see(self, keys: jax.Array) -> jax.Array:
        """Whether queries `[..., N]` attend to the keys at these positions `[S]`: bool `[..., N, S]`."""
        return self._either(lambda first, end: (keys >= first[..., None]) & (keys < end[..., None]))

    def _either(self, of_range: Callable[[jax.Array, jax.Array], jax.Array]) -> jax.Array:
        found = of_range(self.first, self.end)
        return found if self.second is None else found | of_range(self.second, self.second_end)


# Conversion between packed rows and one row per text


def by_text(x: jax.Array, texts: RowView) -> jax.Array:
    """Tokens of packed rows `[R, T, ...]` as one zero-padded row per text, `[R x X, L, ...]`. Tokens shared by several
    texts are copied to each of them."""
    rows, count, length = texts.places.shape
    gathered = _to_texts(x.reshape(*x.shape[:2], -1), texts.places.reshape(rows, -1), texts.rows)
    return gathered.reshape(rows * count, length, *x.shape[2:])


def by_token(x: jax.Array, texts: RowView) -> jax.Array:
    """The inverse of `by_text`; one of the identical copies of a shared token is used."""
    rows = len(texts.places)
    gathered = _to_tokens(x.reshape(rows, -1, x[0, 0].size), texts.places.reshape(rows, -1), texts.rows)
    return gathered.reshape(*gathered.shape[:2], *x.shape[2:])


def _at(x: jax.Array, places: jax.Array) -> jax.Array:
    """Index `[R, S, D]` with `[R, M]`; zeros where the index is out of range."""
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
