"""A model: a trunk and the head on it."""

from __future__ import annotations

from typing import Any

import jax
from flax import nnx


class Model(nnx.Module):
    """A trunk gives the hidden states of the tokens that are read, its head makes results of them.

    The paths of their parameters begin with the NAME that each has.
    """

    def __init__(self, trunk: nnx.Module, head: nnx.Module):
        self.trunk_name, self.head_name = trunk.NAME, head.NAME
        setattr(self, trunk.NAME, trunk)
        setattr(self, head.NAME, head)

    def __call__(
        self,
        tokens: jax.Array,
        positions: jax.Array,
        reads: jax.Array,
        *,
        dropout_key: jax.Array | None = None,
        **options: Any,
    ) -> jax.Array:
        """The results of the head, of a score head `[N]`.

        Args:
            tokens, positions: int32 `[R, T]`.
            reads: int32 `[N]`, the places that are read, row * T + place in the row.
            dropout_key: turns dropout on, at the rates in the config.
            options: the trunk's others.
        """
        parts = vars(self)
        hidden = parts[self.trunk_name](tokens, positions, reads, dropout_key=dropout_key, **options)
        return parts[self.head_name](hidden, dropout_key)
