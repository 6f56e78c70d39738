"""Advantages of groups against TRL's torch functions and by hand in float64; mutants must be noticed."""

from __future__ import annotations

import warnings
from functools import partial

import jax
import jax.numpy as jnp
import numpy as np
import pytest
import torch

from trl_jax.losses import advantages
from trl_jax.losses.advantages import group_advantages, rloo_advantages

NAN = np.nan
G = 4
REWARDS = np.asarray([
    [1.0, 0.5], [0.0, NAN], [NAN, NAN], [2.0, -1.0],  # one row has no reward
    [1.0, 1.0], [1.0, 1.0], [1.0, 1.0], [1.0, 1.0],  # all equal
    [NAN, NAN], [NAN, 3.0], [NAN, NAN], [NAN, NAN],  # only one row has a reward
    [-1.5, 0.2], [0.3, 0.1], [0.8, -0.4], [2.2, 0.9],
], np.float32)  # fmt: skip
WEIGHTS = np.asarray([1.0, 0.3], np.float32)


def mean(values):
    kept = [value for value in values if not np.isnan(value)]
    return sum(kept) / len(kept) if kept else NAN


def std(values):
    kept = [value for value in values if not np.isnan(value)]
    if len(values) == 1:
        return 0.0
    return (sum((value - mean(kept)) ** 2 for value in kept) / (len(kept) - 1)) ** 0.5 if len(kept) > 1 else NAN


def groups(values, size):
    return [values[i : i + size] for i in range(0, len(values), size)]


def totals(rewards, weights):
    return [sum(w * r for w, r in zip(weights, row, strict=True) if not np.isnan(r))
            if not np.isnan(row).all() else NAN for row in rewards.astype(np.float64)]  # fmt: skip


def by_hand(rewards, size, weights, aggregation, scale_rewards):
    """Advantages and the standard deviations that divide them, in Python floats."""
    if aggregation == "normalize_then_sum":
        columns = [[w * (value - mean(some)) / (std(some) + 1e-4) for some in groups(column, size) for value in some]
                   for w, column in zip(weights, rewards.T.astype(np.float64), strict=True)]  # fmt: skip
        summed = np.nansum(columns, axis=0)
        summed[np.isnan(rewards).all(1)] = NAN
        deviations = [std(summed)] * len(summed)
        made = [(value - mean(summed)) / (deviations[0] + 1e-4) for value in summed]
    else:
        summed = totals(rewards, weights)
        of_groups = [group for group in groups(summed, size) for _ in group]
        deviations = [std(summed) if scale_rewards == "batch" else std(group) for group in of_groups]
        made = [value - mean(group) for value, group in zip(summed, of_groups, strict=True)]
        if scale_rewards != "none":
            made = [value / (deviation + 1e-4) for value, deviation in zip(made, deviations, strict=True)]
    return np.nan_to_num(made), np.asarray(deviations)


CASES = [("sum_then_normalize", "group"), ("sum_then_normalize", "batch"), ("sum_then_normalize", "none"),
         ("normalize_then_sum", "group")]  # fmt: skip


@pytest.mark.parametrize("kind", [np.asarray, jnp.asarray])
@pytest.mark.parametrize("size", [1, 2, 4, 8])
@pytest.mark.parametrize(("aggregation", "scale_rewards"), CASES)
def test_advantages_of_groups(aggregation, scale_rewards, size, kind):
    run = partial(group_advantages, num_generations=size, weights=WEIGHTS, aggregation=aggregation,
                  scale_rewards=scale_rewards)  # fmt: skip
    with warnings.catch_warnings():
        warnings.simplefilter("error")  # such as NumPy's for the mean of an empty slice
        made = (run if kind is np.asarray else jax.jit(run))(kind(REWARDS))
    wanted, deviations = by_hand(REWARDS, size, WEIGHTS, aggregation, scale_rewards)
    assert isinstance(made.advantages, type(kind(REWARDS))) and made.advantages.dtype == np.float32
    np.testing.assert_allclose(made.advantages, wanted, atol=2e-6, rtol=2e-6)
    np.testing.assert_allclose(made.rewards, totals(REWARDS, WEIGHTS), rtol=1e-6)
    assert made.zero_std.tolist() == [abs(deviation) < 1e-8 for deviation in deviations]


def by_torch(rewards, size, normalize):
    """Advantages of GRPO and RLOO with the functions that TRL uses."""
    from trl.trainer.utils import nanstd

    totals = torch.tensor(rewards).nansum(dim=1)
    group = totals.view(-1, size)
    mean, std = (each(group, dim=1, keepdim=True) for each in (torch.nanmean, nanstd))
    alone = totals - ((group.nansum(dim=1, keepdim=True) - group) / (size - 1)).view(-1)
    if normalize:
        alone = (alone - torch.nanmean(alone)) / (nanstd(alone) + 1e-4)
    return ((group - mean) / (std + 1e-4)).view(-1).numpy(), alone.numpy()


@pytest.mark.parametrize("size", [2, 3, 5, 8, 9, 16, 64])
def test_rewards_that_are_all_the_same_leave_what_torch_leaves(size):
    """For eight rewards of 0.3, torch's mean is off by one digit, and an advantage is 3e-4."""
    drawn = np.random.default_rng(size).random((16, 3)).astype(np.float32)
    rewards = np.concatenate([np.full((2 * size, 3), np.float32(0.1)), np.repeat(drawn, size, axis=0)])
    rewards[: 2 * size, 1:] = np.nan
    of_group, alone = by_torch(rewards, size, normalize=False)
    assert size != 8 or abs(of_group[0]) > 1e-5
    np.testing.assert_array_equal(rloo_advantages(rewards, size).advantages, alone)
    made = group_advantages(rewards, size).advantages
    np.testing.assert_array_equal(made == 0, of_group == 0)
    np.testing.assert_allclose(made, of_group, rtol=3e-7)  # torch's square root is not always correctly rounded
    _, normalized = by_torch(rewards, size, normalize=True)
    np.testing.assert_allclose(rloo_advantages(rewards, size, normalize=True).advantages, normalized, rtol=1e-6)


def test_a_single_function_needs_no_second_axis():
    one, other = (group_advantages(rewards, 2) for rewards in (REWARDS[12:, 0], REWARDS[12:, :1]))
    assert one.advantages.tolist() == other.advantages.tolist() and one.advantages[0] == -one.advantages[1] != 0


def test_a_batch_of_one():
    made = group_advantages(np.float32([3.0]), 1, scale_rewards="batch")
    assert (made.advantages, made.rewards, made.zero_std) == ([0.0], [3.0], [True])


KL = np.linspace(-0.4, 0.6, 16, dtype=np.float32)


@pytest.mark.parametrize("kind", [np.asarray, jnp.asarray])
@pytest.mark.parametrize("normalize", [False, True])
@pytest.mark.parametrize("reward_clip_range", [None, (-0.5, 1.1)])
@pytest.mark.parametrize("size", [1, 2, 4])
def test_advantages_that_leave_one_out(size, reward_clip_range, normalize, kind):
    run = partial(rloo_advantages, num_generations=size, weights=WEIGHTS, reward_clip_range=reward_clip_range,
                  beta=0.05, normalize=normalize)  # fmt: skip
    made = (run if kind is np.asarray else jax.jit(run))(kind(REWARDS), kl=kind(KL))
    summed = np.clip(totals(REWARDS, WEIGHTS), *(reward_clip_range or (None, None))) - 0.05 * KL.astype(np.float64)
    wanted = [group[i] - mean(np.delete(group, i)) if size > 1 else 0.0
              for group in groups(summed, size) for i in range(size)]  # fmt: skip
    if normalize:
        wanted = [(value - mean(wanted)) / (std(wanted) + 1e-4) for value in wanted]
    np.testing.assert_allclose(made.advantages, np.nan_to_num(wanted), atol=3e-6, rtol=2e-6)
    np.testing.assert_allclose(made.rewards, totals(REWARDS, WEIGHTS), rtol=1e-6)
    assert made.zero_std.tolist() == [size == 1] * 16


def test_names_that_are_unknown():
    with pytest.raises(ValueError, match="^Invalid value for scale_rewards: std. Must be one of 'batch', 'group', or "):
        group_advantages(REWARDS, G, scale_rewards="std")
    with pytest.raises(ValueError, match="^Invalid multi_objective_aggregation: max. Must be 'sum_then_normalize' or "):
        group_advantages(REWARDS, G, aggregation="max")


def population(xp, values, axis=1):
    return xp.sqrt(xp.nanmean((values - advantages._nanmean(xp, values, axis)) ** 2, axis=axis, keepdims=True))


def under_the_root(xp, values, axis=1):
    return xp.sqrt(of_samples(xp, values, axis) ** 2 + 1e-4) - 1e-4


of_samples = advantages._nanstd


@pytest.mark.filterwarnings("ignore:Mean of empty slice")
@pytest.mark.parametrize("wrong", [population, under_the_root])
@pytest.mark.parametrize(("aggregation", "scale_rewards"), [case for case in CASES if case[1] != "none"])
def test_a_mistake_is_noticed(wrong, aggregation, scale_rewards, monkeypatch):
    monkeypatch.setattr(advantages, "_nanstd", wrong)
    made = group_advantages(REWARDS, G, weights=WEIGHTS, aggregation=aggregation, scale_rewards=scale_rewards)
    wanted, _ = by_hand(REWARDS, G, WEIGHTS, aggregation, scale_rewards)
    assert np.abs(made.advantages - wanted).max() > 2e-5
