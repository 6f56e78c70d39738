"""Judges of completions in RLOOTrainer up to TRL 0.21: a model or a function, and a penalty for want of an end."""

from __future__ import annotations

import inspect
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np

from trl_jax.rollout.rewards.models import RewardModel


@dataclass
class TokenScores:
    """A reward model that reads the policy's own tokens: those of the prompt and all that was written, the end too.

    prompt_ids: prompts -> their tokens.
    """

    model: RewardModel
    prompt_ids: Callable[[list], list[list[int]]]

    @property
    def __name__(self) -> str:
        return self.model.name

    def __call__(self, prompts: list, completion_ids: Sequence[list[int]], **columns: Any) -> list[float]:
        return self.model.scores(_whole(self.prompt_ids(prompts), completion_ids)).tolist()


@dataclass
class TextScores:
    """A function of texts, each a prompt with its completion, without special tokens.

    decode: tokens of texts -> the texts.
    """

    function: Callable[[list[str]], Any]
    prompt_ids: Callable[[list], list[list[int]]]
    decode: Callable[[list[list[int]]], list[str]]

    @property
    def __name__(self) -> str:
        return getattr(self.function, "__name__", type(self.function).__name__)

    def __call__(self, prompts: list, completion_ids: Sequence[list[int]], **columns: Any) -> Any:
        return self.function(self.decode(_whole(self.prompt_ids(prompts), completion_ids)))


@dataclass
class MissingEos:
    """Takes `penalty` off where a completion has no end.

    eos: the id that ends a text.
    """

    penalty: float
    eos: Callable[[], int | None]
    __name__ = "missing_eos_penalty"

    def __call__(self, completion_ids: Sequence[list[int]], **columns: Any) -> list[float]:
        eos = self.eos()
        return np.where([eos in own for own in completion_ids], 0.0, -self.penalty).tolist()


def takes_completions(function: Callable[..., Any]) -> bool:
    """Whether a function is written for today's call, by keyword."""
    parameters = inspect.signature(function).parameters
    return "completions" in parameters or any(one.kind is one.VAR_KEYWORD for one in parameters.values())


def _whole(prompt_ids: list[list[int]], completion_ids: Sequence[list[int]]) -> list[list[int]]:
    return [[*before, *own] for before, own in zip(prompt_ids, completion_ids, strict=True)]
