"""Arguments to optax, with torch's conventions where the two differ."""

from __future__ import annotations

import math
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


def scale_by_adam(b1: float, b2: float, eps: float) -> optax.GradientTransformation:
    """Adam (Kingma and Ba 2015, arXiv:1412.6980), eps outside the root, with bias corrections that keep their digits.

    optax takes `1 - b2**t` in float32, which for b2 = 0.999 costs four of its seven digits in the first steps; that
    error alone would be most of the distance to torch, which takes it in double precision.
    """

    def bias(decay: float, count: jax.Array) -> jax.Array:
        return -jnp.expm1(count * math.log(decay)) if decay > 0 else jnp.ones(())

    def init(params):
        zeros = jax.tree.map(jnp.zeros_like, params)
        return optax.ScaleByAdamState(count=jnp.zeros((), jnp.int32), mu=zeros, nu=jax.tree.map(jnp.copy, zeros))

    def update(updates, state, params=None):
        del params
        count = optax.safe_increment(state.count)
        mu = jax.tree.map(lambda m, g: b1 * m + (1 - b1) * g, state.mu, updates)
        nu = jax.tree.map(lambda v, g: b2 * v + (1 - b2) * jnp.square(g), state.nu, updates)
        first, second = bias(b1, count), bias(b2, count)
        updates = jax.tree.map(lambda m, v: (m / first) / (jnp.sqrt(v / second) + eps), mu, nu)
        return updates, optax.ScaleByAdamState(count=count, mu=mu, nu=nu)

    return optax.GradientTransformation(init, update)


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
    steps.append(scale_by_adam(b1, b2, eps))
    if weight_decay:
        steps.append(optax.add_decayed_weights(weight_decay, mask=decayed))
    return optax.chain(*steps, scale_by_given_learning_rate())


def with_adam_moments(state: Any, count: int, mu: dict[str, jax.Array], nu: dict[str, jax.Array]) -> Any:
    """The state of `adamw` with these moments in it, as after `count` steps."""

    def is_adam(node):
        return isinstance(node, optax.ScaleByAdamState)

    adam = optax.ScaleByAdamState(count=jnp.asarray(count, jnp.int32), mu=mu, nu=nu)
    return jax.tree.map(lambda node: adam if is_adam(node) else node, state, is_leaf=is_adam)
