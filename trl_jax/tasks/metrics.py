"""Join the sums that losses return into one array for each metric."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence

import numpy as np


def joined(
    batches: Sequence[Mapping[str, np.ndarray]], joins: Mapping[str, Callable], count: str
) -> dict[str, np.ndarray]:
    """Join the sums of steps or batches: `[micro-batches]` each, float64, without micro-batches that have no example.

    A step has sums `[passes, micro-batches]`: where micro-batches are packed together, a pass has a part of each. A
    batch of an evaluation has scalars.

    Args:
        batches: sums by name, of each step or batch.
        joins: the function that joins the parts of a micro-batch, as np.sum or np.min, by the name of the sum.
        count: the name of the sum that counts examples.
    """
    sums = {
        name: np.concatenate([join(np.atleast_2d(batch[name]).astype(np.float64), axis=0) for batch in batches])
        for name, join in joins.items()
    }
    real = sums[count] > 0
    return {name: values[real] for name, values in sums.items()}


def aux_loss(batches: Sequence[Mapping[str, np.ndarray]]) -> dict[str, float]:
    """TRL's metric of the load-balancing loss: its mean over micro-batches, or over batches of an evaluation. Nothing
    where the run adds none."""
    if not batches or "aux_loss" not in batches[0]:
        return {}
    totals = joined(batches, {"aux_loss": np.sum, "aux_loss_examples": np.sum}, count="aux_loss_examples")
    return {"aux_loss": float(np.mean(totals["aux_loss"] / totals["aux_loss_examples"]))}
