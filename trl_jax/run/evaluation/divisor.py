"""The number that the loss of a batch of an evaluation is a mean over."""

from __future__ import annotations

from trl_jax.data.step_layout import StepBatch
from trl_jax.tasks.task import TokenTask


def divisor_of(task: TokenTask, batch: StepBatch) -> float:
    """The number of the batch's targets where the task weighs those alike, else of its examples."""
    if not task.per_token:
        return batch.num_examples
    return max(1, batch.num_targets)
