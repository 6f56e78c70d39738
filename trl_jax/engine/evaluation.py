"""One pass over an evaluation set."""

from __future__ import annotations

from collections.abc import Callable, Iterable
from dataclasses import dataclass
from typing import Any

import jax
import numpy as np


@dataclass
class Evaluated:
    """What each batch gave, on the host: its metrics and scores, and the real pairs it had."""

    metrics: list[dict[str, np.ndarray]]
    scores: list[np.ndarray]
    num_pairs: list[int]
    rows: list[list[int]]  # which of the set's each batch is

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
        windows: items have `passes`, `batches`, the `rows` of each, and `restored`, which gives each its scores.
        after_each: called once a batch, for progress bars.

    Raises:
        ValueError: there is no batch.
    """
    done = Evaluated([], [], [], [])
    for window in windows:
        restored = window.restored(_scores(score, window.passes))
        for scores, batch, rows in zip(restored, window.batches, window.rows, strict=True):
            done.metrics.append(jax.device_get(measure(scores, batch)))
            done.scores.append(scores)
            done.num_pairs.append(batch.num_pairs)
            done.rows.append(rows)
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


def run_batches(
    evaluate_batch: Callable[[Any], tuple[dict[str, jax.Array], Any]],
    batches: Iterable[Any],
    after_each: Callable[[], None],
) -> Evaluated:
    """The same, batch by batch, for a script's own idea of loss or prediction.

    Args:
        evaluate_batch: arrays -> (metrics with `loss`, scores).
        batches: items have `arrays`, `num_pairs` and `rows`.
    """
    done = Evaluated([], [], [], [])
    for batch in batches:
        metrics, scores = jax.device_get(evaluate_batch(batch.arrays))
        done.metrics.append(metrics)
        done.scores.append(scores)
        done.num_pairs.append(batch.num_pairs)
        done.rows.append(batch.rows)
        after_each()
    if not done.scores:
        raise ValueError("The evaluation set has no rows.")
    return done
