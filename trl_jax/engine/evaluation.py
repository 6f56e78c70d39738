"""One pass over an evaluation set."""

from __future__ import annotations

from collections.abc import Callable, Iterable
from dataclasses import dataclass
from typing import Any

import jax
import numpy as np


@dataclass
class Evaluated:
    """What each batch gave, on the host: its metrics and scores, and how many real pairs it had."""

    metrics: list[dict[str, np.ndarray]]
    scores: list[np.ndarray]
    num_pairs: list[int]

    @property
    def total_pairs(self) -> int:
        return sum(self.num_pairs)

    def loss(self) -> float:
        """The mean over all pairs; batches report means, the last one over fewer pairs."""
        losses = np.asarray([metrics["loss"] for metrics in self.metrics], np.float64)
        return float(np.average(losses, weights=self.num_pairs))


def run_evaluation(
    score: Callable[[Any], jax.Array],
    measure: Callable[[np.ndarray, Any], dict[str, jax.Array]],
    windows: Iterable[Any],
    after_each: Callable[[], None],
) -> Evaluated:
    """Evaluate every batch; the host waits for a pass only while the device is at the next one.

    Args:
        score: a pass's arrays -> scores of its slots.
        measure: a batch's scores, the batch -> metrics with `loss`.
        windows: items have `passes`, `batches`, and `restored`, which gives each batch its scores.
        after_each: called once a batch, for progress bars.

    Raises:
        ValueError: there is no batch.
    """
    done = Evaluated([], [], [])
    for window in windows:
        for scores, batch in zip(window.restored(_scores(score, window.passes)), window.batches, strict=True):
            done.metrics.append(jax.device_get(measure(scores, batch)))
            done.scores.append(scores)
            done.num_pairs.append(batch.num_pairs)
            after_each()
    if not done.scores:
        raise ValueError("The evaluation set has no rows.")
    return done


def _scores(score: Callable[[Any], jax.Array], passes: list[tuple[Any, np.ndarray]]) -> list[np.ndarray]:
    found = []
    for arrays, _ in passes:
        found.append(score(arrays))
        found[:-1] = jax.device_get(found[:-1])
    return jax.device_get(found)
