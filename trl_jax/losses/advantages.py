"""Advantages of completions, relative to the rewards of the other completions for the same prompt.

Functions take NumPy or JAX arrays and compute in float32. With NumPy the results match torch on a CPU bit for bit,
which matters when all rewards of a group are equal: rounding decides whether the standard deviation is exactly 0.
"""

from __future__ import annotations

from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import numpy as np

from trl_jax.core.torch_random import torch_sum

_EPSILON = 1e-4  # added to a standard deviation before dividing by it
_ZERO_STD = 1e-8  # a standard deviation up to this counts as zero


class Advantages(NamedTuple):
    """Arrays `[X]`, NumPy or JAX like the rewards.

    advantages: float32; 0 for a completion without any reward.
    rewards: float32, the weighted sum of a completion's rewards; NaN if it has none.
    zero_std: bool, whether all rewards that the completion was compared with are equal.
    """

    advantages: Any
    rewards: Any
    zero_std: Any


def group_advantages(
    rewards: Any,
    num_generations: int,
    *,
    weights: Any = None,
    aggregation: str = "sum_then_normalize",
    scale_rewards: str = "group",
) -> Advantages:
    r"""Advantages relative to a prompt's group of completions (GRPO, arXiv:2402.03300, section 4.1.2).

    With $r_{ik}$ the reward of completion $i$ from function $k$. Means and standard deviations ignore NaN, and
    standard deviations have $n - 1$ in the denominator.

    | aggregation | advantage | from |
    | --- | --- | --- |
    | sum_then_normalize | $r_i - mean(group)$ with $r_i = \sum_k w_k r_{ik}$, divided by $std + 10^{-4}$ | GRPO |
    | normalize_then_sum | $s_i = \sum_k w_k (r_{ik} - mean_k(group)) / (std_k(group) + 10^{-4})$, then
      $(s_i - mean(all)) / (std(all) + 10^{-4})$ | GDPO, arXiv:2601.05242 |

    Args:
        rewards: `[X, F]` for F reward functions, or `[X]`; NaN where a function does not apply. The `num_generations`
            completions of a prompt are consecutive.
        weights: `[F]`; None: all 1.
        scale_rewards: the standard deviation that sum_then_normalize divides by: over the "group", over the "batch"
            (arXiv:2508.08221), or "none" (Dr. GRPO, arXiv:2503.20783).

    Raises:
        ValueError: unknown aggregation or scale_rewards.
    """
    xp, rewards, weights = _as_arrays(rewards, weights)
    total = _weighted_sum(xp, rewards, weights)
    if aggregation == "sum_then_normalize":
        advantages, std = _sum_then_normalize(xp, total, num_generations, scale_rewards)
    elif aggregation == "normalize_then_sum":
        advantages, std = _normalize_then_sum(xp, rewards, weights, num_generations)
    else:
        raise ValueError(
            f"Invalid multi_objective_aggregation: {aggregation}. Must be 'sum_then_normalize' or 'normalize_then_sum'."
        )
    return Advantages(_nan_to_zero(xp, advantages), total, xp.abs(std) <= _ZERO_STD)


def population_advantages(rewards: np.ndarray, num_generations: int) -> Advantages:
    r"""Advantages relative to a prompt's group as in TRL's AsyncGRPO: $(r_i - mean) / (std + 10^{-8})$, in float64.

    The standard deviation has $n$ in the denominator. Means and standard deviations ignore NaN.

    Args:
        rewards: `[X, F]`, summed over F; NaN where a function does not apply. The `num_generations` completions of a
            prompt are consecutive.
    """
    rewards = np.asarray(rewards, np.float64)
    total = np.where(np.isnan(rewards).all(axis=1), np.nan, np.nansum(rewards, axis=1))
    group = total.reshape(-1, num_generations)
    count = np.maximum(np.sum(~np.isnan(group), axis=1, keepdims=True), 1)
    deviation = group - np.nansum(group, axis=1, keepdims=True) / count
    std = np.sqrt(np.nansum(deviation**2, axis=1, keepdims=True) / count)
    advantages = np.nan_to_num(deviation / (std + _ZERO_STD), nan=0.0).reshape(-1)
    zero = np.broadcast_to(std <= _ZERO_STD, group.shape).reshape(-1)
    return Advantages(advantages.astype(np.float32), total.astype(np.float32), zero)


def rloo_advantages(
    rewards: Any,
    num_generations: int,
    *,
    weights: Any = None,
    reward_clip_range: tuple[float, float] | None = None,
    kl: Any = None,
    beta: float = 0.0,
    normalize: bool = False,
) -> Advantages:
    r"""Advantages over the leave-one-out mean of the prompt's other completions (RLOO, arXiv:2402.14740, section 3.3).

    $$ A_i = r_i - \frac{1}{n - 1} \sum_{j \neq i} r_j,
       \quad r_i = clip(\sum_k w_k r_{ik}) - \beta \sum_t (\log \pi_{old} - \log \pi_{ref})_{it} $$

    over the $n$ completions of the prompt that have a reward.

    Args:
        rewards, num_generations, weights: as in `group_advantages`.
        reward_clip_range: bounds of the weighted reward sum.
        kl: `[X]`, old - reference log-probability, summed over a completion's tokens.
        normalize: subtract the mean of all advantages and divide by their standard deviation.
    """
    xp, rewards, weights = _as_arrays(rewards, weights)
    total = rewarded = _weighted_sum(xp, rewards, weights)
    if reward_clip_range is not None:
        rewarded = xp.clip(rewarded, *map(xp.float32, reward_clip_range))
    if kl is not None and beta:
        rewarded = rewarded - xp.float32(beta) * xp.asarray(kl, xp.float32)
    group = rewarded.reshape(-1, num_generations)
    if num_generations == 1:  # only in evaluations
        std, advantages = xp.zeros_like(group), xp.zeros_like(rewarded)
    else:
        std, count = _nanstd(xp, group), xp.sum(~xp.isnan(group), axis=1, keepdims=True)
        others = _nansum(xp, group) - group
        advantages = (group - others / xp.where(count > 1, count - 1, xp.nan).astype(xp.float32)).reshape(-1)
    if normalize:
        advantages = (advantages - _nanmean(xp, advantages, None)) / (
            _nanstd(xp, advantages, None) + xp.float32(_EPSILON)
        )
    zero = xp.broadcast_to(xp.abs(std) <= _ZERO_STD, group.shape).reshape(-1)
    return Advantages(_nan_to_zero(xp, advantages), total, zero)


def _sum_then_normalize(xp: Any, total: Any, num_generations: int, scale_rewards: str) -> tuple[Any, Any]:
    if scale_rewards not in ("batch", "group", "none"):
        raise ValueError(
            f"Invalid value for scale_rewards: {scale_rewards}. Must be one of 'batch', 'group', or 'none'."
        )
    group = total.reshape(-1, num_generations)
    std = _nanstd(xp, total, None) if scale_rewards == "batch" else _nanstd(xp, group)
    advantages = group - _nanmean(xp, group)
    if scale_rewards != "none":
        advantages = advantages / (std + xp.float32(_EPSILON))
    return advantages.reshape(-1), xp.broadcast_to(std, group.shape).reshape(-1)


def _normalize_then_sum(xp: Any, rewards: Any, weights: Any, num_generations: int) -> tuple[Any, Any]:
    group = rewards.reshape(-1, num_generations, rewards.shape[1])
    normalized = (group - _nanmean(xp, group)) / (_nanstd(xp, group) + xp.float32(_EPSILON))
    unrewarded = xp.all(xp.isnan(rewards), axis=1)
    total = xp.where(unrewarded, xp.float32(xp.nan), _sum(xp, normalized.reshape(rewards.shape), weights))
    std = _nanstd(xp, total, None)
    advantages = (total - _nanmean(xp, total, None)) / (std + xp.float32(_EPSILON))
    return advantages, xp.broadcast_to(std, total.shape)


def _as_arrays(rewards: Any, weights: Any) -> tuple[Any, Any, Any]:
    """The array module (NumPy or JAX), rewards as `[X, F]` and weights as `[F]`."""
    xp = jnp if isinstance(rewards, jax.Array) else np
    rewards = xp.asarray(rewards, xp.float32)
    rewards = rewards[:, None] if rewards.ndim == 1 else rewards
    return xp, rewards, xp.ones(rewards.shape[1], xp.float32) if weights is None else xp.asarray(weights, xp.float32)


def _weighted_sum(xp: Any, rewards: Any, weights: Any) -> Any:
    unrewarded = xp.all(xp.isnan(rewards), axis=1)
    return xp.where(unrewarded, xp.float32(xp.nan), _sum(xp, rewards, weights))


def _sum(xp: Any, rewards: Any, weights: Any) -> Any:
    """Weighted sum of `[X, F]` over F, ignoring NaN: `[X]`."""
    return _nansum(xp, rewards * weights)[:, 0]


def _nan_to_zero(xp: Any, values: Any) -> Any:
    return xp.where(xp.isnan(values), xp.float32(0), values)


def _nansum(xp: Any, values: Any, axis: int | None = 1) -> Any:
    """Sum ignoring NaN, keeping the reduced axis; axis=None reduces all of them."""
    values = _nan_to_zero(xp, values)
    if xp is jnp:
        return jnp.sum(values, axis=axis, keepdims=True)
    total = torch_sum(np.ascontiguousarray(values), axis)
    return np.reshape(total, (1,) * values.ndim) if axis is None else np.expand_dims(total, axis)


def _nanmean(xp: Any, values: Any, axis: int | None = 1) -> Any:
    """Mean ignoring NaN, keeping the reduced axis; NaN if every value is NaN. axis=None reduces all axes."""
    count = xp.sum(~xp.isnan(values), axis=axis, keepdims=True).astype(xp.float32)
    return _nansum(xp, values, axis) / xp.where(count > 0, count, xp.float32(xp.nan))


def _nanstd(xp: Any, values: Any, axis: int | None = 1) -> Any:
    """Standard deviation ignoring NaN, with n - 1; NaN for fewer than two values, but 0 along an axis of length 1."""
    if (values.size if axis is None else values.shape[axis]) == 1:
        return xp.zeros_like(values)
    count, deviation = xp.sum(~xp.isnan(values), axis=axis, keepdims=True), values - _nanmean(xp, values, axis)
    correction = count.astype(xp.float32) / xp.where(count > 1, count - 1, xp.nan).astype(xp.float32)
    return xp.sqrt(_nanmean(xp, deviation * deviation, axis) * correction)
