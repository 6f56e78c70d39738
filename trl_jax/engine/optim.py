"""Arguments to optax, with torch's conventions where the two differ."""

from __future__ import annotations

import re
from typing import Any

import jax
import jax.numpy as jnp
import optax

# transformers' Trainer.get_decay_parameter_names: neither biases nor any kind of norm decay.
_UNDECAYED = re.compile(r"bias|layernorm|rmsnorm|(?:^|\.)norm(?:$|\.)|_norm(?:$|\.)")


def decays(tensor: str) -> bool:
    """Whether weight decay applies to the parameter of this name on disk."""
    return not _UNDECAYED.search(tensor.lower())


def clip_by_global_norm(max_norm: float) -> optax.GradientTransformation:
    """torch's clip_grad_norm_: scale by `max_norm / (norm + 1e-6)` where that is below 1.

    optax's own divides by the bare norm, which differs in the seventh digit.
    """

    def update(updates, state, params=None):
        del params
        scale = jnp.minimum(1.0, max_norm / (optax.global_norm(updates) + 1e-6))
        return jax.tree.map(lambda g: g * scale, updates), state

    return optax.GradientTransformation(lambda params: optax.EmptyState(), update)


def scale_by_given_learning_rate() -> optax.GradientTransformationExtraArgs:
    """Multiplies by minus the `learning_rate` handed to `update`: the schedule stays on the host."""

    def update(updates, state, params=None, *, learning_rate, **extra):
        del params, extra
        return jax.tree.map(lambda u: -learning_rate * u, updates), state

    return optax.GradientTransformationExtraArgs(lambda params: optax.EmptyState(), update)


def adamw(
    *, b1: float, b2: float, eps: float, weight_decay: float, decayed: dict[str, bool], max_grad_norm: float | None
) -> optax.GradientTransformationExtraArgs:
    """torch's AdamW: decoupled decay, eps outside the square root; clipping before it where `max_grad_norm` > 0.

    Args:
        decayed: for each parameter, whether it decays.
    """
    steps: list[Any] = [clip_by_global_norm(max_grad_norm)] if max_grad_norm else []
    steps.append(optax.scale_by_adam(b1=b1, b2=b2, eps=eps, eps_root=0.0))
    if weight_decay:
        steps.append(optax.add_decayed_weights(weight_decay, mask=decayed))
    return optax.chain(*steps, scale_by_given_learning_rate())
