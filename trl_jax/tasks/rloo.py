"""REINFORCE leave-one-out."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any, ClassVar

import jax
import jax.numpy as jnp
import numpy as np
from datasets import Dataset, IterableDataset

from trl_jax.data.layout.batch import Batch
from trl_jax.data.rows.tokenised_prompts import as_prompts
from trl_jax.losses.policy_gradient import Advantages, rloo_advantages, rloo_loss
from trl_jax.losses.sums import real_examples
from trl_jax.tasks.metrics import aux_loss
from trl_jax.tasks.policy import PolicyTask
from trl_jax.tasks.policy_metrics import means, rloo_metrics


@dataclass(frozen=True)
class RlooTask(PolicyTask):
    """TRL's RLOO: a completion is one action, and the divergence from the reference a part of its reward.

    epsilon, epsilon_high: how far the ratio of policies may go from 1; epsilon_high None: as epsilon.
    reward_clip_range: bounds of the weighted sum of rewards; None: none.
    normalize_advantages: divide them by their standard deviation.
    """

    epsilon: float = 0.2
    epsilon_high: float | None = None
    reward_clip_range: tuple[float, float] | None = None
    normalize_advantages: bool = False

    divergence_in_reward: ClassVar[bool] = True

    def prepare(
        self, dataset: Dataset | IterableDataset, tokenizer: Any, *, name: str, **limits: Any
    ) -> Dataset | IterableDataset:
        """The rows as they are, or of those that are tokens, as up to TRL 0.21, the texts."""
        return super().prepare(as_prompts(dataset, name, tokenizer), tokenizer, name=name, **limits)

    @property
    def keeps_old_logps(self) -> bool:
        return True

    def numbers(self, row: Any) -> tuple[dict[str, float], dict[str, np.ndarray]]:
        old = float(np.sum(row.old_logps[row.completion_mask], dtype=np.float32))
        return {"advantage": row.advantage, "old_logps": old}, {}

    def advantages(self, rewards: np.ndarray, group: int, kl: np.ndarray | None) -> Advantages:
        """Over the mean of the group's others."""
        options = {"reward_clip_range": self.reward_clip_range, "normalize": self.normalize_advantages}
        return rloo_advantages(rewards, group, weights=self.reward_weights, kl=kl, beta=self.beta, **options)

    def token_weights(
        self, lengths: np.ndarray, completion_weight: np.ndarray, micro_batch: np.ndarray, **of_generation: Any
    ) -> np.ndarray:
        return completion_weight

    def loss(self, outputs: dict[str, jax.Array], batch: Batch) -> tuple[jax.Array, dict[str, jax.Array]]:
        """The step's loss of the completions of a pass, and sums over micro-batches."""
        return rloo_loss(
            outputs["logps"],
            batch.extras.example["old_logps"],
            batch.extras.example["advantage"],
            entropies=outputs["entropy"],
            text=batch.text,
            completion_weight=batch.weight,
            micro_batch=real_examples(batch.weight, jnp.atleast_2d(batch.micro_batch)),
            epsilon=self.epsilon,
            epsilon_high=self.epsilon_high,
        )

    def metrics(self, sums: Sequence[dict[str, np.ndarray]], split: str) -> dict[str, float | None]:
        """TRL's metrics of the policy: means over micro-batches."""
        return aux_loss(sums) | means(rloo_metrics(sums))
