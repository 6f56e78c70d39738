"""The request of a generation, and its completions."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace
from functools import cached_property
from typing import NamedTuple, Protocol

import jax.numpy as jnp
import numpy as np

from trl_jax.core.virtual_tokens import NONE, VirtualTokens
from trl_jax.data.layout.batch import padded_length
from trl_jax.generation.chunk import Drawing
from trl_jax.generation.processors import Processor

# (completions that have ended, tokens of all of them so far) -> None
Progress = Callable[[int, int], None]


class Watch(Protocol):
    """Sees every token as it is drawn."""

    def tokens(self, drawn: np.ndarray, alive: np.ndarray) -> np.ndarray | None:
        """Take the ids `[B]` of a step. Returns which completions go on, bool `[B]`; None: all that live."""


@dataclass(frozen=True)
class Request:
    """Prompts to complete, and how.

    prompts: token ids of each, at least one. group: completions of each.
    eos: ids that end a completion. pad: stands behind its end. max_new_tokens: of each completion, at most.
    processors: changes of the scores, in their order. width: of the prompts as processors see them, padded on the left.
    logps: whether log-probabilities are kept, of logits divided by `temperature`.
    virtual: stand before each prompt, where processors do not see them.
    """

    prompts: list[np.ndarray]
    group: int
    eos: tuple[int, ...]
    pad: int
    max_new_tokens: int
    processors: tuple[Processor, ...] = ()
    width: int | None = None
    temperature: float = 1.0
    logps: bool = False
    virtual: VirtualTokens = NONE

    @cached_property
    def texts(self) -> list[np.ndarray]:
        """The prompts as the model reads them."""
        return [np.concatenate([self.virtual.ids, ids]) for ids in self.prompts] if self.virtual.count else self.prompts

    @property
    def rows(self) -> int:
        return len(self.prompts) * self.group

    def in_parts(self, number: int) -> Request:
        """The same rows, the completions of each prompt divided among so many prompts that are equal."""
        return replace(self, prompts=[ids for ids in self.prompts for _ in range(number)], group=self.group // number)

    def drawing(self) -> Drawing:
        """How tokens are drawn. Prompts are as wide as the longest, or as they came."""
        width = self.width or max(map(len, self.prompts))
        ids = np.full((len(self.prompts), padded_length(width, "auto")), self.pad, np.int32)
        pads = np.asarray([width - len(prompt) for prompt in self.prompts], np.int32)
        for row, prompt, start in zip(ids, self.prompts, pads, strict=True):
            row[start:width] = prompt
        return Drawing(
            self.processors, np.repeat(ids, self.group, axis=0), jnp.int32(width), np.repeat(pads, self.group),
            jnp.float32(self.temperature),
        )  # fmt: skip


class Completed(NamedTuple):
    """One completion: its row, counted over all completions of all prompts, int32 tokens `[n]`, that which ends it
    among them, and their log-probabilities, float32 `[n]`, None where nobody asked."""

    row: int
    tokens: np.ndarray
    logps: np.ndarray | None


class Completions(NamedTuple):
    """Of all rows, those of the first prompt first.

    tokens: int32 `[B, N]`, pads behind each completion's end; N is the length of the longest. lengths: int32 `[B]`,
    tokens of each, that which ends it among them. logps: float32 `[B, N]`, of each token; None where nobody asked.
    """

    tokens: np.ndarray
    lengths: np.ndarray
    logps: np.ndarray | None

    @classmethod
    def of(cls, done: Sequence[Completed], pad: int) -> Completions:
        """From each row's."""
        done = sorted(done, key=lambda one: one.row)
        lengths = np.asarray([len(one.tokens) for one in done], np.int32)
        tokens = np.full((len(done), lengths.max()), pad, np.int32)
        logps = None if done[0].logps is None else np.zeros(tokens.shape, np.float32)
        for number, one in enumerate(done):
            tokens[number, : len(one.tokens)] = one.tokens
            if logps is not None:
                logps[number, : len(one.tokens)] = one.logps
        return cls(tokens, lengths, logps)

    def rows(self) -> list[Completed]:
        """Each row's."""
        logps = [None] * len(self.tokens) if self.logps is None else self.logps
        return [
            Completed(number, ids[:length], None if own is None else own[:length])
            for number, (ids, own, length) in enumerate(zip(self.tokens, logps, self.lengths, strict=True))
        ]
