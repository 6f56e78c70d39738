"""Metrics of a generation have TRL's names, order and values, and their means skip missing values."""

from __future__ import annotations

import math

import numpy as np
import pytest

from trl_jax.losses.advantages import group_advantages

metrics = pytest.importorskip("trl_jax.rollout.completions_log")
NAN = math.nan


def test_lengths():
    found = dict(metrics.length_metrics([3, 8, 5, 8], np.asarray([False, True, False, True])))
    assert list(found.items()) == [
        ("completions/mean_length", 6.0), ("completions/min_length", 3.0), ("completions/max_length", 8.0),
        ("completions/clipped_ratio", 0.5), ("completions/mean_terminated_length", 4.0),
        ("completions/min_terminated_length", 3.0), ("completions/max_terminated_length", 5.0),
    ]  # fmt: skip
    none = dict(metrics.length_metrics([8, 8], np.asarray([True, True])))
    assert [none[f"completions/{kind}_terminated_length"] for kind in ("mean", "min", "max")] == [0, 0, 0]


REWARDS = np.asarray([[1, NAN], [3, 2], [NAN, NAN], [4, NAN], [5, NAN], [5, NAN]], np.float32)


def test_rewards():
    torch = pytest.importorskip("torch")
    nanstd = pytest.importorskip("trl.trainer.utils").nanstd
    judged = group_advantages(REWARDS, 2, weights=[1.0, 0.5])
    found = dict(metrics.reward_metrics(["a", "b"], REWARDS, judged))
    assert list(found) == ["rewards/a/mean", "rewards/a/std", "rewards/b/mean", "rewards/b/std", "reward", "reward_std",
                           "frac_reward_zero_std"]  # fmt: skip
    columns = [torch.tensor(column) for column in (*REWARDS.T, np.asarray([1, 4, NAN, 4, 5, 5], np.float32))]
    wanted = [value for column in columns for value in (torch.nanmean(column).item(), nanstd(column).item())]
    np.testing.assert_allclose(list(found.values()), [*wanted, 2 / 6], rtol=1e-6)


@pytest.mark.parametrize("values", [[1, math.inf, 3], [-math.inf, 2, NAN, 2], [math.inf, -math.inf], [math.inf]])
def test_an_infinite_reward_is_infinitely_far_from_the_others(values):
    torch = pytest.importorskip("torch")
    nanstd = pytest.importorskip("trl.trainer.utils").nanstd
    rewards = np.asarray(values, np.float32)[:, None]
    judged = group_advantages(rewards, len(values))
    found = dict(metrics.reward_metrics(["a"], rewards, judged))
    np.testing.assert_equal(found["rewards/a/std"], nanstd(torch.tensor(rewards[:, 0])).item())


def test_means_since_the_last_log():
    log = metrics.MetricLog()
    for values in ([("b", 1.0), ("a", NAN)], [("b", 2.0), ("c", 4.0), ("a", NAN)], [("c", NAN)]):
        log.add(values)
    log.set("num_tokens", 5.0)
    log.set("num_tokens", 9.0)
    values = log.values
    assert list(log.take().items()) == [("b", 1.5), ("a", None), ("c", 4.0), ("num_tokens", 9.0)]
    assert log.take() == {} and log.values is values


def test_metrics_of_the_loss_come_first_in_the_same_lists():
    log = metrics.MetricLog()
    log.extend({"reward": [1.0], "kl": [2.0]})
    kept, kl = log.values, log.values["kl"]
    log.extend({"entropy": [3.0], "kl": [4.0]}, first=True)
    assert list(kept.items()) == [("entropy", [3.0]), ("kl", [4.0, 2.0]), ("reward", [1.0])]
    assert log.values is kept and kept["kl"] is kl
