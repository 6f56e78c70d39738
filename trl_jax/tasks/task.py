"""The protocol of a task: from rows to examples, and from outputs to a loss and its metrics."""

from __future__ import annotations

from typing import Any, Literal, Protocol

import jax
import numpy as np
from datasets import Dataset, IterableDataset

from trl_jax.data.example import Columns, Example, Measured
from trl_jax.data.layout.batch import Batch

Sums = dict[str, jax.Array]


class Task(Protocol):
    """A small frozen object that explains one way of training; it knows no trainer, device or file.

    head: the head that the checkpoint gets: "score" gives one number a text.
    columns: the columns of a prepared dataset that examples are made of.
    """

    head: Literal["score"]
    columns: Columns

    def prepare(
        self,
        dataset: Dataset | IterableDataset,
        tokenizer: Any,
        *,
        max_length: int | None,
        num_proc: int | None,
        name: str,
    ) -> Dataset | IterableDataset:
        """The dataset with this task's columns beside its own; preparing twice is preparing once.

        Args:
            max_length: tokens of the longest text that is kept; None keeps all.
            num_proc: processes that tokenise.
            name: "train", "eval", "test", or the words by which errors call the dataset.

        Raises:
            TypeError, ValueError: a column or row that cannot be trained on, by name.
        """

    def example(self, row: dict[str, Any]) -> Example:
        """The texts and extras of one prepared row."""

    def loss(self, outputs: jax.Array, batch: Batch | Measured) -> tuple[jax.Array, Sums]:
        """The loss, a float32 scalar, and sums for the metrics, each `[M]` over the batch's micro-batches, or a scalar
        where it has none.

        Args:
            outputs: float32 `[X]`, what the head gives at each read: every example's first text, then the second ones.
            batch: `weight` `[E]`, `extras` and `micro_batch`, as in `Batch`. The loss is a sum weighted by `weight`.
        """

    def metrics(self, sums: list[dict[str, np.ndarray]], split: str) -> dict[str, float]:
        """What is logged beside the loss, from the sums of each step ("train") or of each batch ("eval")."""

    def predictions(self, outputs: np.ndarray, num_examples: int) -> np.ndarray:
        """What predict() and compute_metrics see of one batch, whose first examples alone are real."""

    def inputs(self, batch: dict[str, Any]) -> dict[str, Any]:
        """What a script's own compute_loss is given.

        Args:
            batch: `input_ids` and `attention_mask` `[X, T]` of real examples, and each of the extras.
        """
