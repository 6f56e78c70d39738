"""The Task protocol, and metrics."""

from __future__ import annotations

import abc
from collections.abc import Callable, Mapping, Sequence
from typing import Any, Literal, Protocol

import jax
import jax.numpy as jnp
import numpy as np
from datasets import Dataset, IterableDataset

from trl_jax.core.outputs import TokenOutputs
from trl_jax.data.batch import Batch, Columns, Example, LossBatch
from trl_jax.data.image_rows import Encoder
from trl_jax.losses.supervised import real_examples, summed
from trl_jax.nn.head import Distributions

Sums = dict[str, jax.Array]
# Sums that steps and evaluations add to a task's own.
STEP_SUMS = frozenset({"loss", "grad_norm", "updated", "aux_loss", "aux_loss_examples"})

# ----------------------------------------------------------------------------------------------------
# Joining the sums that losses return, into one array per metric


def joined(
    batches: Sequence[Mapping[str, np.ndarray]], joins: Mapping[str, Callable], count: str
) -> dict[str, np.ndarray]:
    """Join the sums of all steps or batches: `[micro-batches]` each, float64, without micro-batches that have no
    examples.

    Sums of a step are `[passes, micro-batches]`: if micro-batches are packed together, a pass has a part of each. Sums
    of a batch in an evaluation are scalars.

    Args:
        batches: sums by name, for each step or batch.
        joins: for each sum to join, the function that combines the parts of a micro-batch, e.g. np.sum or np.min.
        count: the name of the sum that counts examples.
    """
    sums = {
        name: np.concatenate([join(np.atleast_2d(batch[name]).astype(np.float64), axis=0) for batch in batches])
        for name, join in joins.items()
    }
    real = sums[count] > 0
    return {name: values[real] for name, values in sums.items()}


def metrics_by_micro_batch(objective: Any, sums: Mapping[str, np.ndarray], split: str) -> dict[str, list[float]]:
    """The metrics of each micro-batch of a step, or of a batch of an evaluation; NaN if there is nothing to average.

    Args:
        objective: the task, or the user-defined loss that replaces it.
        sums: of the step or batch, as in `joined`.
    """
    arrays = {name: np.atleast_2d(values) for name, values in sums.items()}
    width = max(values.shape[1] for values in arrays.values())
    metrics: dict[str, list[float]] = {}
    for index in range(width):
        micro_batch_sums = {
            name: values[:, index : index + 1] if values.shape[1] == width else sums[name]
            for name, values in arrays.items()
        }
        for name, value in objective.metrics([micro_batch_sums], split).items():
            metrics.setdefault(name, []).append(np.nan if value is None else value)
    return metrics


def aux_loss(batches: Sequence[Mapping[str, np.ndarray]]) -> dict[str, float]:
    """TRL's metric for the load-balancing loss: its mean over micro-batches, or over the batches of an evaluation.
    Empty if no such loss is added."""
    if not batches or "aux_loss" not in batches[0]:
        return {}
    totals = joined(batches, {"aux_loss": np.sum, "aux_loss_examples": np.sum}, count="aux_loss_examples")
    if not totals["aux_loss"].size:
        return {}
    return {"aux_loss": float(np.mean(totals["aux_loss"] / totals["aux_loss_examples"]))}


def mean_metrics(sums: Sequence[Mapping[str, np.ndarray]], split: str) -> dict[str, float]:
    """The mean over examples of each number that was passed to `weighted_loss`.

    As in TRL, training logs the mean over micro-batches of their means; an evaluation logs the mean over the set.
    """
    names = sorted((sums[0] if sums else {}).keys() - STEP_SUMS - {"examples"})
    if not names:
        return aux_loss(sums)
    totals = joined(sums, dict.fromkeys((*names, "examples"), np.sum), count="examples")
    if not totals["examples"].size:
        return {}
    if split != "train":
        totals = {name: values.sum(keepdims=True) for name, values in totals.items()}
    return aux_loss(sums) | {name: float(np.mean(totals[name] / totals["examples"])) for name in names}


# ----------------------------------------------------------------------------------------------------
# From the losses of examples to the loss of a step


def weighted_loss(
    losses: jax.Array, batch: Batch | LossBatch, numbers: Mapping[str, jax.Array | float] | None = None
) -> tuple[jax.Array, Sums]:
    """The weighted sum of the losses of examples, and sums for `mean_metrics`: the return value of `Task.loss`.

    Args:
        losses: `[E]`, one per example; finite for padding examples (weight 0), too.
        numbers: what to log, by metric name: `[E]` each. No gradient flows through them.
    """
    real = real_examples(batch.weight, batch.micro_batch)
    sums = {name: summed(jax.lax.stop_gradient(value), real) for name, value in (numbers or {}).items()}
    return jnp.sum(batch.weight * losses), sums | {"examples": summed(1.0, real)}


# ----------------------------------------------------------------------------------------------------
# The protocol of a task: from rows to examples, and from outputs to a loss and its metrics


class Task(Protocol):
    """One training objective: a small frozen object that knows no trainer, device or file. Subclasses inherit the
    defaults.

    head: of the model; "score" gives one number per text (`ScoreTask`), "lm" log-probabilities of its tokens
        (`TokenTask`).
    columns: the columns of a prepared dataset from which examples are made.
    online: whether rows are prompts that the policy completes.
    padding_free: whether TRL would concatenate the texts of a micro-batch.
    """

    head: Literal["score", "lm"]
    columns: Columns
    online: bool = False
    padding_free: bool = False

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
        """Add this task's columns to the dataset; a dataset that already has them is only checked.

        Args:
            max_length: rows with a longer text are dropped; None keeps all.
            num_proc: number of tokenization processes.
            name: "train", "eval", "test", or the dataset's name in errors.

        Raises:
            TypeError, ValueError: a column or row, which the message names, cannot be trained on.
        """

    def example(self, row: dict[str, Any]) -> Example:
        """The texts and extras of one prepared row; by default, from `columns`."""
        return self.columns.example(row)

    def prepare_images(
        self, dataset: Dataset | IterableDataset, tokenizer: Any, *, name: str
    ) -> Dataset | IterableDataset:
        """Check the columns of a dataset with images, whose rows become examples during training.

        Args:
            name: as in `prepare`.

        Raises:
            ValueError: this task needs other columns.
        """
        return dataset

    def image_rows(self, rows: list[dict[str, Any]]) -> list[dict[str, Any]]:
        """Prepare the rows with images of one device's part of a micro-batch, e.g. add data of other rows to each."""
        return rows

    def image_example(self, row: dict[str, Any], encoder: Encoder, max_length: int | None) -> Example:
        """The texts and extras of one row with images, made during training.

        Args:
            row: from `image_rows`.
            encoder: converts texts and images to ids and patches.
            max_length: maximum tokens of a text.

        Raises:
            ValueError: the row cannot be trained on.
            TypeError: this task does not support images.
        """
        raise TypeError(f"{type(self).__name__} does not take rows with images.")

    @abc.abstractmethod
    def loss(self, outputs: jax.Array, batch: Batch | LossBatch) -> tuple[jax.Array, Sums]:
        """The loss, a float32 scalar, and sums for the metrics: `[M]`, one per micro-batch of the batch, or scalars if
        `batch.micro_batch` is None.

        Args:
            outputs: with a score head, its outputs `[X]`, float32: the first texts of all examples, then the second
                ones. With a language model head, the result of `token_stats`; if the run has a reference, its results
                for the names in `compared` are added as `ref_<name>`.
            batch: `weight` `[E]`, `extras` and `micro_batch`, as in `Batch`. The loss is a sum weighted by `weight`.
        """

    @abc.abstractmethod
    def metrics(self, sums: list[dict[str, np.ndarray]], split: str) -> dict[str, float]:
        """The metrics to log in addition to the loss.

        Args:
            sums: of each step for split "train", of each batch for "eval". With a load-balancing loss (mixture of
                experts), they also have its sums, from which `aux_loss` computes the metric.
        """

    def inputs(self, batch: dict[str, Any]) -> dict[str, Any]:
        """The inputs passed to a user-defined compute_loss; by default, the batch.

        Args:
            batch: `input_ids` and `attention_mask` `[X, T]` of real examples, and each of the extras.
        """
        return batch


class ScoreTask(Task, Protocol):
    """A task with a score head, whose outputs are also its predictions."""

    head: Literal["score"]

    @abc.abstractmethod
    def predictions(self, outputs: np.ndarray, num_examples: int) -> np.ndarray:
        """The predictions of one batch for predict() and compute_metrics.

        Args:
            outputs: `[X]`, as in `loss`.
            num_examples: number of real examples, which come first.
        """


class TokenTask(Task, Protocol):
    """A task with a language model head, whose outputs `token_stats` reduces to numbers per text or per read.

    axis: what the numbers of `token_stats` refer to. "text": `[X]` each. An evaluation may then compute the texts of a
        batch in different passes, and `loss` gets a `LossBatch`, with numbers of examples and texts only. "read": any
        that the loss needs, `[N]`, `[X]` or scalars; `loss` gets the whole `Batch`, and an evaluation computes a batch
        in one pass.
    compared: which of these numbers to compute with the reference model, too; () trains without a reference.
    temperature: divides the logits of the policy and of the reference.
    per_token: whether the weights passed to `loss` are `1 / targets` of the step, so that all targets have equal
        weight; otherwise all examples have equal weight.
    whole_micro_batches: whether the loss needs all examples of a micro-batch in one pass (with several devices, of each
        device's part). Otherwise a pass may have examples of any micro-batches of the step.
    num_tokens_after: the metric after which `num_tokens` is logged, as in TRL; None logs it first.
    predicts_first: whether the first token of a text is also a target if virtual tokens precede it.
    compares_distributions: whether `token_stats` gets the distributions of the model and of the reference over the
        vocabulary. The run then must have a reference.
    """

    head: Literal["lm"] = "lm"
    axis: Literal["text", "read"] = "text"
    compared: tuple[str, ...] = ()
    temperature: float = 1.0
    per_token: bool = False
    whole_micro_batches: bool = False
    num_tokens_after: str | None = None
    predicts_first: bool = False
    compares_distributions: bool = False

    def metrics(self, sums: list[dict[str, np.ndarray]], split: str) -> dict[str, float]:
        """By default, the mean of each number that was passed to `weighted_loss`."""
        return mean_metrics(sums, split)

    @abc.abstractmethod
    def token_stats(self, outputs: TokenOutputs | Distributions, batch: Batch) -> dict[str, jax.Array]:
        """The numbers of a pass that `loss` needs, by name, float32 `[X]` or `[N]` according to `axis`.

        Args:
            outputs: at each read, of the policy or of the reference; if the task `compares_distributions`, of both.
            batch: the pass; `losses.supervised.of_texts` sums over the reads of each text.
        """
