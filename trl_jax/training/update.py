"""The optimizer step as one jitted function that donates its state."""

from __future__ import annotations

from collections.abc import Callable
from functools import partial
from typing import Any

import jax
import jax.numpy as jnp
import optax

from trl_jax.mesh.mesh import platform
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

    params and opt_state are donated. If the loss, a gradient or the update is not finite, both are returned unchanged;
    otherwise AdamW would carry a NaN through every later step. `frozen` parameters are merged into the params for the
    loss, but have no gradients or moments and are not updated.

    Every leaf of `batch` has a leading axis of micro-batches, on several devices followed by an axis of shards. The
    metrics from the loss have the same leading axis (micro-batches and shards flattened into one). Added to them are
    the scalars `loss` (their sum), `grad_norm` (before clipping) and `updated` (False if params and opt_state were
    returned unchanged).

    Args:
        loss: `(params | frozen, micro_batch, key) -> (loss, metrics)`. The batch's weights are such that the losses of
            the micro-batches add up to the loss of the step.
        tx: the optimizer; `tx.point` returns the parameters at which gradients are taken.
        sharded_step: computes the gradients on several devices; None on a single device.
        compiler_options: passed to `jax.jit`.
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
        options = {"learning_rate": learning_rate, **tx.options_for(batch)}
        params, opt_state, applied = updated(tx, finite, params, opt_state, gradients, norm, **options)
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
    **options: Any,
) -> tuple[Params, Any, jax.Array]:
    """Apply one update if it is finite.

    On CPUs this is a `lax.cond`: with `jnp.where`, XLA would copy the moments and double their memory. On GPUs and TPUs
    it is a `jnp.where`, because a `cond` makes a GPU's host wait for the predicate. The results are the same.

    Args:
        finite: whether the loss and the gradients are finite.
        norm: the gradients' global norm.
        options: further arguments of `tx.update`.

    Returns:
        The new params and state, or the given ones, and a scalar bool: whether the update was applied.
    """

    def update(params, state, gradients):
        return tx.update(gradients, state, params, learning_rate=learning_rate, grad_norm=norm, **options)

    def new(params, state, gradients):
        updates, new_state = update(params, state, gradients)
        return optax.apply_updates(params, updates), new_state

    def old(params, state, gradients):
        return params, state

    if tx.safe_rate is None:
        applied = finite & _is_finite(update(params, opt_state, gradients)[0])
    else:
        applied = finite & (learning_rate <= tx.safe_rate)

    if platform() == "cpu":
        return *jax.lax.cond(applied, new, old, params, opt_state, gradients), applied
    both = new(params, opt_state, gradients), (params, opt_state)
    return *jax.tree.map(lambda x, y: jnp.where(applied, x, y), *both), applied


def _is_finite(updates: Params) -> jax.Array:
    """Whether all updates are finite, and small enough that their squares are finite, too. On CPUs, XLA fuses this
    comparison into the computation of the update; for a norm it would write the whole update to memory first."""
    within = [jnp.all(jnp.abs(leaf) < _LARGEST_UPDATE) for leaf in jax.tree.leaves(updates)]
    return jnp.all(jnp.stack(within))


def _accumulate(grad, params, frozen, batch, key):
    """Sum loss and gradients, and stack metrics, over the leading axis of `batch`: a scan over micro-batches."""
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
