"""Contrastive preference optimisation: chosen answers are fine-tuned on, and must beat the rejected ones."""

from __future__ import annotations

from dataclasses import dataclass, field

import jax

from trl_jax.losses.reference_free import ContrastiveLoss
from trl_jax.tasks.reference_free import ReferenceFreeTask
from trl_jax.tasks.task import Sums


@dataclass(frozen=True)
class CpoTask(ReferenceFreeTask):
    """TRL's CPO (arXiv:2401.08417), SimPO and AlphaPO. The negative log-likelihood is of the chosen answers alone.

    objective: the loss of pairs, with its options.
    nll_weight: the factor of the negative log-likelihood, `cpo_alpha`.
    """

    objective: ContrastiveLoss = field(default_factory=ContrastiveLoss)
    nll_weight: float = 1.0

    @property
    def of_mean_token(self) -> bool:
        return self.objective.of_mean_token

    def compared_answers(
        self, chosen: jax.Array, rejected: jax.Array
    ) -> tuple[jax.Array, tuple[jax.Array, jax.Array], Sums]:
        """Of the answers' log-probabilities; the rewards are their scores, times beta."""
        scores = self.objective.score(chosen), self.objective.score(rejected)
        rewards = tuple(self.objective.beta * jax.lax.stop_gradient(score) for score in scores)
        return self.objective(*scores), rewards, {}
