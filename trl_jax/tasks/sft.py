"""Supervised fine-tuning: a language model is trained to predict the tokens of texts, or the labelled part of them."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Any, ClassVar, Literal

import jax
import jax.numpy as jnp
import numpy as np
from datasets import Dataset, IterableDataset

from trl_jax.core.outputs import TokenOutputs
from trl_jax.data import sft
from trl_jax.data.batch import Batch, Columns, LossBatch
from trl_jax.losses.supervised import dynamic_fine_tuning, negative_log_likelihood, of_texts, real_examples, summed
from trl_jax.tasks.task import TokenTask, aux_loss, joined

_SUMS = ("targets", "entropy", "correct")


@dataclass(frozen=True)
class SftTask(TokenTask):
    """TRL's supervised fine-tuning: one text an example, and labels for its tokens.

    loss_type: "nll" or "dft".
    label_smoothing_factor: of "nll".
    row_options: how rows become examples, further arguments of `data.rows.sft.prepare`.
    eval_packing: whether sets other than the training set are packed; None as that.
    padding_free: whether TRL would lay the texts of a micro-batch end to end, as it does with packed documents.
    """

    loss_type: Literal["nll", "dft"] = "nll"
    label_smoothing_factor: float = 0.0
    row_options: Mapping[str, Any] = field(default_factory=dict)
    eval_packing: bool | None = None
    padding_free: bool = False

    head: ClassVar[Literal["lm"]] = "lm"
    axis: ClassVar[Literal["text"]] = "text"
    compared: ClassVar[tuple[str, ...]] = ()
    temperature: ClassVar[float] = 1.0
    per_token: ClassVar[bool] = True
    by_micro_batch: ClassVar[bool] = False
    num_tokens_after: ClassVar[str] = "mean_token_accuracy"
    predicts_first: ClassVar[bool] = True
    columns: ClassVar[Columns] = Columns(("input_ids",), labels=("labels",), documents="seq_lengths")

    def prepare(
        self, dataset: Dataset | IterableDataset, tokenizer: Any, *, name: str, **limits: Any
    ) -> Dataset | IterableDataset:
        """Add `input_ids`, `labels` and, where texts are packed, `seq_lengths` to rows of every form that TRL takes.

        Rows of which predictions are asked for, under the name "test", stay as they are and in their order.
        """
        options = dict(self.row_options)
        if name == "test":
            options |= {"packing": False, "shuffle_dataset": False}
        elif name != "train" and self.eval_packing is not None:
            options["packing"] = self.eval_packing
        return sft.prepare(dataset, tokenizer, name=name, **limits, **options)

    def of_pass(self, outputs: TokenOutputs, batch: Batch) -> dict[str, jax.Array]:
        """Sums over the targets of each text, `[X]`: of their loss and entropy, of those that are predicted, of all."""
        texts = len(batch.weight)  # one an example
        losses = (
            dynamic_fine_tuning(outputs)
            if self.loss_type == "dft"
            else negative_log_likelihood(outputs, self.label_smoothing_factor)
        )
        values = {"loss": losses, "entropy": jax.lax.stop_gradient(outputs.entropy), "correct": outputs.correct}
        sums = {name: of_texts(value, batch.text, texts) for name, value in values.items()}
        return sums | {"targets": of_texts(jnp.ones(len(batch.text)), batch.text, texts)}

    def loss(self, outputs: dict[str, jax.Array], batch: Batch | LossBatch) -> tuple[jax.Array, dict[str, jax.Array]]:
        """The weighted sum of the losses of targets, and sums over the micro-batches."""
        real = real_examples(batch.weight, batch.micro_batch)
        sums = {name: summed(outputs[name], real) for name in _SUMS}
        return jnp.sum(batch.weight * outputs["loss"]), sums | {"examples": summed(1.0, real)}

    def metrics(self, sums: list[dict[str, np.ndarray]], split: str) -> dict[str, float]:
        """TRL's metrics: the mean entropy of predictions, in nats, and the share of targets that are the likeliest id.

        In training, the mean over micro-batches of their means, as in TRL, with 0 for one without targets. In an
        evaluation, the mean over all targets of the set.
        """
        totals = joined(sums, dict.fromkeys((*_SUMS, "examples"), np.sum), count="examples")
        if not totals["examples"].size:
            return {}
        if split != "train":
            totals = {name: values.sum(keepdims=True) for name, values in totals.items()}
        targets = np.maximum(totals["targets"], 1)
        return {
            "entropy": float(np.mean(totals["entropy"] / targets)),
            "mean_token_accuracy": float(np.mean(totals["correct"] / targets)),
            **aux_loss(sums),
        }
