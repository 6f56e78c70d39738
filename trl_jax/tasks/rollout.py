"""The common part of tasks whose rows are completions that the model writes itself."""

from __future__ import annotations

import abc
import warnings
from collections.abc import Sequence
from dataclasses import dataclass, fields
from typing import Any, ClassVar, Literal

import numpy as np
from datasets import Dataset, IterableDataset

from trl_jax.data.example import Columns, Example
from trl_jax.data.rows.prompts import check_prompts
from trl_jax.tasks.task import TokenTask


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
class RolloutTask(TokenTask):
    """Completions of a dataset's prompts.

    num_generations, num_generations_eval: completions of a prompt, in training and in an evaluation.
    temperature: what logits are divided by: completions are sampled so, and the loss is of these distributions.
    cycle: how generations and steps go together.
    """

    num_generations: int = 1
    num_generations_eval: int = 1
    temperature: float = 1.0
    cycle: Cycle = Cycle()

    head: ClassVar[Literal["lm"]] = "lm"
    num_tokens_after: ClassVar[str | None] = None  # num_tokens is among the metrics of a generation
    columns: ClassVar[Columns] = Columns((), prompts="prompt")

    def prepare(
        self, dataset: Dataset | IterableDataset, tokenizer: Any, *, name: str, **limits: Any
    ) -> Dataset | IterableDataset:
        """The rows as they are; prompts become tokens when they are completed."""
        return check_prompts(dataset, name, tokenizer)

    def example(self, row: dict[str, Any]) -> Example:
        raise TypeError("Rows of prompts are no examples: these are made of completions.")

    @property
    def logps(self) -> frozenset[str]:
        """The log-probabilities that completions come with, by the names of `Completed`'s fields."""
        return frozenset()

    @property
    def diverges_in_loss(self) -> bool:
        """Whether the divergence from a reference, which the policy begins as, is a part of the step's loss."""
        return False

    def numbers(self, row: Any) -> tuple[dict[str, float], dict[str, np.ndarray]]:
        """The numbers that the loss needs of a completion and of its tokens that count, by name.

        Args:
            row: a `rollout.experience.Completed`.
        """
        del row
        return {}, {}

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
        del lengths, micro_batch, generated_tokens, part
        return completion_weight

    @abc.abstractmethod
    def metrics(self, sums: Sequence[dict[str, np.ndarray]], split: str) -> dict[str, float | None]: ...


def check_changes(then: RolloutTask, now: RolloutTask) -> None:
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
