"""The keys that queries along packed rows see, as ranges: common to the kernels."""

from __future__ import annotations

from collections.abc import Callable
from typing import NamedTuple

import jax
import jax.numpy as jnp

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
