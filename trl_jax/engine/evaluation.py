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
    evaluate_batch: Callable[[Any], tuple[dict[str, jax.Array], jax.Array]],
    batches: Iterable[Any],
    after_each: Callable[[], None],
) -> Evaluated:
    """Evaluate every batch; the host waits for a batch only while the device is at the next one.

    Args:
        evaluate_batch: arrays -> (metrics with `loss`, scores).
        batches: items have `arrays` and `num_pairs`.
        after_each: called once a batch, for progress bars.

    Raises:
        ValueError: there is no batch.
    """
    done, pending = Evaluated([], [], []), None
    for batch in batches:
        result = evaluate_batch(batch.arrays)
        if pending is not None:
            _collect(done, *pending)
        pending = (result, batch.num_pairs)
        after_each()
    if pending is None:
        raise ValueError("The evaluation set has no rows.")
    _collect(done, *pending)
    return done


def _collect(done: Evaluated, result: Any, num_pairs: int) -> None:
    metrics, scores = jax.device_get(result)
    done.metrics.append(metrics)
    done.scores.append(scores)
    done.num_pairs.append(num_pairs)
