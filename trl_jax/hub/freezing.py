"""Parameters that a script freezes, by torch's flag for it: `requires_grad = False`."""

from __future__ import annotations

from collections.abc import Collection, Mapping
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np

Locations = dict[str, list[tuple[str, tuple[int, ...]]]]  # name on disk -> paths of its arrays, each with its index


def trainable_masks(frozen: Collection[str], locations: Locations, params: Mapping[str, Any]) -> dict[str, np.ndarray]:
    """For each array that is frozen in part or whole, by path, the layers that train: bool `[L]`, `[L, E]` or `[]`.

    Args:
        frozen: names on disk.
        locations: where in our arrays the tensors on disk lie.
    """
    masks: dict[str, np.ndarray] = {}
    for name in frozen:
        for path, index in locations[name]:
            masks.setdefault(path, np.ones(params[path].shape[: len(index)], bool))[index] = False
    return masks


def stop_frozen_gradients(params: Mapping[str, jax.Array], masks: Mapping[str, np.ndarray]) -> dict[str, jax.Array]:
    """The same numbers; only the layers that train have a gradient."""
    return dict(params) | {
        path: _select(mask, params[path], jax.lax.stop_gradient(params[path]))
        for path, mask in masks.items()
        if path in params
    }


def zero_frozen_updates(updates: Mapping[str, jax.Array], masks: Mapping[str, np.ndarray]) -> dict[str, jax.Array]:
    """Updates, zero for what is frozen: a weight decays without a gradient, too."""
    zeros = {path: jnp.zeros_like(updates[path]) for path in masks}
    return dict(updates) | {path: _select(mask, updates[path], zeros[path]) for path, mask in masks.items()}


def _select(mask: np.ndarray, trained: jax.Array, frozen: jax.Array) -> jax.Array:
    if not mask.any():
        return frozen
    return jnp.where(mask.reshape(*mask.shape, *[1] * (trained.ndim - mask.ndim)), trained, frozen)


def frozen_size(masks: Mapping[str, np.ndarray], params: Mapping[str, Any]) -> int:
    """The number of frozen parameters."""
    return sum(params[path].size * int((~mask).sum()) // max(mask.size, 1) for path, mask in masks.items())


def check_unfrozen(names: Collection[str]) -> None:
    """Raise ValueError where parameters were unfrozen while a run trains: an optimizer was made without them, or has
    counted the steps that they did not take."""
    if names:
        raise ValueError(
            f"{sorted(names)[0]} was unfrozen while the run trains (parameters in all: {len(names)}). The optimizer "
            "goes by what trained at the beginning, and TRL's would leave it as it is. Unfreeze between calls of "
            "train()."
        )
