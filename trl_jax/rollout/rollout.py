"""Prompts -> completions -> rewards -> advantages."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from typing import Any, Protocol

import numpy as np

from trl_jax.rollout.completions.log import CompletionsLog
from trl_jax.rollout.experience import Completed, Experience
from trl_jax.rollout.metrics import Collected, length_metrics, reward_metrics
from trl_jax.rollout.written import Written
from trl_jax.tasks.policy import PolicyTask

Ids = Sequence[Sequence[int]]
Logps = Sequence[np.ndarray]
Row = dict[str, Any]


class Rewards(Protocol):
    """Reward functions. `names` are those of the metrics."""

    names: Sequence[str]

    def __call__(self, rows: Sequence[dict], prompts: list, completions: list, completion_ids: list) -> np.ndarray:
        """The reward of each completion by each function, float32 `[B, F]`, NaN where one does not apply."""

    def metrics(self) -> dict[str, float]:
        """The metrics that functions have logged in the last call, sorted by name."""

    def extra(self) -> dict[str, list]:
        """The columns that functions have logged in the last call, sorted by name."""


class Writer(Protocol):
    """Text in and out of the policy."""

    def write(self, prompts: list, group: int) -> Written:
        """A completion of each prompt, of which `group` that are alike stand side by side."""

    def completions(self, prompts: list, prompt_ids: Ids, completion_ids: Ids) -> list: ...


@dataclass
class Rollout:
    """Writes completions with the policy as it is, and judges them.

    task: how rewards become advantages.
    writer: the policy, with its tokenizer.
    rewards: the reward functions.
    logps: ("policy" or "reference", prompts, completions, completion_mask) -> log-probabilities of the completions'
        tokens under that model; float32 `[tokens]` of each.
    ends: ids that a completion which was not broken off ends with.
    drops_truncated: nothing is learned from completions that were broken off.
    saw_tokens: told how many tokens were read and written in training; gives those of the whole run.
    table: shows and writes completions with their rewards; None does not.
    tell: says to whoever looks on what is being done.
    begin: rows -> rows with what completions need that act in environments.
    start: begins a call and returns a function that waits for what it gives: log-probabilities are computed while
        completions are judged. Reward functions stay in this thread, which some need for signals of their own.
    """

    task: PolicyTask
    writer: Writer
    rewards: Rewards
    logps: Callable[[str, Ids, Ids, Sequence[np.ndarray]], Logps]
    ends: frozenset[int]
    drops_truncated: bool
    saw_tokens: Callable[[int], int]
    start: Callable[[Callable[[], Any]], Callable[[], Any]]
    table: CompletionsLog | None = None
    tell: Callable[[str], None] = lambda text: None
    begin: Callable[[Sequence[Row]], Sequence[Row]] = lambda rows: rows
    collected: dict[str, Collected] = field(default_factory=lambda: {"train": Collected(), "eval": Collected()})

    def make(self, rows: Sequence[dict[str, Any]], group: int, mode: str) -> Experience:
        """Complete the prompts of these rows, of which `group` that are alike stand side by side.

        Args:
            mode: "train" or "eval": where metrics are collected.
        """
        rows = self.begin(rows)
        metrics, prompts = self.collected[mode], [row["prompt"] for row in rows]
        made = self.writer.write(prompts, group)
        ids, written, lengths = made.prompt_ids, made.completion_ids, [int(own.sum()) for own in made.by_model]
        texts = self.writer.completions(prompts, ids, written) if made.messages is None else made.messages
        truncated = np.asarray([int(own[-1]) not in self.ends for own in written])
        tokens = sum(map(len, ids)) + sum(lengths)
        metrics.set("num_tokens", float(self.saw_tokens(tokens if mode == "train" else 0)))
        metrics.add(length_metrics(lengths, truncated))
        metrics.add(iter(made.metrics.items()))
        dropped = truncated & self.drops_truncated
        completion_mask = [own & (not out) for own, out in zip(made.by_model, dropped, strict=True)]
        passes = self.start(lambda: self._logps(ids, written, completion_mask))
        self.tell(f"rewards of {len(rows)} completions")
        rewards = self.rewards(made.with_columns(rows), prompts, texts, [own.tolist() for own in written])
        old, ref = passes()
        kl = _divergence(old, ref, completion_mask)
        if self.task.divergence_in_reward and self.task.beta:
            metrics.add(iter([("kl", float(kl.sum() / max(1, sum(own.sum() for own in completion_mask))))]))
        advantages = self.task.advantages(rewards, group, kl)
        metrics.add(reward_metrics(self.rewards.names, rewards, advantages))
        self.tell(f"reward {_mean(advantages.rewards)}, {'training' if mode == 'train' else 'evaluating'}")
        metrics.add(iter(self.rewards.metrics().items()))
        if self.table is not None:
            self.table.add(mode, prompts, texts, rewards, advantages.advantages, self.rewards.extra())
        ids, written = ([np.asarray(own, np.int32) for own in part] for part in (ids, written))
        return Experience(list(map(Completed, ids, written, completion_mask, advantages.advantages.tolist(), old, ref)))

    def _logps(self, ids: Ids, written: Ids, completion_mask: Sequence[np.ndarray]) -> tuple[Sequence, Sequence]:
        """Log-probabilities under the policy and under the reference; None for each completion, where nobody asks."""
        nothing = [None] * len(written)
        old = self.logps("policy", ids, written, completion_mask) if self.task.keeps_old_logps else nothing
        return old, self.logps("reference", ids, written, completion_mask) if self.task.beta else nothing

    def logged(self, mode: str, step: int) -> dict[str, float | None]:
        """The metrics since the last log, by TRL's names; and the table of completions is shown."""
        if self.table is not None:
            self.table.log(mode, step)
        return self.collected[mode].taken()


def _mean(rewards: np.ndarray) -> str:
    """Of those that there are."""
    found = rewards[~np.isnan(rewards)]
    return f"{found.mean():.3g}" if len(found) else "unknown"


def _divergence(old: Logps, ref: Logps, completion_mask: Sequence[np.ndarray]) -> np.ndarray | None:
    """The sum of old - reference log-probabilities over each completion's tokens, float32 `[B]`."""
    if old[0] is None or ref[0] is None:
        return None
    return np.asarray([np.sum((a - b) * c) for a, b, c in zip(old, ref, completion_mask, strict=True)], np.float32)
