"""Reward models: train the score of each pair's chosen completion to exceed the score of the rejected one."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any, ClassVar, Literal

import jax
import jax.numpy as jnp
import numpy as np
from datasets import Dataset, IterableDataset

from trl_jax.data import reward
from trl_jax.data.batch import Batch, Columns, LossBatch, of_examples
from trl_jax.losses.supervised import pairwise_loss
from trl_jax.tasks.task import ScoreTask, joined

_JOINS = {
    "pairs": np.sum, "correct": np.sum, "margin_sum": np.sum, "reward_sum": np.sum,
    "reward_min": np.min, "reward_max": np.max,
}  # fmt: skip


@dataclass(frozen=True)
class RewardTask(ScoreTask):
    """TRL's reward modeling: an example has two texts, each scored at its last real token.

    center_rewards_coefficient: coefficient of the term that centers scores; None omits it.
    """

    center_rewards_coefficient: float | None = None

    head: ClassVar[Literal["score"]] = "score"
    columns: ClassVar[Columns] = Columns(("chosen_ids", "rejected_ids"), ("margin",), optional=("margin",))

    def prepare(self, dataset: Dataset | IterableDataset, tokenizer: Any, **limits: Any) -> Dataset | IterableDataset:
        """Add `chosen_ids` and `rejected_ids` to preference rows of every format, and drop pairs that are too long."""
        return reward.prepare(dataset, tokenizer, **limits)

    def loss(self, outputs: jax.Array, batch: Batch | LossBatch) -> tuple[jax.Array, dict[str, jax.Array]]:
        """`losses.pairwise_loss` of the scores `[2E]`: first of all chosen completions, then of all rejected ones."""
        chosen, rejected = jnp.split(outputs, 2)
        return pairwise_loss(
            chosen,
            rejected,
            weight=batch.weight,
            margin=batch.extras.example.get("margin"),
            center_rewards_coefficient=self.center_rewards_coefficient,
            micro_batch=batch.micro_batch,
        )

    def metrics(self, sums: list[dict[str, np.ndarray]], split: str) -> dict[str, float]:
        """TRL's metrics of a reward model; empty without pairs.

        In training, each is the mean over micro-batches of their means or extremes, as in TRL. In an evaluation, means
        are over all pairs, however they were batched; TRL averages the means of batches, so that pairs of a short last
        batch have more weight. Extremes are averaged over batches in both.
        """
        totals = joined(sums, _JOINS, count="pairs")
        pairs = totals["pairs"]
        if not pairs.size:
            return {}
        mean = (lambda total: np.mean(total / pairs)) if split == "train" else lambda total: total.sum() / pairs.sum()
        return {
            "min_reward": float(np.mean(totals["reward_min"])),
            "mean_reward": float(mean(totals["reward_sum"] / 2)),
            "max_reward": float(np.mean(totals["reward_max"])),
            "accuracy": float(mean(totals["correct"])),
            "margin": float(mean(totals["margin_sum"])),
        }

    def predictions(self, outputs: np.ndarray, num_examples: int) -> np.ndarray:
        """Scores `[2P, 1]`: the chosen completions of a batch, then its rejected ones."""
        return of_examples(outputs, 2, num_examples)[:, None]

    def inputs(self, batch: dict[str, Any]) -> dict[str, Any]:
        """Add the names of early TRL releases to the batch: `input_ids_chosen` etc."""
        for name in ("input_ids", "attention_mask"):
            chosen, rejected = np.split(batch[name], 2)
            batch = batch | {f"{name}_chosen": chosen, f"{name}_rejected": rejected}
        return batch
