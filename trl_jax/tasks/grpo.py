"""Group relative policy optimisation, and the losses that grew out of it."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np

from trl_jax.data.layout.batch import Batch
from trl_jax.losses.policy_gradient import Advantages, PolicyLoss, group_advantages, grpo_loss, token_weights
from trl_jax.losses.sums import real_examples
from trl_jax.tasks.metrics import aux_loss
from trl_jax.tasks.policy import PolicyTask
from trl_jax.tasks.policy_metrics import grpo_metrics, means


@dataclass(frozen=True)
class GrpoTask(PolicyTask):
    """TRL's GRPO.

    objective: the loss, with its options.
    multi_objective_aggregation, scale_rewards: as of `group_advantages`.
    entropy_bonus: whether the step has a coefficient of one, among the numbers of examples.
    """

    objective: PolicyLoss = PolicyLoss()
    multi_objective_aggregation: str = "sum_then_normalize"
    scale_rewards: str = "group"
    entropy_bonus: bool = False

    @property
    def keeps_old_logps(self) -> bool:
        """Only where the policy may have changed since: otherwise they are its own."""
        return not self.cycle.keeps_policy

    def numbers(self, row: Any) -> tuple[dict[str, float], dict[str, np.ndarray]]:
        logps = {"old_logps": row.old_logps, "ref_logps": row.ref_logps}
        of_tokens = {name: values[row.completion_mask] for name, values in logps.items() if values is not None}
        return {"advantage": row.advantage}, of_tokens

    def advantages(self, rewards: np.ndarray, group: int, kl: np.ndarray | None) -> Advantages:
        """Relative to the group's mean; the divergence is a part of the loss."""
        options = {"aggregation": self.multi_objective_aggregation, "scale_rewards": self.scale_rewards}
        return group_advantages(rewards, group, weights=self.reward_weights, **options)

    def token_weights(
        self, lengths: np.ndarray, completion_weight: np.ndarray, micro_batch: np.ndarray, **of_generation: Any
    ) -> np.ndarray:
        return token_weights(self.objective, lengths, completion_weight, micro_batch, **of_generation)

    def loss(self, outputs: dict[str, jax.Array], batch: Batch) -> tuple[jax.Array, dict[str, jax.Array]]:
        """The step's loss of the completions of a pass, and sums over micro-batches."""
        numbers, of_reads = batch.extras.example, batch.extras.read
        coefficient = jnp.max(numbers["entropy_coef"]) if self.entropy_bonus else None
        ref_logps = of_reads.get("ref_logps")
        if self.diverges_in_loss:
            itself = jnp.max(numbers["at_reference"]) > 0
            ref_logps = jnp.where(itself, jax.lax.stop_gradient(outputs["logps"]), ref_logps)
        return grpo_loss(
            outputs["logps"],
            numbers["advantage"],
            old_logps=of_reads.get("old_logps"),
            ref_logps=ref_logps,
            entropies=outputs["entropy"],
            sampling_logps=of_reads.get("sampling_logps"),
            text=batch.text,
            token_weight=numbers["token_weight"],
            completion_weight=batch.weight,
            micro_batch=real_examples(batch.weight, jnp.atleast_2d(batch.micro_batch)),
            entropy_coef=coefficient,
            settings=self.objective,
        )

    def metrics(self, sums: Sequence[dict[str, np.ndarray]], split: str) -> dict[str, float | None]:
        """TRL's metrics of the policy: means over micro-batches."""
        found = means(grpo_metrics(self.objective, sums))
        first = {name: found.pop(name) for name in ("policy_loss",) if name in found}
        return first | aux_loss(sums) | found
