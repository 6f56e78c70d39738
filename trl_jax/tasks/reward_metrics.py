"""The numbers TRL logs for a reward model, from the sums that the loss returns."""

from __future__ import annotations

import numpy as np

Sums = dict[str, np.ndarray]


_JOIN = {
    "pairs": np.sum, "correct": np.sum, "margin_sum": np.sum, "reward_sum": np.sum,
    "reward_min": np.min, "reward_max": np.max,
}  # fmt: skip


def _joined(batches: list[Sums]) -> Sums:
    """The sums of all micro-batches that had a pair, one row each, in float64.

    A step gives `[passes, micro-batches]`: where micro-batches were laid out together, a pass has a part of each. A
    batch of an evaluation gives single numbers.
    """
    joined = {
        name: np.concatenate([join(np.atleast_2d(batch[name]).astype(np.float64), axis=0) for batch in batches])
        for name, join in _JOIN.items()
    }
    real = joined["pairs"] > 0
    return {name: values[real] for name, values in joined.items()}


def training_metrics(steps: list[Sums]) -> dict[str, float]:
    """TRL's running metrics: the mean over micro-batches of each one's own mean or extreme; none without pairs."""
    sums = _joined(steps)
    if not sums["pairs"].size:
        return {}
    return {
        "min_reward": float(np.mean(sums["reward_min"])),
        "mean_reward": float(np.mean(sums["reward_sum"] / (2 * sums["pairs"]))),
        "max_reward": float(np.mean(sums["reward_max"])),
        "accuracy": float(np.mean(sums["correct"] / sums["pairs"])),
        "margin": float(np.mean(sums["margin_sum"] / sums["pairs"])),
    }


def evaluation_metrics(batches: list[Sums]) -> dict[str, float]:
    """Means over all pairs, however they were batched; min and max are means of the batches' own, as TRL's are.

    TRL averages the batches' means, which lets the pairs of a short last batch count for more.
    """
    sums = _joined(batches)
    if not sums["pairs"].size:
        return {}
    pairs = np.sum(sums["pairs"])
    return {
        "min_reward": float(np.mean(sums["reward_min"])),
        "mean_reward": float(np.sum(sums["reward_sum"]) / (2 * pairs)),
        "max_reward": float(np.mean(sums["reward_max"])),
        "accuracy": float(np.sum(sums["correct"]) / pairs),
        "margin": float(np.sum(sums["margin_sum"]) / pairs),
    }
