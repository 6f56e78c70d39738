"""Generalized knowledge distillation: a student learns a teacher's distributions on completions of any origin."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any, ClassVar

import jax
from datasets import Dataset, IterableDataset

from trl_jax.data import chatml
from trl_jax.data.batch import Batch, Columns, LossBatch
from trl_jax.losses.supervised import of_texts
from trl_jax.nn.head import Distributions, divergences
from trl_jax.tasks.task import Sums, TokenTask, weighted_loss


@dataclass(frozen=True)
class GkdTask(TokenTask):
    """TRL's GKD (https://huggingface.co/papers/2306.13649). The run's reference is the teacher.

    beta: of the generalized Jensen-Shannon divergence, `nn.head.divergences`. Both distributions are at temperature 1,
        as in TRL, whose `temperature` only applies to sampling.
    max_length: rows keep so many of their last tokens; None as in `chatml.prepare`.
    """

    beta: float = 0.5
    max_length: int | None = None

    per_token: ClassVar[bool] = True
    compares_distributions: ClassVar[bool] = True
    columns: ClassVar[Columns] = Columns(("input_ids",), labels=("labels",))

    def prepare(
        self,
        dataset: Dataset | IterableDataset,
        tokenizer: Any,
        *,
        max_length: int | None,
        num_proc: int | None,
        name: str,
    ) -> Dataset | IterableDataset:
        """Add `input_ids` and `labels`, as TRL's DataCollatorForChatML makes them."""
        del max_length  # rows to predict are cut like the others
        return chatml.prepare(dataset, tokenizer, max_length=self.max_length, num_proc=num_proc, name=name)

    def of_pass(self, outputs: Distributions, batch: Batch) -> dict[str, jax.Array]:
        """The sum of the divergences over the targets of each text, `[X]`."""
        found = divergences(*outputs, beta=self.beta).divergence
        return {"divergence": of_texts(found, batch.text, len(batch.weight))}

    def loss(self, outputs: dict[str, jax.Array], batch: Batch | LossBatch) -> tuple[jax.Array, Sums]:
        """The weighted sum of the divergences of tokens."""
        return weighted_loss(outputs["divergence"], batch)
