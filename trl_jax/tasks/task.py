"""The protocol of a task: from rows to examples, and from outputs to a loss and its metrics."""

from __future__ import annotations

import abc
from typing import Any, Literal, Protocol

import jax
import numpy as np
from datasets import Dataset, IterableDataset

from trl_jax.core.token_outputs import TokenOutputs
from trl_jax.data.example import Columns, Example, LossBatch
from trl_jax.data.layout.batch import Batch
from trl_jax.nn.head.inputs import Distributions

Sums = dict[str, jax.Array]


class Task(Protocol):
    """The definition of one way of training: a small frozen object without trainer, device or file. A class that is
    derived from it gets what has a default.

    head: of the model; "score" gives one number for each text (`ScoreTask`), "lm" log-probabilities of its tokens
        (`TokenTask`).
    columns: the columns of a prepared dataset that examples are made of.
    """

    head: Literal["score", "lm"]
    columns: Columns

    @abc.abstractmethod
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
        """The texts and extras of one prepared row; by default what `columns` has."""
        return self.columns.example(row)

    @abc.abstractmethod
    def loss(self, outputs: jax.Array, batch: Batch | LossBatch) -> tuple[jax.Array, Sums]:
        """The loss, a float32 scalar, and sums for the metrics: `[M]`, one for each micro-batch of the batch, or a
        scalar where `batch.micro_batch` is None.

        Args:
            outputs: under a score head its output at each read, float32 `[X]`: first texts of all examples, then
                second ones. Under a language model's head, the result of `of_pass`, and as `ref_<name>` those of
                `compared`, of the reference, where the run has one.
            batch: `weight` `[E]`, `extras` and `micro_batch`, as in `Batch`. The loss is a sum weighted by `weight`.
        """

    @abc.abstractmethod
    def metrics(self, sums: list[dict[str, np.ndarray]], split: str) -> dict[str, float]:
        """The metrics to log besides the loss.

        Args:
            sums: of each step for split "train", of each batch for "eval". Where a mixture of experts is balanced,
                `tasks.metrics.aux_loss` makes a metric of those of that loss, which the run adds to this task's.
        """

    def inputs(self, batch: dict[str, Any]) -> dict[str, Any]:
        """The inputs that a script's own compute_loss gets; by default the batch as it is.

        Args:
            batch: `input_ids` and `attention_mask` `[X, T]` of real examples, and each of the extras.
        """
        return batch


class ScoreTask(Task, Protocol):
    """A task with a score head, whose numbers are its predictions."""

    head: Literal["score"]

    @abc.abstractmethod
    def predictions(self, outputs: np.ndarray, num_examples: int) -> np.ndarray:
        """The predictions of one batch for predict() and compute_metrics.

        Args:
            outputs: `[X]`, as in `loss`.
            num_examples: how many examples are real: the first ones.
        """


class TokenTask(Task, Protocol):
    """A task with a language model's head: what it reads becomes numbers of texts, or of reads, within a pass.

    axis: of the numbers that `of_pass` gives. "text": `[X]` each, so that an evaluation may compute a batch's texts in
        other passes, and hand `loss` numbers of examples and texts alone. "read": whatever the loss asks for, `[N]`
        with `[X]` or none; it gets the whole `Batch`, and a batch is evaluated in one pass.
    compared: which of these numbers the loss asks for of a reference, too.
    temperature: divides the logits of the policy and of the reference.
    per_token: whether the weights that reach `loss` are shares of the step's targets, `1 / targets`, so that each
        target counts the same; otherwise each example counts the same.
    by_micro_batch: whether the loss needs the examples of a micro-batch, on several devices of a device's part of it,
        in one pass. Otherwise a pass may have examples of any micro-batches of the step.
    num_tokens_after: the metric behind which `num_tokens` is logged, as in TRL.
    predicts_first: whether the first token of a text is a target, too, where virtual tokens stand before it.
    compares_distributions: whether it needs both distributions over the vocabulary, the model's and the reference's,
        which is there then: `of_pass` gets them.
    """

    head: Literal["lm"]
    axis: Literal["text", "read"]
    compared: tuple[str, ...]
    temperature: float
    per_token: bool
    by_micro_batch: bool
    num_tokens_after: str
    predicts_first: bool = False
    compares_distributions: bool = False

    @abc.abstractmethod
    def of_pass(self, outputs: TokenOutputs | Distributions, batch: Batch) -> dict[str, jax.Array]:
        """The numbers of a pass that `loss` needs of the model, by name, float32 `[X]` or `[N]` by `axis`.

        Args:
            outputs: of each read, of the policy or of the reference; where the task `compares_distributions`, those of
                both.
            batch: the pass; `losses.sums.of_texts` sums over the reads of each of its texts.
        """
