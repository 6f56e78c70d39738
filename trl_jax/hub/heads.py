"""Model heads: their tensors and how a new head is initialized.

There are two: the score head (one number per text) and the head of a causal language model. `hub/checkpoint.py` handles
heads in checkpoints and `hub/modules.py` transformers' names for them; the rest of `hub` is about trunks.
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
LM_HEAD = "lm_head.weight"  # path of our array of a language model's head

# Values that transformers' config object is created with.
CONFIG_VALUES: dict[str, dict[str, Any]] = {"score": {"num_labels": 1}, "lm": {}}
ONE_LABEL = "A reward model has a single score per text (1 label)."


@dataclass(frozen=True)
class Draw:
    """A tensor that a checkpoint may lack: normal with `std`, or filled with `fill` if there is no `std`.

    With `cutoff`, values beyond that many standard deviations are drawn again.
    """

    tensor: str
    std: float | None = None
    cutoff: float | None = None
    fill: float = 0.0

    def values(self, generator: TorchGenerator, shape: tuple[int, ...]) -> np.ndarray:
        if self.std is None:
            return np.full(shape, self.fill)
        count = math.prod(shape)
        if self.cutoff is None:
            return generator.normal(count, self.std).reshape(shape)
        return generator.truncated_normal(count, self.std, self.cutoff * self.std).reshape(shape)


def _draw_score(arch: Any) -> list[Draw]:
    return [Draw("score.weight", arch.initializer_range)]


def _none_unused(arch: Any) -> int:
    return 0


@dataclass(frozen=True)
class Head:
    """A head of a family.

    Attributes:
        model: builds the module of trunk and head from the arch.
        names: (our module, its name on disk); empty if the family's names already include the head.
        prefixes: prefixes of the head's tensors on disk.
        draws: tensors that a checkpoint may lack, in the order in which transformers initializes them. If a tensor is
            drawn twice, the last draw is used.
        unused: how many uniform numbers transformers draws and drops before that, whatever the checkpoint has.
    """

    model: Callable[[Any], nnx.Module]
    names: tuple[tuple[str, str], ...]
    prefixes: tuple[str, ...]
    draws: Callable[[Any], list[Draw]]
    kind: HeadName
    unused: Callable[[Any], int] = _none_unused


@dataclass(frozen=True)
class ScoreHead(Head):
    """The score head of a family; the defaults fit decoders."""

    model: Callable[[Any], nnx.Module] = SequenceScorer
    names: tuple[tuple[str, str], ...] = (("score", "score"),)
    prefixes: tuple[str, ...] = ("score.",)
    draws: Callable[[Any], list[Draw]] = _draw_score
    kind: HeadName = "score"


def lm_head(module: str = "lm_head") -> Head:
    """A language model head, called `module` on disk."""

    def draws(arch: Any) -> list[Draw]:
        weight = [] if arch.tied_embeddings else [Draw(f"{module}.weight", arch.initializer_range)]
        return weight + ([Draw(f"{module}.bias")] if arch.head_bias else [])

    return Head(CausalLm, (("lm_head", module),), (f"{module}.",), draws, "lm")


def check_labels(num_labels: int) -> None:
    """Raise ValueError unless there is a single label."""
    if num_labels != 1:
        raise ValueError(
            f"num_labels is {num_labels}, but reward models require `num_labels=1`, one score per text. Leave it out."
        )
