"""Recurrences over an axis, which a loop over its places would compute."""

from __future__ import annotations

from functools import partial
from typing import Any

import jax
import jax.numpy as jnp


@partial(jax.custom_vjp, nondiff_argnums=(2,))
def linear_recurrence(decay: jax.Array, drive: jax.Array, axis: int) -> jax.Array:
    """h of h[t] = decay[t] h[t - 1] + drive[t] along an axis, from h[-1] = 0; all arrays are alike in shape.

    Its gradient is the same recurrence from the end: g[t] = dh[t] + decay[t + 1] g[t + 1] is that of drive[t], and
    g[t] h[t - 1] that of decay[t].
    """
    return _scan(decay, drive, axis, reverse=False)


def _scan(decay: jax.Array, drive: jax.Array, axis: int, reverse: bool) -> jax.Array:
    """One place after the other on a CPU; elsewhere log T passes over all of them, as a place is too little work."""
    how = {"axis": axis, "reverse": reverse}
    return jax.lax.platform_dependent(decay, drive, cpu=partial(_in_turn, **how), default=partial(_joined, **how))


def _in_turn(decay: jax.Array, drive: jax.Array, *, axis: int, reverse: bool) -> jax.Array:
    def step(state: jax.Array, given: tuple) -> tuple[jax.Array, jax.Array]:
        state = given[0] * state + given[1]
        return state, state

    rows = jnp.moveaxis(decay, axis, 0), jnp.moveaxis(drive, axis, 0)
    return jnp.moveaxis(jax.lax.scan(step, jnp.zeros_like(rows[1][0]), rows, reverse=reverse)[1], 0, axis)


def _joined(decay: jax.Array, drive: jax.Array, *, axis: int, reverse: bool) -> jax.Array:
    def join(first: Any, second: Any) -> Any:
        return first[0] * second[0], second[0] * first[1] + second[1]

    return jax.lax.associative_scan(join, (decay, drive), axis=axis, reverse=reverse)[1]


def _forward(decay: jax.Array, drive: jax.Array, axis: int) -> tuple[jax.Array, tuple]:
    states = _scan(decay, drive, axis, reverse=False)
    return states, (decay, states)


def _backward(axis: int, kept: tuple, pull: jax.Array) -> tuple[jax.Array, jax.Array]:
    decay, states = kept
    drive = _scan(_moved(decay, axis, -1), pull, axis, reverse=True)
    return drive * _moved(states, axis, 1), drive


def _moved(x: jax.Array, axis: int, places: int) -> jax.Array:
    """Each value `places` further along the axis; zeros where none comes to."""
    length = x.shape[axis]
    ends = jnp.zeros_like(jax.lax.slice_in_dim(x, 0, 1, axis=axis))
    if places > 0:
        return jnp.concatenate([ends, jax.lax.slice_in_dim(x, 0, length - 1, axis=axis)], axis)
    return jnp.concatenate([jax.lax.slice_in_dim(x, 1, length, axis=axis), ends], axis)


linear_recurrence.defvjp(_forward, _backward)

OPERATIONS = {"trl_jax.linear_recurrence.default": linear_recurrence}
