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
    """The definition of one way of training: a small frozen object without trainer, device or file.

    head: of the model; "score" gives one number for each text.
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
        """Add this task's columns to the dataset's own; a dataset that has them is only checked.

        Args:
            max_length: rows with a text of more tokens are left out; None keeps all.
            num_proc: processes that tokenise.
            name: "train", "eval", "test", or the dataset's name in errors.

        Raises:
            TypeError, ValueError: a column or row, which the text names, cannot be trained on.
        """

    def example(self, row: dict[str, Any]) -> Example:
        """The texts and extras of one prepared row."""

    def loss(self, outputs: jax.Array, batch: Batch | Measured) -> tuple[jax.Array, Sums]:
        """The loss, a float32 scalar, and sums for the metrics: `[M]`, one for each micro-batch of the batch, or a
        scalar where `batch.micro_batch` is None.

        Args:
            outputs: the head's output at each read, float32 `[X]`: first texts of all examples, then second ones.
            batch: `weight` `[E]`, `extras` and `micro_batch`, as in `Batch`. The loss is a sum weighted by `weight`.
        """

    def metrics(self, sums: list[dict[str, np.ndarray]], split: str) -> dict[str, float]:
        """The metrics to log besides the loss.

        Args:
            sums: of each step for split "train", of each batch for "eval".
        """

    def predictions(self, outputs: np.ndarray, num_examples: int) -> np.ndarray:
        """The predictions of one batch for predict() and compute_metrics.

        Args:
            outputs: `[X]`, as in `loss`.
            num_examples: how many examples are real: the first ones.
        """

    def inputs(self, batch: dict[str, Any]) -> dict[str, Any]:
        """The inputs that a script's own compute_loss gets.

        Args:
            batch: `input_ids` and `attention_mask` `[X, T]` of real examples, and each of the extras.
        """
