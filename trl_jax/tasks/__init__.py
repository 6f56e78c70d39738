"""Tasks, each in one file: they define what is learned. Everything needed to write another one is exported here.

Nothing else in the package knows which task runs. `trl_jax.BaseTrainer` trains any `Task`.
"""

from __future__ import annotations

from trl_jax.data.example import Columns, Context, Example, LossBatch, of_examples
from trl_jax.data.extras import Extras
from trl_jax.data.layout.batch import Batch
from trl_jax.data.rows.texts import prepare_texts
from trl_jax.losses.sums import real_examples, summed
from trl_jax.tasks.metrics import joined
from trl_jax.tasks.task import Task

__all__ = [
    "Batch", "Columns", "Context", "Example", "Extras", "LossBatch", "Task", "joined", "of_examples",
    "prepare_texts", "real_examples", "summed",
]  # fmt: skip
