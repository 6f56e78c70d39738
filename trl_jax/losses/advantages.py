"""Advantages of completions by the rewards of all completions of the same prompt. NumPy or JAX, float32; of NumPy's
arrays they are to the bit what torch computes on a CPU, which matters where all rewards of a prompt are the same.
"""

from __future__ import annotations

from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import numpy as np

from trl_jax.core.torch_random import torch_sum

_ADDED = 1e-4  # to a standard deviation that is divided by
_ZERO = 1e-8  # a standard deviation up to this is none


class Advantages(NamedTuple):
    """Arrays of the kind that came in, `[X]` each.

    advantages: float32; 0 of a completion without any reward.
    rewards: float32, the weighted sum of a completion's rewards, NaN where it has none.
    zero_std: bool, whether the rewards that a completion was compared with are all the same.
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

    With $r_{ik}$ the reward of completion $i$ by function $k$, mean and standard deviation over the values that are not
    NaN, the latter with $n - 1$ in the denominator:

    | aggregation | advantage | from |
    | --- | --- | --- |
    | sum_then_normalize | $r_i - mean(group)$ with $r_i = \sum_k w_k r_{ik}$, divided by $std + 10^{-4}$ | GRPO |
    | normalize_then_sum | $s_i = \sum_k w_k (r_{ik} - mean_k(group)) / (std_k(group) + 10^{-4})$, then
      $(s_i - mean(all)) / (std(all) + 10^{-4})$ | GDPO, arXiv:2601.05242 |

    Args:
        rewards: `[X, F]` of F functions, or `[X]`; NaN where a function does not apply. Completions of a prompt stand
            together, `num_generations` of them.
        weights: `[F]`; None weighs all as 1.
        scale_rewards: the standard deviation that sum_then_normalize divides by: of the "group", of the "batch"
            (arXiv:2508.08221), or "none" (Dr. GRPO, arXiv:2503.20783).

    Raises:
        ValueError: an unknown aggregation or scale_rewards.
    """
    xp, rewards, weights = _arrays(rewards, weights)
    total = _weighted(xp, rewards, weights)
    if aggregation == "sum_then_normalize":
        advantages, std = _sum_then_normalize(xp, total, num_generations, scale_rewards)
    elif aggregation == "normalize_then_sum":
        advantages, std = _normalize_then_sum(xp, rewards, weights, num_generations)
    else:
        raise ValueError(
            f"Invalid multi_objective_aggregation: {aggregation}. Must be 'sum_then_normalize' or 'normalize_then_sum'."
        )
    return Advantages(_or_zero(xp, advantages), total, xp.abs(std) <= _ZERO)


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
    r"""Advantages over the mean of the other completions of the prompt (RLOO, arXiv:2402.14740, section 3.3).

    $$ A_i = r_i - \frac{1}{n - 1} \sum_{j \neq i} r_j,
       \quad r_i = clip(\sum_k w_k r_{ik}) - \beta \sum_t (\log \pi_{old} - \log \pi_{ref})_{it} $$

    over the $n$ completions of the prompt that have a reward.

    Args:
        rewards, num_generations, weights: as in `group_advantages`.
        reward_clip_range: bounds of the weighted sum.
        kl: `[X]`, the sum over a completion's tokens of old - reference log-probability.
        normalize: divide by the standard deviation of all advantages, once their mean is taken off.
    """
    xp, rewards, weights = _arrays(rewards, weights)
    total = rewarded = _weighted(xp, rewards, weights)
    if reward_clip_range is not None:
        rewarded = xp.clip(rewarded, *map(xp.float32, reward_clip_range))
    if kl is not None and beta:
        rewarded = rewarded - xp.float32(beta) * xp.asarray(kl, xp.float32)
    group = rewarded.reshape(-1, num_generations)
    if num_generations == 1:  # in evaluations
        std, advantages = xp.zeros_like(group), xp.zeros_like(rewarded)
    else:
        std, count = _std(xp, group), xp.sum(~xp.isnan(group), axis=1, keepdims=True)
        others = _total(xp, group) - group
        advantages = (group - others / xp.where(count > 1, count - 1, xp.nan).astype(xp.float32)).reshape(-1)
    if normalize:
        advantages = (advantages - _mean(xp, advantages, None)) / (_std(xp, advantages, None) + xp.float32(_ADDED))
    zero = xp.broadcast_to(xp.abs(std) <= _ZERO, group.shape).reshape(-1)
    return Advantages(_or_zero(xp, advantages), total, zero)


def _sum_then_normalize(xp: Any, total: Any, num_generations: int, scale_rewards: str) -> tuple[Any, Any]:
    if scale_rewards not in ("batch", "group", "none"):
        raise ValueError(
            f"Invalid value for scale_rewards: {scale_rewards}. Must be one of 'batch', 'group', or 'none'."
        )
    group = total.reshape(-1, num_generations)
    std = _std(xp, total, None) if scale_rewards == "batch" else _std(xp, group)
    advantages = group - _mean(xp, group)
    if scale_rewards != "none":
        advantages = advantages / (std + xp.float32(_ADDED))
    return advantages.reshape(-1), xp.broadcast_to(std, group.shape).reshape(-1)


def _normalize_then_sum(xp: Any, rewards: Any, weights: Any, num_generations: int) -> tuple[Any, Any]:
    group = rewards.reshape(-1, num_generations, rewards.shape[1])
    normalized = (group - _mean(xp, group)) / (_std(xp, group) + xp.float32(_ADDED))
    none = xp.all(xp.isnan(rewards), axis=1)
    total = xp.where(none, xp.float32(xp.nan), _sum(xp, normalized.reshape(rewards.shape), weights))
    std = _std(xp, total, None)
    advantages = (total - _mean(xp, total, None)) / (std + xp.float32(_ADDED))
    return advantages, xp.broadcast_to(std, total.shape)


def _arrays(rewards: Any, weights: Any) -> tuple[Any, Any, Any]:
    """The module of the rewards' arrays, rewards `[X, F]` and weights `[F]`."""
    xp = jnp if isinstance(rewards, jax.Array) else np
    rewards = xp.asarray(rewards, xp.float32)
    rewards = rewards[:, None] if rewards.ndim == 1 else rewards
    return xp, rewards, xp.ones(rewards.shape[1], xp.float32) if weights is None else xp.asarray(weights, xp.float32)


def _weighted(xp: Any, rewards: Any, weights: Any) -> Any:
    none = xp.all(xp.isnan(rewards), axis=1)
    return xp.where(none, xp.float32(xp.nan), _sum(xp, rewards, weights))


def _sum(xp: Any, rewards: Any, weights: Any) -> Any:
    """`[X]` of `[X, F]`, of what is not NaN."""
    return _total(xp, rewards * weights)[:, 0]


def _or_zero(xp: Any, values: Any) -> Any:
    return xp.where(xp.isnan(values), xp.float32(0), values)


def _total(xp: Any, values: Any, axis: int | None = 1) -> Any:
    """The sum of the values that are not NaN; the axis, None for all of them, stays."""
    values = _or_zero(xp, values)
    if xp is jnp:
        return jnp.sum(values, axis=axis, keepdims=True)
    total = torch_sum(np.ascontiguousarray(values), axis)
    return np.reshape(total, (1,) * values.ndim) if axis is None else np.expand_dims(total, axis)


def _mean(xp: Any, values: Any, axis: int | None = 1) -> Any:
    """Of the values that are not NaN, NaN where there is none; the axis, None for all of them, stays."""
    count = xp.sum(~xp.isnan(values), axis=axis, keepdims=True).astype(xp.float32)
    return _total(xp, values, axis) / xp.where(count > 0, count, xp.float32(xp.nan))


def _std(xp: Any, values: Any, axis: int | None = 1) -> Any:
    """Of the values that are not NaN, with n - 1; NaN below two of them, but 0 where there is one value in all."""
    if (values.size if axis is None else values.shape[axis]) == 1:
        return xp.zeros_like(values)
    count, deviation = xp.sum(~xp.isnan(values), axis=axis, keepdims=True), values - _mean(xp, values, axis)
    correction = count.astype(xp.float32) / xp.where(count > 1, count - 1, xp.nan).astype(xp.float32)
    return xp.sqrt(_mean(xp, deviation * deviation, axis) * correction)
