"""The common part of tasks that learn from completions which the policy writes itself: GRPO and RLOO."""

from __future__ import annotations

import abc
import warnings
from collections.abc import Sequence
from dataclasses import dataclass, fields
from typing import Any, ClassVar, Literal

import jax
import numpy as np
from datasets import Dataset, IterableDataset

from trl_jax.core.token_outputs import TokenOutputs
from trl_jax.data.example import Columns, Example
from trl_jax.data.layout.batch import Batch
from trl_jax.data.rows.prompts import check_prompts
from trl_jax.losses.policy_gradient import Advantages
from trl_jax.tasks.task import TokenTask

Sums = dict[str, jax.Array]


@dataclass(frozen=True)
class Cycle:
    """How generations and steps go together.

    group: completions of a prompt. prompts: of a generation. parts: micro-batches that a generation is cut into.
    iterations: how often they are trained on. accumulation: micro-batches of a step.
    """

    group: int = 8
    prompts: int = 1
    parts: int = 1
    iterations: int = 1
    accumulation: int = 1

    @property
    def repeats(self) -> int:
        """Micro-batches between two generations."""
        return self.parts * self.iterations

    @property
    def keeps_policy(self) -> bool:
        """Whether the policy that trains is always the one that wrote: each generation is used up within a step."""
        return self.accumulation % self.repeats == 0

    def micro_batches(self, rows: int) -> int:
        """Those of an epoch over so many prompts; prompts that do not fill a generation are left out.

        Raises:
            ValueError: there are not enough for one.
        """
        if rows < self.prompts:
            raise ValueError(
                f"train_dataset has {rows} prompts, and a generation takes {self.prompts} (generation_batch_size / "
                "num_generations): there would be no step. Pass more prompts, or lower generation_batch_size."
            )
        return rows // self.prompts * self.repeats


@dataclass(frozen=True)
class PolicyTask(TokenTask):
    """Completions in groups of one prompt, whose rewards are compared with each other.

    num_generations, num_generations_eval: completions of a prompt, in training and in an evaluation.
    temperature: what logits are divided by: completions are sampled so, and log-probabilities and entropies are those.
    beta: how strongly the policy is held near the reference; 0.0: there is none.
    reward_weights: of the reward functions, in their order; None: 1.0 each.
    cycle: how generations and steps go together.
    """

    num_generations: int = 8
    num_generations_eval: int = 8
    temperature: float = 1.0
    beta: float = 0.0
    reward_weights: tuple[float, ...] | None = None
    cycle: Cycle = Cycle()

    head: ClassVar[Literal["lm"]] = "lm"
    axis: ClassVar[Literal["read"]] = "read"
    compared: ClassVar[tuple[str, ...]] = ()  # with a reference when completions are written, not in the step
    per_token: ClassVar[bool] = False
    by_micro_batch: ClassVar[bool] = True
    num_tokens_after: ClassVar[str | None] = None  # num_tokens is among the metrics of a generation
    columns: ClassVar[Columns] = Columns((), prompts="prompt")
    divergence_in_reward: ClassVar[bool] = False  # whether that from the reference is a part of the reward

    @property
    def diverges_in_loss(self) -> bool:
        """Whether the divergence from a reference is a part of the step's loss."""
        return bool(self.beta) and not self.divergence_in_reward

    def prepare(
        self, dataset: Dataset | IterableDataset, tokenizer: Any, *, name: str, **limits: Any
    ) -> Dataset | IterableDataset:
        """The rows as they are; prompts become tokens when they are completed."""
        return check_prompts(dataset, name, tokenizer)

    def example(self, row: dict[str, Any]) -> Example:
        raise TypeError("Rows of prompts are no examples: these are made of completions.")

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

    @abc.abstractmethod
    def token_weights(
        self,
        lengths: np.ndarray,
        completion_weight: np.ndarray,
        micro_batch: np.ndarray,
        *,
        generated_tokens: int,
        part: float,
    ) -> np.ndarray:
        """The weight of each completion's tokens in the step's loss; see `losses.policy_gradient.token_weights`."""

    @abc.abstractmethod
    def numbers(self, row: Any) -> tuple[dict[str, float], dict[str, np.ndarray]]:
        """The numbers that the loss needs of a completion and of its tokens that count, by name.

        Args:
            row: a `rollout.experience.Completed`.
        """

    @abc.abstractmethod
    def metrics(self, sums: Sequence[dict[str, np.ndarray]], split: str) -> dict[str, float | None]: ...


def check_changes(then: PolicyTask, now: PolicyTask) -> None:
    """Warn of arguments that were changed since the trainer was made: as in TRL, they had been read.

    Raises:
        ValueError: another number of completions or micro-batches, which goes through the whole run.
    """
    if then.cycle != now.cycle:
        raise ValueError(
            f"The sizes of a generation were changed after the trainer was made: {then.cycle} is {now.cycle} now. Make "
            "a trainer with these arguments."
        )
    names = [field.name for field in fields(then) if vars(then)[field.name] != vars(now)[field.name]]
    if names:
        warnings.warn(
            f"Arguments that decide {', '.join(names)} were changed after the trainer was made. As in TRL, it goes by "
            "those that it was made with: make another one.",
            stacklevel=3,
        )
