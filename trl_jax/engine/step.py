"""The optimizer step: one donated jit."""

from __future__ import annotations

from collections.abc import Callable
from functools import partial
from typing import Any

import jax
import jax.numpy as jnp
import optax

from trl_jax.engine.optim import Optimizer

Params = dict[str, jax.Array]
Loss = Callable[[Params, Any, jax.Array | None], tuple[jax.Array, dict[str, jax.Array]]]


def make_step(loss: Loss, tx: Optimizer) -> Callable:
    """`step(params, opt_state, batch, learning_rate, key) -> (params, opt_state, metrics)`, jitted.

    params and opt_state are donated: the arrays passed in are gone afterwards. Where the loss or the gradient is no
    number, both come back as they were: AdamW would carry one NaN through every later step.

    Args:
        loss: `(params, micro_batch, key) -> (loss, metrics)`. The weights in a batch make the losses of its
            micro-batches add up to the step's.
        tx: what gradients do to parameters, and where they are taken.

    Every leaf of `batch` has a leading axis of micro-batches; metrics come back with the same axis, beside `loss`
    (their sum) and `grad_norm` (before clipping).
    """
    grad = jax.value_and_grad(loss, has_aux=True)

    def step(params, opt_state, batch, learning_rate, key):
        total, gradients, metrics = _accumulate(grad, tx.point(params, opt_state), batch, key)
        metrics |= {"loss": total, "grad_norm": optax.global_norm(gradients)}
        updates, successor = tx.update(gradients, opt_state, params, learning_rate=learning_rate)
        good = jnp.isfinite(total) & jnp.isfinite(metrics["grad_norm"])
        kept = partial(jax.tree.map, lambda new, old: jnp.where(good, new, old))
        return kept(optax.apply_updates(params, updates), params), kept(successor, opt_state), metrics

    return jax.jit(step, donate_argnums=(0, 1))


def _accumulate(grad, params, batch, key):
    """Loss, gradients and metrics over the leading axis of `batch`, one micro-batch in memory at a time."""
    count = jax.tree.leaves(batch)[0].shape[0]
    keys = None if key is None else jax.random.split(key, count)
    if count == 1:
        first = jax.tree.map(lambda leaf: leaf[0], (batch, keys))
        (total, metrics), gradients = grad(params, *first)
        return total, gradients, jax.tree.map(lambda leaf: leaf[None], metrics)

    def add(sums, micro):
        (value, metrics), gradients = grad(params, *micro)
        return jax.tree.map(jnp.add, sums, (value, gradients)), metrics

    zeros = (jnp.zeros(()), jax.tree.map(jnp.zeros_like, params))
    (total, gradients), metrics = jax.lax.scan(add, zeros, (batch, keys))
    return total, gradients, metrics
