"""Heads: the tensors of a head and how a new one is drawn.

There are two: the score head, one number a text, and a causal language model's. What checkpoints say of them stands in
`hub/checkpoint.py`, PEFT's names for them in `hub/peft_targets.py`; the rest of `hub` is about trunks.
"""

from __future__ import annotations

import math
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any, Literal

import numpy as np
from flax import nnx

from trl_jax.core.torch_random import TorchGenerator
from trl_jax.models.model import CausalLm, SequenceScorer

HeadName = Literal["score", "lm"]

# What a config object of transformers is made with.
CONFIG_VALUES: dict[str, dict[str, Any]] = {"score": {"num_labels": 1}, "lm": {}}
ONE_LABEL = "A reward model has one score a sequence (1 label)."


@dataclass(frozen=True)
class Draw:
    """A tensor that a checkpoint may lack: normal with `std`, or all `fill` without one.

    With `cutoff`, values further than so many standard deviations from 0 are drawn again. transformers draws `unused`
    uniform numbers before it.
    """

    tensor: str
    std: float | None = None
    cutoff: float | None = None
    fill: float = 0.0
    unused: int = 0

    def values(self, generator: TorchGenerator, shape: tuple[int, ...]) -> np.ndarray:
        generator.skip(self.unused)
        if self.std is None:
            return np.full(shape, self.fill)
        count = math.prod(shape)
        if self.cutoff is None:
            return generator.normal(count, self.std).reshape(shape)
        return generator.truncated_normal(count, self.std, self.cutoff * self.std).reshape(shape)


def _draw_score(arch: Any) -> list[Draw]:
    return [Draw("score.weight", arch.initializer_range)]


@dataclass(frozen=True)
class Head:
    """A head of a family.

    Attributes:
        model: makes the module of trunk and head from the arch.
        names: (our module, its name on disk); none where the family's own names have the head among them.
        prefixes: how the names of the head's tensors on disk begin.
        draws: the tensors that a checkpoint may lack, in the order in which transformers draws them; where it draws
            one twice, the last counts.
    """

    model: Callable[[Any], nnx.Module]
    names: tuple[tuple[str, str], ...]
    prefixes: tuple[str, ...]
    draws: Callable[[Any], list[Draw]]
    kind: HeadName


@dataclass(frozen=True)
class ScoreHead(Head):
    """The score head of a family; the defaults are those of decoders."""

    model: Callable[[Any], nnx.Module] = SequenceScorer
    names: tuple[tuple[str, str], ...] = (("score", "score"),)
    prefixes: tuple[str, ...] = ("score.",)
    draws: Callable[[Any], list[Draw]] = _draw_score
    kind: HeadName = "score"


def lm_head(module: str = "lm_head") -> Head:
    """The head of a language model, `module` on disk."""

    def draws(arch: Any) -> list[Draw]:
        weight = [] if arch.tied_embeddings else [Draw(f"{module}.weight", arch.initializer_range)]
        return weight + ([Draw(f"{module}.bias")] if arch.head_bias else [])

    return Head(CausalLm, (("lm_head", module),), (f"{module}.",), draws, "lm")


def check_labels(num_labels: int) -> None:
    """Raise ValueError unless there is one label."""
    if num_labels != 1:
        raise ValueError(
            f"num_labels is {num_labels}, but reward models require `num_labels=1`: one score a sequence. Leave it out."
        )
