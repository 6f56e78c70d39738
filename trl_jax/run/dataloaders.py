"""Dataloaders in the form that scripts expect."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

from trl_jax.data.loader import ExampleLoader
from trl_jax.run.user_loss.inputs import inputs_of
from trl_jax.tasks.task import Task


class Batches:
    """Iterates over micro-batches as dicts of NumPy arrays: `input_ids`, `attention_mask`, and those of the task.

    steps: the underlying loader of optimizer steps.
    dataset, batch_size: of that loader.
    """

    def __init__(self, steps: ExampleLoader, task: Task):
        self.steps, self._task = steps, task
        self.dataset, self.batch_size = steps.dataset, steps.batch_size

    def set_epoch(self, epoch: int) -> None:
        self.steps.set_epoch(epoch)

    def __len__(self) -> int:
        """Micro-batches in an epoch; TypeError for a stream."""
        rows = len(self.dataset)
        return rows // self.batch_size if self.steps.drop_last else -(-rows // self.batch_size)

    def __iter__(self) -> Iterator[dict[str, Any]]:
        for step in self.steps.laid_out(layout="padded", divided=False):
            yield from inputs_of(step.arrays, self._task)


def steps_of(batches: Any, method: str) -> ExampleLoader:
    """The loader of the `Batches` that a dataloader's method returned.

    Raises:
        TypeError: the method is a script's own and returned something else.
    """
    if not isinstance(batches, Batches):
        raise TypeError(
            f"{method} returned a {type(batches).__module__}.{type(batches).__qualname__}: wanted what the trainer's "
            "own gives. For other rows or another order, return self.batches(dataset, training=True)."
        )
    return batches.steps
