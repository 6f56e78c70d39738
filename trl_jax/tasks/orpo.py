"""Odds ratio preference optimisation: fine-tuning on the chosen texts, which answers must beat the rejected ones."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any, ClassVar

import jax

from trl_jax.data.example import IGNORED, Example
from trl_jax.losses.reference_free import odds_ratio
from trl_jax.tasks.reference_free import ReferenceFreeTask
from trl_jax.tasks.task import Sums


@dataclass(frozen=True)
class OrpoTask(ReferenceFreeTask):
    """TRL's ORPO (arXiv:2403.07691). The negative log-likelihood is of prompts, too.

    beta: the factor of the odds ratio, lambda in the paper.
    """

    beta: float = 0.1

    of_mean_token: ClassVar[bool] = True
    nll_weight: ClassVar[float] = 1.0
    further: ClassVar[tuple[str, ...]] = ("log_odds_ratio", "log_odds_chosen")

    def example(self, row: dict[str, Any]) -> Example:
        """Both texts of a row. Of the chosen one every token is a target; `in_answer` tells those of the answers."""
        example = super().example(row)
        chosen, rejected = example.labels
        every = example._replace(labels=(list(example.texts[0]), rejected))
        in_answer = ([label != IGNORED for label in chosen[1:]], [1.0] * len(every.targets(1)[0]))
        return every._replace(extras=every.extras._replace(read={"in_answer": in_answer}))

    def compared_answers(
        self, chosen: jax.Array, rejected: jax.Array
    ) -> tuple[jax.Array, tuple[jax.Array, jax.Array], Sums]:
        """Of the answers' mean log-probabilities; the rewards are these, times beta."""
        ratio, odds = odds_ratio(chosen, rejected)
        rewards = tuple(self.beta * jax.lax.stop_gradient(logps) for logps in (chosen, rejected))
        return -self.beta * ratio, rewards, {"log_odds_ratio": ratio, "log_odds_chosen": odds}
