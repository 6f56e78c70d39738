"""The optimizer step: one donated jit."""

from __future__ import annotations

from collections.abc import Callable
from functools import partial
from typing import Any

import jax
import jax.numpy as jnp
import optax

from trl_jax.engine.optimizers import Optimizer
from trl_jax.engine.spmd import ShardedStep
from trl_jax.engine.transforms import global_norm

Params = dict[str, jax.Array]
NOTHING: Params = {}
Loss = Callable[[Params, Any, jax.Array | None], tuple[jax.Array, dict[str, jax.Array]]]


def make_step(
    loss: Loss, tx: Optimizer, sharded_step: ShardedStep | None = None, compiler_options: dict[str, Any] | None = None
) -> Callable:
    """`step(params, opt_state, batch, learning_rate, key, frozen={}) -> (params, opt_state, metrics)`, jitted.

    params and opt_state are donated: the arrays passed in are gone afterwards. What is `frozen` reaches the loss
    beside the params and stays as it is, without gradient or moments. Where the loss or the gradient is no number,
    both come back as they were: AdamW would carry one NaN through every later step.

    Args:
        loss: `(params and frozen, micro_batch, key) -> (loss, metrics)`. The weights in a batch make the losses of
            its micro-batches add up to the step's.
        tx: what gradients do to parameters, and where they are taken.
        spread: how the run lies on several devices; None where there is one.
        compiler_options: XLA's, as of jax.jit.

    Every leaf of `batch` has a leading axis of micro-batches, and on several devices one of shards behind it; metrics
    come back with the same axis (the two in one), beside `loss` (their sum) and `grad_norm` (before clipping).
    """

    def of_all(params, frozen, *micro):
        return loss(frozen | params, *micro)

    if sharded_step is None:
        gradients_of, norm_of = partial(_accumulate, jax.value_and_grad(of_all, has_aux=True)), global_norm
    else:
        gradients_of, norm_of = sharded_step.gradients(_accumulate, of_all), optax.global_norm

    def step(params, opt_state, batch, learning_rate, key, frozen=NOTHING):
        total, gradients, metrics = gradients_of(tx.point(params, opt_state), frozen, batch, key)
        norm = norm_of(gradients)
        metrics |= {"loss": total, "grad_norm": norm}
        good = jnp.isfinite(total) & jnp.isfinite(norm)
        return *updated(tx, good, params, opt_state, gradients, norm, learning_rate), metrics

    where = {} if sharded_step is None else {"out_shardings": sharded_step.after_step(tx)}
    return jax.jit(step, donate_argnums=(0, 1), compiler_options=compiler_options, **where)


def updated(
    tx: Optimizer,
    good: jax.Array,
    params: Params,
    opt_state: Any,
    gradients: Params,
    norm: jax.Array,
    learning_rate: jax.Array,
) -> tuple[Params, Any]:
    """The successors of params and state where the step is `good`; else both as they are. `norm`: the gradients'.

    Both ways give the same. XLA for CPUs copies moments that are selected, which is as much memory again, but not those
    in a branch; a GPU would have its host wait for a branch.
    """

    def new(params, state, gradients):
        updates, successor = tx.update(gradients, state, params, learning_rate=learning_rate, grad_norm=norm)
        return optax.apply_updates(params, updates), successor

    def old(params, state, gradients):
        return params, state

    def selected(params, state, gradients):
        both = new(params, state, gradients), (params, state)
        return jax.tree.map(lambda one, other: jnp.where(good, one, other), *both)

    branch = partial(jax.lax.cond, good, new, old)
    return jax.lax.platform_dependent(params, opt_state, gradients, cpu=branch, default=selected)


def _accumulate(grad, params, frozen, batch, key):
    """Loss, gradients and metrics over the leading axis of `batch`, one micro-batch in memory at a time."""
    count = jax.tree.leaves(batch)[0].shape[0]
    keys = None if key is None else jax.random.split(key, count)
    if count == 1:
        first = jax.tree.map(lambda leaf: leaf[0], (batch, keys))
        (total, metrics), gradients = grad(params, frozen, *first)
        return total, gradients, jax.tree.map(lambda leaf: leaf[None], metrics)

    def add(sums, micro):
        (value, metrics), gradients = grad(params, frozen, *micro)
        return jax.tree.map(jnp.add, sums, (value, gradients)), metrics

    zeros = (jnp.zeros(()), jax.tree.map(jnp.zeros_like, params))
    (total, gradients), metrics = jax.lax.scan(add, zeros, (batch, keys))
    return total, gradients, metrics
