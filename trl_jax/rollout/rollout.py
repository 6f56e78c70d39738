"""Prompts -> completions, and what is learned from them."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from typing import Any, Protocol

import numpy as np

from trl_jax.rollout.completions.log import CompletionsLog
from trl_jax.rollout.experience import Completed, Experience
from trl_jax.rollout.judge import Judge
from trl_jax.rollout.metrics import Collected, length_metrics
from trl_jax.rollout.written import Ids, Written

Row = dict[str, Any]


class Writer(Protocol):
    """Text in and out of the policy."""

    def write(self, prompts: list, group: int) -> Written:
        """A completion of each prompt, of which `group` that are alike stand side by side."""

    def completions(self, prompts: list, prompt_ids: Ids, completion_ids: Ids) -> list:
        """Completions as reward functions see them: texts, or messages where the prompts are."""

    def decoded(self, ids: Ids) -> list[str]:
        """Texts without special tokens."""


@dataclass
class Rollout:
    """Writes completions with the policy as it is, and has them judged.

    writer: the policy, with its tokenizer.
    judge: says how good completions are; None where each is learned from alike.
    ends: ids that a completion which was not broken off ends with.
    drops_truncated: nothing is learned from completions that were broken off.
    saw_tokens: told how many tokens were read and written in training; gives those of the whole run.
    table: shows and writes completions with their rewards; None does not.
    tell: says to whoever looks on what is being done.
    begin: rows -> rows with what completions need that act in environments.
    """

    writer: Writer
    judge: Judge | None
    ends: frozenset[int]
    drops_truncated: bool
    saw_tokens: Callable[[int], int]
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
        next_thing = "training" if mode == "train" else "evaluating"
        made = self.writer.write(prompts, group)
        truncated = self._measured(made, mode, metrics)
        dropped = truncated & self.drops_truncated
        completion_mask = [own & (not out) for own, out in zip(made.by_model, dropped, strict=True)]
        ids, written = ([np.asarray(own, np.int32) for own in part] for part in (made.prompt_ids, made.completion_ids))
        if self.judge is None:
            self.tell(next_thing)
            if self.table is not None:
                self.table.add(mode, self.writer.decoded(ids), self.writer.decoded(written))
            return Experience([Completed(*row, 0.0) for row in zip(ids, written, completion_mask, strict=True)])
        texts = made.messages
        if texts is None:
            texts = self.writer.completions(prompts, made.prompt_ids, made.completion_ids)
        judged = self.judge(rows, prompts, texts, made, completion_mask, group, metrics)
        self.tell(f"{judged}, {next_thing}")
        advantages = judged.advantages.advantages
        if self.table is not None:
            self.table.add(mode, prompts, texts, judged.rewards, advantages, self.judge.rewards.extra())
        of_each = ids, written, completion_mask, advantages.tolist(), judged.old_logps, judged.ref_logps
        return Experience(list(map(Completed, *of_each)))

    def _measured(self, made: Written, mode: str, metrics: Collected) -> np.ndarray:
        """Which completions were broken off, bool `[B]`; their lengths and tokens become metrics."""
        lengths = [int(own.sum()) for own in made.by_model]
        truncated = np.asarray([int(own[-1]) not in self.ends for own in made.completion_ids])
        tokens = sum(map(len, made.prompt_ids)) + sum(lengths)
        metrics.set("num_tokens", float(self.saw_tokens(tokens if mode == "train" else 0)))
        metrics.add(length_metrics(lengths, truncated))
        metrics.add(iter(made.metrics.items()))
        return truncated

    def logged(self, mode: str, step: int) -> dict[str, float | None]:
        """The metrics since the last log, by TRL's names; and the table of completions is shown."""
        if self.table is not None:
            self.table.log(mode, step)
        return self.collected[mode].taken()
