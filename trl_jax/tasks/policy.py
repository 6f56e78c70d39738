"""The common part of tasks that learn from the rewards of completions which the policy writes itself: GRPO and RLOO."""

from __future__ import annotations

import abc
from dataclasses import dataclass
from typing import ClassVar, Literal

import jax
import numpy as np

from trl_jax.core.token_outputs import TokenOutputs
from trl_jax.data.layout.batch import Batch
from trl_jax.losses.policy_gradient import Advantages
from trl_jax.tasks.rollout import RolloutTask

Sums = dict[str, jax.Array]


@dataclass(frozen=True)
class PolicyTask(RolloutTask):
    """Completions in groups of one prompt, whose rewards are compared with each other.

    beta: how strongly the policy is held near the reference; 0.0: there is none.
    reward_weights: of the reward functions, in their order; None: 1.0 each.
    """

    num_generations: int = 8
    num_generations_eval: int = 8
    beta: float = 0.0
    reward_weights: tuple[float, ...] | None = None

    axis: ClassVar[Literal["read"]] = "read"
    compared: ClassVar[tuple[str, ...]] = ()  # with a reference when completions are written, not in the step
    per_token: ClassVar[bool] = False
    by_micro_batch: ClassVar[bool] = True
    divergence_in_reward: ClassVar[bool] = False  # whether that from the reference is a part of the reward

    @property
    def diverges_in_loss(self) -> bool:
        return bool(self.beta) and not self.divergence_in_reward

    @property
    def logps(self) -> frozenset[str]:
        kept = {"old_logps": self.keeps_old_logps, "ref_logps": bool(self.beta)}
        return frozenset(name for name, there in kept.items() if there)

    def of_pass(self, outputs: TokenOutputs, batch: Batch) -> Sums:
        """The log-probability and the entropy of each read, `[N]`."""
        return {"logps": outputs.logps, "entropy": outputs.entropy}

    @property
    @abc.abstractmethod
    def keeps_old_logps(self) -> bool:
        """Whether the log-probabilities under the policy that wrote the completions are kept."""

    @abc.abstractmethod
    def advantages(self, rewards: np.ndarray, group: int, kl: np.ndarray | None) -> Advantages:
        """Advantages `[B]` of completions.

        Args:
            rewards: float32 `[B, F]`, NaN where a function does not apply; `group` completions of a prompt stand side
                by side.
            kl: `[B]`, the sum over a completion's tokens of its log-probability less the reference's; None without one.
        """
