"""Schedule-free optimizers (Defazio et al. 2024, arXiv:2405.15682), with the paper's three sequences x, y and z.

Parameters are x, the average, which evaluations and checkpoints use; the state has z, which takes the steps. Gradients
are taken between the two, at y, which each step computes. In optax.contrib parameters are y, so that every evaluation
and checkpoint would have to compute x, and the weights of the average have no power of the step.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import numpy as np
import optax

from trl_jax.engine.optimizers.transforms import RunningState, bias

_TABLE = 4096  # steps whose rectification is computed in double precision


class ScheduleFreeState(NamedTuple):
    """The state, without the parameters x.

    Attributes:
        count: steps taken.
        weights: sum of the weights that the average has given to steps.
        highest: the highest rate of any step.
        fast: z.
        direction: state of the transformation of gradients.
    """

    count: jax.Array
    weights: jax.Array
    highest: jax.Array
    fast: dict[str, jax.Array]
    direction: Any


def point(b1: float, params: dict[str, jax.Array], state: ScheduleFreeState) -> dict[str, jax.Array]:
    """y, where the next gradient is taken."""
    return jax.tree.map(lambda x, z: b1 * x + (1 - b1) * z, params, state.fast)


def schedule_free(
    direction: optax.GradientTransformation, factor: Callable[[jax.Array], Any], *, b1: float, r: float, power: float
) -> optax.GradientTransformationExtraArgs:
    """Steps of z against `direction`, averaged into x with weights `(t + 1)**r * highest_rate**power`.

    Args:
        direction: transforms gradients before the rate is applied; its parameters are y.
        factor: finished steps -> factor of the rate.
    """

    def init(params):
        zero = jnp.zeros(())
        fast = jax.tree.map(jnp.copy, params)  # a copy: a step is donated both
        return ScheduleFreeState(jnp.zeros((), jnp.int32), zero, jnp.copy(zero), fast, direction.init(params))

    def update(updates, state, params, *, learning_rate, **extra):
        del extra
        rate = learning_rate * factor(state.count)
        directed, successor = direction.update(updates, state.direction, point(b1, params, state))
        fast = jax.tree.map(lambda z, d: z - rate * d, state.fast, directed)
        highest = jnp.maximum(state.highest, rate)
        weight = (state.count + 1.0) ** r * highest**power
        weights = state.weights + weight
        new = jnp.where(weights > 0, weight / jnp.where(weights > 0, weights, 1.0), 0.0)
        moved = jax.tree.map(lambda x, z: new * (z - x), params, fast)
        return moved, ScheduleFreeState(state.count + 1, weights, highest, fast, successor)

    return optax.GradientTransformationExtraArgs(init, update)


def over_root_mean_square(b2: float, eps: float) -> optax.GradientTransformation:
    """Adam without its first moment, which the average x replaces."""

    def init(params):
        return RunningState(jnp.zeros((), jnp.int32), {"squares": jax.tree.map(jnp.zeros_like, params)})

    def update(updates, state, params=None):
        del params
        count = optax.safe_increment(state.count)
        squares = jax.tree.map(lambda v, g: b2 * v + (1 - b2) * jnp.square(g), state.averages["squares"], updates)
        second = bias(b2, count)
        updates = jax.tree.map(lambda g, v: g / (jnp.sqrt(v / second) + eps), updates, squares)
        return updates, RunningState(count, {"squares": squares})

    return optax.GradientTransformation(init, update)


def warm(steps: int) -> Callable[[jax.Array], Any]:
    """A factor that rises from 1 / steps to 1, for a warmup within the optimizer."""
    return lambda count: jnp.minimum((count + 1) / steps, 1.0) if steps else 1.0


def rectified(b2: float) -> Callable[[jax.Array], Any]:
    """RAdam's factor (Liu et al. 2020, arXiv:1908.03265): 0 while the variance of the second moment is unknown."""
    longest = 2 / (1 - b2) - 1

    def shares(steps, decayed, numbers):
        length = longest - 2 * steps * decayed / (1 - decayed)
        known = length > 4
        length = numbers.where(known, length, 5.0)
        squared = (length - 4) * (length - 2) * longest / ((longest - 4) * (longest - 2) * length)
        return numbers.where(known, numbers.sqrt(squared), 0.0)

    steps = np.arange(1, _TABLE + 1, dtype=np.float64)
    table = shares(steps, b2**steps, np).astype(np.float32)  # in the beginning, differences of nearly equal numbers

    def share(count):
        later = shares(count + 1.0, 1 - bias(b2, count + 1), jnp)
        return jnp.where(count < _TABLE, jnp.asarray(table)[jnp.minimum(count, _TABLE - 1)], later)

    return share
