"""Parameters that a script freezes with torch's flag, `requires_grad = False`."""

from __future__ import annotations

from collections.abc import Collection, Mapping
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np

Locations = dict[str, list[tuple[str, tuple[int, ...]]]]  # name on disk -> (path of our array, index in it)


def trainable_masks(frozen: Collection[str], locations: Locations, params: Mapping[str, Any]) -> dict[str, np.ndarray]:
    """For each partly or fully frozen array, by path, which layers are trained: bool `[L]`, `[L, E]` or `[]`.

    Args:
        frozen: names on disk.
        locations: where our arrays hold the tensors on disk.
    """
    masks: dict[str, np.ndarray] = {}
    for name in frozen:
        for path, index in locations[name]:
            masks.setdefault(path, np.ones(params[path].shape[: len(index)], bool))[index] = False
    return masks


def stop_frozen_gradients(params: Mapping[str, jax.Array], masks: Mapping[str, np.ndarray]) -> dict[str, jax.Array]:
    """The same values, with gradients stopped for frozen layers."""
    return dict(params) | {
        path: _select(mask, params[path], jax.lax.stop_gradient(params[path]))
        for path, mask in masks.items()
        if path in params
    }


def zero_frozen_updates(updates: Mapping[str, jax.Array], masks: Mapping[str, np.ndarray]) -> dict[str, jax.Array]:
    """Updates with zeros for frozen layers, which weight decay would change even without a gradient."""
    zeros = {path: jnp.zeros_like(updates[path]) for path in masks}
    return dict(updates) | {path: _select(mask, updates[path], zeros[path]) for path, mask in masks.items()}


def _select(mask: np.ndarray, trained: jax.Array, frozen: jax.Array) -> jax.Array:
    if not mask.any():
        return frozen
    return jnp.where(mask.reshape(*mask.shape, *[1] * (trained.ndim - mask.ndim)), trained, frozen)


def frozen_size(masks: Mapping[str, np.ndarray], params: Mapping[str, Any]) -> int:
    """Number of frozen parameters."""
    return sum(params[path].size * int((~mask).sum()) // max(mask.size, 1) for path, mask in masks.items())


def check_unfrozen(names: Collection[str]) -> None:
    """Raise ValueError if parameters were unfrozen during a run: the optimizer has no state for them, or its step count
    includes steps that they did not take part in."""
    if names:
        raise ValueError(
            f"{sorted(names)[0]} was unfrozen during training ({len(names)} parameters in total). The optimizer only "
            "updates what was trained at the start, as in TRL, where the parameter would not change. Unfreeze between "
            "calls of train()."
        )
