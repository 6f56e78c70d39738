"""The Task protocol, and metrics."""

from __future__ import annotations

import abc
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from typing import Any, Literal, Protocol

import jax
import jax.numpy as jnp
import numpy as np
from datasets import Dataset, IterableDataset

from trl_jax.core.files import write_whole
from trl_jax.core.outputs import TokenOutputs
from trl_jax.data.batch import Batch, Columns, Example, LossBatch
from trl_jax.data.image_rows import Encoder
from trl_jax.losses.supervised import real_examples, summed
from trl_jax.nn.head import Distributions

Sums = dict[str, jax.Array]
# What a step and an evaluation add to a task's own sums.
STEP_SUMS = frozenset({"loss", "grad_norm", "updated", "aux_loss", "aux_loss_examples"})

# ----------------------------------------------------------------------------------------------------
# The additions of `eval_report=True` to an evaluation: accuracy by subset, calibration, and a histogram of margins.


_BINS = 10
_WIDTH, _HEIGHT, _BARS = 480, 200, 24


def report(margins: np.ndarray, subsets: list[Any] | None, *, prefix: str, folder: Path) -> dict[str, float]:
    """Compute the metrics of an evaluation's pairs, and write `<prefix>_margins.svg` into the folder, if any margin is
    finite.

    Args:
        margins: `[N]`, chosen score less rejected score.
        subsets: the subset that each pair belongs to, `[N]`; None where there are no subsets.

    Returns:
        `ece`; with subsets `accuracy_<subset>` of each and `accuracy_of_subsets`, their mean, as RewardBench reports.
    """
    folder.mkdir(parents=True, exist_ok=True)
    finite = margins[np.isfinite(margins)]
    if len(finite):
        write_whole(folder / f"{prefix}_margins.svg", histogram(finite))
    metrics = {"ece": calibration_error(margins)}
    if subsets is not None:
        names = np.asarray(list(map(str, subsets)))
        parts = {name: float(np.mean(margins[names == name] > 0)) for name in sorted(set(names))}
        metrics |= {f"accuracy_{name}": value for name, value in parts.items()}
        metrics["accuracy_of_subsets"] = float(np.mean(list(parts.values())))
    return metrics


def calibration_error(margins: np.ndarray) -> float:
    """Expected calibration error (Guo et al. 2017, arXiv:1706.04599, equation 3) in ten bins from 0.5 to 1.

    The confidence of a Bradley-Terry model in the answer it prefers is sigmoid(|margin|).

    Args:
        margins: `[N]`; a NaN among them makes the result NaN.
    """
    if np.isnan(margins).any():
        return float("nan")
    confidence, right = 1 / (1 + np.exp(-np.abs(margins))), margins > 0
    bins = np.minimum(((confidence - 0.5) * 2 * _BINS).astype(int), _BINS - 1)
    gaps = [
        abs(np.mean(confidence[bins == b]) - np.mean(right[bins == b])) * np.mean(bins == b) for b in np.unique(bins)
    ]
    return float(sum(gaps))


def histogram(margins: np.ndarray) -> str:
    """A histogram of finite margins `[N]`, N > 0, as SVG; pairs that the model gets wrong are left of zero, in red."""
    edge = float(np.max(np.abs(margins))) or 1.0
    counts, edges = np.histogram(margins, bins=_BARS, range=(-edge, edge))
    width, highest = _WIDTH / _BARS, max(counts.max(), 1)
    bars = [
        f'<rect x="{i * width:.1f}" y="{_HEIGHT - count * _HEIGHT / highest:.1f}" width="{width - 1:.1f}" '
        f'height="{count * _HEIGHT / highest:.1f}" fill="{"#c44" if edges[i + 1] <= 1e-12 else "#48a"}"/>'
        for i, count in enumerate(counts)
    ]
    labels = [
        f'<text x="{x}" y="{_HEIGHT + 16}" text-anchor="{anchor}">{text}</text>'
        for x, anchor, text in (
            (0, "start", f"{-edge:.2f}"),
            (_WIDTH / 2, "middle", f"margin of {len(margins)} pairs, {np.mean(margins > 0):.1%} above 0"),
            (_WIDTH, "end", f"{edge:.2f}"),
        )
    ]
    size = f'width="{_WIDTH}" height="{_HEIGHT + 24}" font-family="sans-serif" font-size="12"'
    return f'<svg xmlns="http://www.w3.org/2000/svg" {size}>{"".join(bars)}{"".join(labels)}</svg>\n'


# ----------------------------------------------------------------------------------------------------
# Join the sums that losses return into one array for each metric.


def joined(
    batches: Sequence[Mapping[str, np.ndarray]], joins: Mapping[str, Callable], count: str
) -> dict[str, np.ndarray]:
    """Join the sums of steps or batches: `[micro-batches]` each, float64, without micro-batches that have no example.

    A step has sums `[passes, micro-batches]`: where micro-batches are packed together, a pass has a part of each. A
    batch of an evaluation has scalars.

    Args:
        batches: sums by name, of each step or batch.
        joins: the function that joins the parts of a micro-batch, as np.sum or np.min, by the name of the sum.
        count: the name of the sum that counts examples.
    """
    sums = {
        name: np.concatenate([join(np.atleast_2d(batch[name]).astype(np.float64), axis=0) for batch in batches])
        for name, join in joins.items()
    }
    real = sums[count] > 0
    return {name: values[real] for name, values in sums.items()}


def aux_loss(batches: Sequence[Mapping[str, np.ndarray]]) -> dict[str, float]:
    """TRL's metric of the load-balancing loss: its mean over micro-batches, or over batches of an evaluation. Nothing
    where the run adds none."""
    if not batches or "aux_loss" not in batches[0]:
        return {}
    totals = joined(batches, {"aux_loss": np.sum, "aux_loss_examples": np.sum}, count="aux_loss_examples")
    return {"aux_loss": float(np.mean(totals["aux_loss"] / totals["aux_loss_examples"]))}


def mean_metrics(sums: Sequence[Mapping[str, np.ndarray]], split: str) -> dict[str, float]:
    """The mean over examples of each number that `weighted_loss` was given.

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
# The loss of a step from the losses of its examples.


def weighted_loss(
    losses: jax.Array, batch: Batch | LossBatch, numbers: Mapping[str, jax.Array | float] | None = None
) -> tuple[jax.Array, Sums]:
    """The weighted sum of the losses of examples, and sums for `mean_metrics`. This is what `Task.loss` returns.

    Args:
        losses: `[E]`, one per example; finite for padding examples (weight 0), too.
        numbers: what to log, by metric name: `[E]` each. No gradient flows through them.
    """
    real = real_examples(batch.weight, batch.micro_batch)
    sums = {name: summed(jax.lax.stop_gradient(value), real) for name, value in (numbers or {}).items()}
    return jnp.sum(batch.weight * losses), sums | {"examples": summed(1.0, real)}


# ----------------------------------------------------------------------------------------------------
# The protocol of a task: from rows to examples, and from outputs to a loss and its metrics.


class Task(Protocol):
    """The definition of one way of training: a small frozen object without trainer, device or file. A class that is
    derived from it gets what has a default.

    head: of the model; "score" gives one number for each text (`ScoreTask`), "lm" log-probabilities of its tokens
        (`TokenTask`).
    columns: the columns of a prepared dataset that examples are made of.
    online: whether rows are prompts that the policy completes.
    padding_free: whether TRL would lay the texts of a micro-batch end to end.
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
        """Add this task's columns to the dataset's own; a dataset that has them is only checked.

        Args:
            max_length: rows with a text of more tokens are left out; None keeps all.
            num_proc: processes that tokenize.
            name: "train", "eval", "test", or the dataset's name in errors.

        Raises:
            TypeError, ValueError: a column or row, which the text names, cannot be trained on.
        """

    def example(self, row: dict[str, Any]) -> Example:
        """The texts and extras of one prepared row; by default what `columns` has."""
        return self.columns.example(row)

    def prepare_images(
        self, dataset: Dataset | IterableDataset, tokenizer: Any, *, name: str
    ) -> Dataset | IterableDataset:
        """Check the columns of a dataset with images, whose rows become examples while the model trains.

        Args:
            name: as in `prepare`.

        Raises:
            ValueError: this task needs other columns.
        """
        return dataset

    def image_rows(self, rows: list[dict[str, Any]]) -> list[dict[str, Any]]:
        """The rows with images of one device's part of a micro-batch, each with what it takes from the others."""
        return rows

    def image_example(self, row: dict[str, Any], encoder: Encoder, max_length: int | None) -> Example:
        """The texts and extras of one row with images, made while the model trains.

        Args:
            row: of `image_rows`.
            encoder: turns texts and pictures into ids and patches.
            max_length: of a text.

        Raises:
            ValueError: the row cannot be trained on; TypeError: this task does not take rows with images.
        """
        raise TypeError(f"{type(self).__name__} does not take rows with images.")

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
    compared: which of these numbers are computed with the reference model, too; () trains without a reference.
    temperature: divides the logits of the policy and of the reference.
    per_token: whether the weights that reach `loss` are shares of the step's targets, `1 / targets`, so that each
        target counts the same; otherwise each example counts the same.
    by_micro_batch: whether the loss needs the examples of a micro-batch, on several devices of a device's part of it,
        in one pass. Otherwise a pass may have examples of any micro-batches of the step.
    num_tokens_after: the metric after which `num_tokens` is logged, as in TRL; None logs it first.
    predicts_first: whether the first token of a text is a target, too, where virtual tokens stand before it.
    compares_distributions: whether it needs both distributions over the vocabulary, the model's and the reference's,
        which is there then: `of_pass` gets them.
    """

    head: Literal["lm"] = "lm"
    axis: Literal["text", "read"] = "text"
    compared: tuple[str, ...] = ()
    temperature: float = 1.0
    per_token: bool = False
    by_micro_batch: bool = False
    num_tokens_after: str | None = None
    predicts_first: bool = False
    compares_distributions: bool = False

    def metrics(self, sums: list[dict[str, np.ndarray]], split: str) -> dict[str, float]:
        """By default the mean of each number that `weighted_loss` was given."""
        return mean_metrics(sums, split)

    @abc.abstractmethod
    def of_pass(self, outputs: TokenOutputs | Distributions, batch: Batch) -> dict[str, jax.Array]:
        """The numbers of a pass that `loss` needs of the model, by name, float32 `[X]` or `[N]` by `axis`.

        Args:
            outputs: of each read, of the policy or of the reference; where the task `compares_distributions`, those of
                both.
            batch: the pass; `losses.sums.of_texts` sums over the reads of each of its texts.
        """
