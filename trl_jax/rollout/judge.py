"""Completions -> rewards -> advantages."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any, NamedTuple, Protocol

import numpy as np

from trl_jax.losses.policy_gradient import Advantages
from trl_jax.rollout.metrics import Collected, reward_metrics
from trl_jax.rollout.written import Ids, Written
from trl_jax.tasks.policy import PolicyTask

Logps = Sequence[np.ndarray]


class Rewards(Protocol):
    """Reward functions. `names` are those of the metrics."""

    names: Sequence[str]

    def __call__(self, rows: Sequence[dict], prompts: list, completions: list, completion_ids: list) -> np.ndarray:
        """The reward of each completion by each function, float32 `[B, F]`, NaN where one does not apply."""

    def metrics(self) -> dict[str, float]:
        """The metrics that functions have logged in the last call, sorted by name."""

    def extra(self) -> dict[str, list]:
        """The columns that functions have logged in the last call, sorted by name."""


class Judged(NamedTuple):
    """Of B completions.

    rewards: float32 `[B, F]`. advantages: as of `PolicyTask.advantages`.
    old_logps, ref_logps: log-probabilities of each completion's tokens under the policy that wrote it and under the
        reference; None of each where nobody needs them.
    """

    rewards: np.ndarray
    advantages: Advantages
    old_logps: Sequence[np.ndarray | None]
    ref_logps: Sequence[np.ndarray | None]

    def __str__(self) -> str:
        """For whoever looks on: the mean of the rewards that there are."""
        found = self.advantages.rewards[~np.isnan(self.advantages.rewards)]
        return f"reward {found.mean():.3g}" if len(found) else "reward unknown"


@dataclass
class Judge:
    """Asks the reward functions, and compares a prompt's completions by what they say.

    task: how rewards become advantages.
    logps: ("policy" or "reference", prompts, completions, completion_mask) -> log-probabilities of the completions'
        tokens under that model; float32 `[tokens]` of each.
    start: begins a call and returns a function that waits for what it gives: log-probabilities are computed while
        completions are judged. Reward functions stay in this thread, which some need for signals of their own.
    tell: says to whoever looks on what is being done.
    """

    task: PolicyTask
    rewards: Rewards
    logps: Callable[[str, Ids, Ids, Sequence[np.ndarray]], Logps]
    start: Callable[[Callable[[], Any]], Callable[[], Any]]
    tell: Callable[[str], None] = lambda text: None

    def __call__(
        self,
        rows: Sequence[dict[str, Any]],
        prompts: list,
        texts: list,
        made: Written,
        completion_mask: Sequence[np.ndarray],
        group: int,
        metrics: Collected,
    ) -> Judged:
        """Judge completions, of which `group` that are alike in their prompt stand side by side.

        Args:
            texts: the completions as reward functions see them; the other arguments are those of all of a rollout.
        """
        ids, written = made.prompt_ids, made.completion_ids
        passes = self.start(lambda: self._logps(ids, written, completion_mask))
        self.tell(f"rewards of {len(rows)} completions")
        rewards = self.rewards(made.with_columns(rows), prompts, texts, [own.tolist() for own in written])
        old, ref = passes()
        kl = _divergence(old, ref, completion_mask)
        if self.task.divergence_in_reward and self.task.beta:
            metrics.add(iter([("kl", float(kl.sum() / max(1, sum(own.sum() for own in completion_mask))))]))
        advantages = self.task.advantages(rewards, group, kl)
        metrics.add(reward_metrics(self.rewards.names, rewards, advantages))
        metrics.add(iter(self.rewards.metrics().items()))
        return Judged(rewards, advantages, old, ref)

    def _logps(self, ids: Ids, written: Ids, completion_mask: Sequence[np.ndarray]) -> tuple[Sequence, Sequence]:
        """Log-probabilities under the policy and under the reference; None for each completion, where nobody asks."""
        nothing = [None] * len(written)
        old = self.logps("policy", ids, written, completion_mask) if self.task.keeps_old_logps else nothing
        return old, self.logps("reference", ids, written, completion_mask) if self.task.beta else nothing


def _divergence(old: Logps, ref: Logps, completion_mask: Sequence[np.ndarray]) -> np.ndarray | None:
    """The sum of old - reference log-probabilities over each completion's tokens, float32 `[B]`."""
    if old[0] is None or ref[0] is None:
        return None
    return np.asarray([np.sum((a - b) * c) for a, b, c in zip(old, ref, completion_mask, strict=True)], np.float32)
