"""Tasks, each in one file: they define what is learned. Everything needed to write another one is exported here.

Nothing else in the package knows which task runs. `trl_jax.BaseTrainer` trains any `Task`.
"""

from __future__ import annotations

from trl_jax.data.batch import Batch, Columns, Context, Example, Extras, LossBatch, of_examples
from trl_jax.data.tokenize import prepare_texts
from trl_jax.losses.supervised import real_examples, summed
from trl_jax.tasks.task import Task, joined

__all__ = [
    "Batch", "Columns", "Context", "Example", "Extras", "LossBatch", "Task", "joined", "of_examples",
    "prepare_texts", "real_examples", "summed",
]  # fmt: skip
