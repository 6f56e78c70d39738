"""One pass over an evaluation set."""

from __future__ import annotations

from collections.abc import Callable, Iterable
from dataclasses import dataclass, field
from typing import Any

import jax
import numpy as np


@dataclass
class Evaluated:
    """The results of each batch, on the host.

    sums: what the loss gave, with `loss`. outputs: what the model gave. num_examples: the real ones. rows: which rows
    of the set each batch is. divisors: what each loss is a mean over.
    """

    sums: list[dict[str, np.ndarray]] = field(default_factory=list)
    outputs: list[Any] = field(default_factory=list)
    num_examples: list[int] = field(default_factory=list)
    rows: list[list[int]] = field(default_factory=list)
    divisors: list[float] = field(default_factory=list)

    @property
    def total(self) -> int:
        """Examples of all batches."""
        return sum(self.num_examples)

    def loss(self) -> float:
        """The mean over the whole set; batches report means, each over as much as its divisor."""
        losses = np.asarray([sums["loss"] for sums in self.sums], np.float64)
        return float(np.average(losses, weights=self.divisors))

    def add(
        self, sums: dict[str, np.ndarray], outputs: Any, num_examples: int, rows: list[int], divisor: float
    ) -> None:
        self.sums.append(sums)
        self.outputs.append(outputs)
        self.num_examples.append(num_examples)
        self.rows.append(rows)
        self.divisors.append(divisor)

    def checked(self) -> Evaluated:
        """Raises ValueError where there was no batch."""
        if not self.outputs:
            raise ValueError("The evaluation set has no rows.")
        return self


def run_evaluation(
    outputs_of: Callable[[Any], jax.Array],
    measure: Callable[[np.ndarray, Any], dict[str, jax.Array]],
    chunks: Iterable[Any],
    after_each: Callable[[], None],
) -> Evaluated:
    """Evaluate every batch; the host waits for a pass only while the device is at the next one.

    Args:
        outputs_of: a pass's arrays -> the model's outputs of its slots.
        measure: a batch's outputs, the batch -> sums with `loss`.
        chunks: items have `passes`, `batches`, the `rows` of each, and `restored`, which gives each its outputs.
        after_each: called once a batch, for progress bars.

    Raises:
        ValueError: there is no batch.
    """
    done = Evaluated()
    for chunk in chunks:
        restored = chunk.restored(_outputs(outputs_of, chunk.passes))
        for outputs, batch, rows in zip(restored, chunk.batches, chunk.rows, strict=True):
            done.add(jax.device_get(measure(outputs, batch)), outputs, batch.num_examples, rows, batch.divisor)
            after_each()
    return done.checked()


def _outputs(outputs_of: Callable[[Any], jax.Array], passes: list[tuple[Any, np.ndarray]]) -> list[np.ndarray]:
    found = []
    for arrays, _ in passes:
        found.append(outputs_of(arrays))
        found[:-1] = jax.device_get(found[:-1])
    return jax.device_get(found)


def run_batches(
    evaluate_batch: Callable[[Any], tuple[dict[str, jax.Array], Any]],
    batches: Iterable[Any],
    after_each: Callable[[], None],
    divisor: Callable[[Any], float] = lambda batch: batch.num_examples,
) -> Evaluated:
    """The same, batch by batch, for a script's own idea of loss or prediction.

    Args:
        evaluate_batch: arrays -> (sums with `loss`, outputs).
        batches: items have `arrays`, `num_examples` and `rows`.
        divisor: what the loss of a batch is a mean over.
    """
    done = Evaluated()
    for batch in batches:
        sums, outputs = jax.device_get(evaluate_batch(batch.arrays))
        done.add(sums, outputs, batch.num_examples, batch.rows, divisor(batch))
        after_each()
    return done.checked()
