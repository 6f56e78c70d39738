"""Tasks: what is learned, each in one file, and what one needs to write another.

Nothing else in the package knows which trainer runs. `trl_jax.BaseTrainer` trains whatever a `Task` explains.
"""

from __future__ import annotations

from trl_jax.data.example import Columns, Example, Measured, of_examples
from trl_jax.data.layout.batch import Batch
from trl_jax.data.rows.texts import prepare_texts
from trl_jax.losses.sums import counted, summed
from trl_jax.tasks.metrics import joined
from trl_jax.tasks.task import Task

__all__ = [
    "Batch", "Columns", "Example", "Measured", "Task", "counted", "joined", "of_examples", "prepare_texts", "summed",
]  # fmt: skip
