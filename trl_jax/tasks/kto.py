"""Kahneman-Tversky optimization (KTO): train a policy on completions labeled desirable or undesirable."""

from __future__ import annotations

import logging
from collections import defaultdict
from collections.abc import Iterator
from dataclasses import dataclass, field
from typing import Any, ClassVar

import jax
import jax.numpy as jnp
import numpy as np
from datasets import Dataset, IterableDataset

from trl_jax.core.outputs import TokenOutputs
from trl_jax.data import checks, kto
from trl_jax.data.batch import Batch, Columns, Example, LossBatch
from trl_jax.data.image_rows import Encoder
from trl_jax.losses.kto import UnpairedLoss, kl_estimate
from trl_jax.losses.supervised import of_texts, real_examples, summed
from trl_jax.tasks.task import TokenTask, aux_loss, joined

logger = logging.getLogger(__name__)

_REFERENCE_COLUMNS = ("ref_logps", "ref_KL_logps")
_SIDES = ("chosen", "rejected")
_SIDE_SUMS = ("entropy", "targets", "logits", "rewards", "logps", "count")
_ALL_SUMS = ("examples", "kl", *(f"{name}_{side}" for name in _SIDE_SUMS for side in _SIDES))


@dataclass(frozen=True)
class KtoTask(TokenTask):
    """TRL's KTO: an example is a prompt with its completion and, if the loss estimates the KL term, the same prompt
    with the previous row's completion. The tokens of the completions are labeled.

    objective: the loss, with its options.
    max_length: maximum length of a prompt with its completion, in every dataset; None: no truncation.
    batch_size: rows of a micro-batch on each device; completions are paired with other prompts within them.
    in_order: whether rows are trained on in the order of the dataset.
    max_prompt_length: number of last tokens to keep of a prompt that is too long with its completion; None: all.
    """

    objective: UnpairedLoss = field(default_factory=UnpairedLoss)
    max_length: int | None = None
    batch_size: int = 8
    in_order: bool = True
    max_prompt_length: int | None = None

    compared: ClassVar[tuple[str, ...]] = ("logps",)
    num_tokens_after: ClassVar[str] = "entropy"

    @property
    def whole_micro_batches(self) -> bool:
        return self.objective.estimates_kl

    @property
    def columns(self) -> Columns:
        texts = 2 if self.objective.estimates_kl else 1
        ids, labels = zip(*(kto.JOINED, kto.KL_JOINED)[:texts], strict=True)
        reference = _REFERENCE_COLUMNS[:texts]
        return Columns(ids, numbers=("label", *reference), labels=labels, optional=reference, num_primary_texts=1)

    def prepare(
        self,
        dataset: Dataset | IterableDataset,
        tokenizer: Any,
        *,
        max_length: int | None,
        num_proc: int | None,
        name: str,
    ) -> Dataset | IterableDataset:
        """Add TRL's `prompt_ids`, `completion_ids` and `KL_completion_ids`, and the texts and labels of `columns`."""
        del max_length  # rows to predict are truncated like the others
        block = self.batch_size if self.objective.estimates_kl else None
        limits = {"max_length": self.max_length, "max_prompt_length": self.max_prompt_length}
        prepared = kto.prepare(dataset, tokenizer, block=block, num_proc=num_proc, name=name, **limits)
        if name == "train":
            if self.in_order:
                kto.warn_of_order(dataset, self.batch_size)
            if isinstance(prepared, Dataset) and not kto.is_prepared(dataset.column_names, block):
                self._check_balance(prepared["label"])
        return prepared

    def prepare_images(
        self, dataset: Dataset | IterableDataset, tokenizer: Any, *, name: str
    ) -> Dataset | IterableDataset:
        """Check the columns of a dataset with images, and give the same warnings as for text."""
        del tokenizer  # rows are tokenized during training
        kto.check_image_columns(dataset.column_names or next(iter(dataset.take(1)), {}), checks.argument(name))
        if name == "train" and isinstance(dataset, Dataset):
            self._check_balance(dataset["label"])
        return dataset

    def image_rows(self, rows: list[dict[str, Any]]) -> list[dict[str, Any]]:
        """If there is a KL term, attach to each row the row whose completion is paired with its prompt."""
        return kto.with_previous_rows(rows) if self.objective.estimates_kl else rows

    def image_example(self, row: dict[str, Any], encoder: Encoder, max_length: int | None) -> Example:
        """The texts of a row of `image_rows`, which share the prompt's images, and its label."""
        del max_length  # a collator may have its own; the task's applies
        return kto.image_example(row, encoder, self.max_length)

    def _check_balance(self, labels: list[Any]) -> None:
        """Warn if neither weight compensates for unequal numbers of desirable and undesirable rows (KTO, eq. 8)."""
        desirable = max(sum(labels), 1)
        undesirable = max(len(labels) - desirable, 1)
        desirable_weight, undesirable_weight = self.objective.desirable_weight, self.objective.undesirable_weight
        most, least = (round(undesirable * undesirable_weight / desirable * share, 2) for share in (1.33, 1))
        top, bottom = (round(desirable * desirable_weight / undesirable / share, 2) for share in (1, 1.33))
        if desirable == undesirable or least <= desirable_weight <= most or bottom <= undesirable_weight <= top:
            return
        logger.warning(
            "You have different amounts of desirable/positive and undesirable/negative examples but the weights on the "
            "desirable and undesirable losses don't seem to be in an ideal range. Based on your data, we recommend "
            f"EITHER desirable_weight in [{least}, {most}] or undesirable_weight in [{bottom}, {top}] (but NOT BOTH). "
            f"There are {desirable:,} desirable and {undesirable:,} undesirable rows."
        )

    def token_stats(self, outputs: TokenOutputs, batch: Batch) -> dict[str, jax.Array]:
        """Sums over the targets of each text, `[X]`."""
        texts, fixed = len(self.columns.texts) * len(batch.weight), jax.lax.stop_gradient(outputs)
        values = {
            "logps": outputs.logps,
            "entropy": fixed.entropy,
            "logits": fixed.mean_logits,
            "targets": jnp.ones(len(batch.text)),
        }
        return {name: of_texts(value, batch.text, texts) for name, value in values.items()}

    def loss(self, outputs: dict[str, jax.Array], batch: Batch | LossBatch) -> tuple[jax.Array, dict[str, jax.Array]]:
        """The loss of a micro-batch, and sums over it.

        Args:
            outputs: of `token_stats`; `ref_logps` of the reference are in it or, if precomputed, in the batch.
        """
        matched, *mismatched = self._split_texts(outputs)
        if "ref_logps" not in outputs:
            for text, column in zip((matched, *mismatched), _REFERENCE_COLUMNS, strict=False):
                text["ref_logps"] = batch.extras.example[column]
        ratio, desirable = matched["logps"] - matched["ref_logps"], batch.extras.example["label"] > 0
        divergence = mismatched[0]["logps"] - mismatched[0]["ref_logps"] if mismatched else jnp.zeros_like(ratio)
        kl = kl_estimate(divergence, batch.weight > 0)
        real = real_examples(batch.weight, batch.micro_batch)
        values = matched | {"rewards": self.objective.beta * ratio, "count": 1.0}
        sums = {"examples": summed(1.0, real), "kl": summed(kl, real)}
        for side, in_side in zip(_SIDES, (desirable, ~desirable), strict=True):
            sums |= {f"{name}_{side}": summed(values[name], real & in_side) for name in _SIDE_SUMS}
        return self.objective(ratio, desirable, kl, batch.weight), sums

    def _split_texts(self, outputs: dict[str, jax.Array]) -> list[dict[str, jax.Array]]:
        """Split outputs `[X]` into `[E]` for each text of an example: its own and, with a KL term, the mismatched
        one."""
        texts = len(self.columns.texts)
        parts = {name: jnp.split(values, texts) for name, values in outputs.items()}
        return [{name: part[text] for name, part in parts.items()} for text in range(texts)]

    def metrics(self, sums: list[dict[str, np.ndarray]], split: str) -> dict[str, float]:
        """TRL's metrics: means over the micro-batches that have them; in an evaluation, over the whole set."""
        totals = joined(sums, dict.fromkeys(_ALL_SUMS, np.sum), count="examples")
        if split != "train":
            totals = {name: values.sum(keepdims=True) for name, values in totals.items()}
        metrics = defaultdict(list)
        for values in zip(*totals.values(), strict=True):
            for name, value in _micro_batch_metrics(dict(zip(totals, values, strict=True))):
                metrics[name].append(value)
            metrics |= {name: [value] for name, value in aux_loss(sums).items()}  # after the first's, as in TRL
        return {name: float(np.mean(values)) for name, values in metrics.items()}


def _micro_batch_metrics(sums: dict[str, float]) -> Iterator[tuple[str, float]]:
    """The metrics of a micro-batch, by name. Desirable and undesirable ones only if it has completions of that kind."""
    sides = [side for side in _SIDES if sums[f"count_{side}"]]
    entropy, tokens = (sum(sums[f"{name}_{side}"] for side in _SIDES) for name in ("entropy", "targets"))
    yield "kl", sums["kl"] / sums["examples"]
    yield "entropy", entropy / max(tokens, 1)
    for side in sides:
        if sums[f"targets_{side}"]:
            yield f"logits/{side}", sums[f"logits_{side}"] / sums[f"targets_{side}"]
    rewards = {side: sums[f"rewards_{side}"] / sums[f"count_{side}"] for side in sides}
    for side in sides:
        yield f"rewards/{side}", rewards[side]
        yield f"logps/{side}", sums[f"logps_{side}"] / sums[f"count_{side}"]
    if len(sides) == 2:
        yield "rewards/margins", rewards["chosen"] - rewards["rejected"]
