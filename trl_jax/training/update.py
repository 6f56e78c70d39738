"""The optimizer step: one donated jit."""

from __future__ import annotations

from collections.abc import Callable
from functools import partial
from typing import Any

import jax
import jax.numpy as jnp
import optax

from trl_jax.training.devices import ShardedStep
from trl_jax.training.optimizers import Optimizer, global_norm

Params = dict[str, jax.Array]
NO_PARAMS: Params = {}
Loss = Callable[[Params, Any, jax.Array | None], tuple[jax.Array, dict[str, jax.Array]]]

_LARGEST_UPDATE = 1e19  # the squares of larger numbers are infinite in float32


def make_step(
    loss: Loss, tx: Optimizer, sharded_step: ShardedStep | None = None, compiler_options: dict[str, Any] | None = None
) -> Callable:
    """`step(params, opt_state, batch, learning_rate, key, frozen={}) -> (params, opt_state, metrics)`, jitted.

    params and opt_state are donated: the arrays passed in are gone afterwards. `frozen` parameters reach the loss
    together with the params and stay as they are, without gradient or moments. Where the loss, the gradient or the
    update is not finite, params and opt_state come back as they were: AdamW would carry one NaN through every later
    step.

    Args:
        loss: `(params and frozen, micro_batch, key) -> (loss, metrics)`. The weights in a batch make the losses of
            its micro-batches add up to the step's.
        tx: the optimizer, which also says at which point gradients are taken.
        sharded_step: takes the gradients on several devices; None where there is one.
        compiler_options: XLA's, as of jax.jit.

    Every leaf of `batch` has a leading axis of micro-batches, and on several devices one of shards behind it; metrics
    come back with the same axis (the two in one), besides `loss` (their sum), `grad_norm` (before clipping) and
    `updated` (false where params and opt_state came back as they were).
    """

    def loss_of_all(params, frozen, *micro):
        return loss(frozen | params, *micro)

    if sharded_step is None:
        gradients_of, norm_of = partial(_accumulate, jax.value_and_grad(loss_of_all, has_aux=True)), global_norm
    else:
        gradients_of, norm_of = sharded_step.gradients(_accumulate, loss_of_all), optax.global_norm

    def step(params, opt_state, batch, learning_rate, key, frozen=NO_PARAMS):
        total, gradients, metrics = gradients_of(tx.point(params, opt_state), frozen, batch, key)
        norm = norm_of(gradients)
        finite = jnp.isfinite(total) & jnp.isfinite(norm)
        params, opt_state, applied = updated(tx, finite, params, opt_state, gradients, norm, learning_rate)
        return params, opt_state, metrics | {"loss": total, "grad_norm": norm, "updated": applied}

    shardings = {} if sharded_step is None else {"out_shardings": sharded_step.after_step(tx)}
    return jax.jit(step, donate_argnums=(0, 1), compiler_options=compiler_options, **shardings)


def updated(
    tx: Optimizer,
    finite: jax.Array,
    params: Params,
    opt_state: Any,
    gradients: Params,
    norm: jax.Array,
    learning_rate: jax.Array,
) -> tuple[Params, Any, jax.Array]:
    """Apply one update if it is finite.

    On CPUs the update is a branch: XLA would copy moments that are selected, which is as much memory again. On a GPU
    they are selected, for its host would wait for a branch. Both give the same numbers.

    Args:
        finite: whether loss and gradients are.
        norm: the gradients' global norm.

    Returns:
        The new params and state, or those passed in; and which of the two, as a scalar bool.
    """

    def update(params, state, gradients):
        return tx.update(gradients, state, params, learning_rate=learning_rate, grad_norm=norm)

    def new(params, state, gradients):
        updates, new_state = update(params, state, gradients)
        return optax.apply_updates(params, updates), new_state

    def old(params, state, gradients):
        return params, state

    if tx.safe_rate is None:
        applied = finite & _is_finite(update(params, opt_state, gradients)[0])
    else:
        applied = finite & (learning_rate <= tx.safe_rate)

    def selected(params, state, gradients):
        both = new(params, state, gradients), (params, state)
        return jax.tree.map(lambda one, other: jnp.where(applied, one, other), *both)

    branch = partial(jax.lax.cond, applied, new, old)
    return *jax.lax.platform_dependent(params, opt_state, gradients, cpu=branch, default=selected), applied


def _is_finite(updates: Params) -> jax.Array:
    """Whether they have no NaN, no infinity, and no number so large that their norm would be infinite. On CPUs, XLA
    fuses this comparison with the computation of the update; for a sum it would write the whole update to memory."""
    within = [jnp.all(jnp.abs(leaf) < _LARGEST_UPDATE) for leaf in jax.tree.leaves(updates)]
    return jnp.all(jnp.stack(within))


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
