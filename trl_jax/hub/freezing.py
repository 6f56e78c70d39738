"""Parameters that a script holds still, by torch's flag for it: `requires_grad = False`."""

from __future__ import annotations

from collections.abc import Collection, Mapping
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np

Places = Mapping[str, list[tuple[str, tuple[int, ...]]]]


def moving(still: Collection[str], places: Places, params: Mapping[str, Any]) -> dict[str, np.ndarray]:
    """For each array of which something is held still, by path, what moves of it: bool `[L]`, `[L, E]` or `[]`.

    Args:
        still: names on disk.
        places: name on disk -> the arrays that it lies in, by path, each with its index there.
    """
    found: dict[str, np.ndarray] = {}
    for name in still:
        for path, index in places[name]:
            found.setdefault(path, np.ones(params[path].shape[: len(index)], bool))[index] = False
    return found


def held(params: Mapping[str, jax.Array], moves: Mapping[str, np.ndarray]) -> dict[str, jax.Array]:
    """The same numbers, of which only those that move have a gradient."""
    return dict(params) | {
        path: _chosen(own, params[path], jax.lax.stop_gradient(params[path]))
        for path, own in moves.items()
        if path in params
    }


def only_moving(updates: Mapping[str, jax.Array], moves: Mapping[str, np.ndarray]) -> dict[str, jax.Array]:
    """Updates, zero for what is held still: a weight decays without a gradient, too."""
    still = {path: jnp.zeros_like(updates[path]) for path in moves}
    return dict(updates) | {path: _chosen(own, updates[path], still[path]) for path, own in moves.items()}


def _chosen(own: np.ndarray, moved: jax.Array, kept: jax.Array) -> jax.Array:
    if not own.any():
        return kept
    return jnp.where(own.reshape(*own.shape, *[1] * (moved.ndim - own.ndim)), moved, kept)


def count(moves: Mapping[str, np.ndarray], params: Mapping[str, Any]) -> int:
    """How many numbers are held still."""
    return sum(params[path].size * int((~own).sum()) // max(own.size, 1) for path, own in moves.items())
