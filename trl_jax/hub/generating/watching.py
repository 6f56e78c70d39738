"""Looks at each token as it is drawn: streamers, and whatever ends texts but their EOS and their length."""

from __future__ import annotations

import time
from collections.abc import Callable, Sequence
from typing import Any

import numpy as np

from trl_jax.hub.generating.prompts import Prompts
from trl_jax.hub.generating.stop_strings import StopStrings

# (ids [B, T], scores) -> whether each row ends, bool [B] or one for all
Criterion = Callable[[np.ndarray, Any], np.ndarray]


class MaxTime:
    """Ends all rows once so many seconds have passed since it was made."""

    def __init__(self, seconds: float):
        self._end = time.monotonic() + seconds

    def __call__(self, ids: np.ndarray, scores: Any) -> np.ndarray:
        return np.full(len(ids), time.monotonic() > self._end)


def criteria_of(config: Any, tokenizer: Any) -> list[Criterion]:
    """Those of a GenerationConfig that are asked on the host.

    Raises:
        ValueError: stop strings and no tokenizer, in transformers' words.
    """
    criteria: list[Criterion] = [] if config.max_time is None else [MaxTime(config.max_time)]
    return criteria if config.stop_strings is None else [*criteria, StopStrings(config.stop_strings, tokenizer)]


class StepWatch:
    """Shows a streamer each step's tokens, and asks criteria which rows end with them.

    Args:
        prompts, completions: of the generation, and of each prompt.
        max_length: of prompts and new tokens.
        scores: those of all steps so far, for the criteria; None where they are not kept.
    """

    def __init__(
        self,
        prompts: Prompts,
        completions: int,
        max_length: int,
        *,
        streamer: Any = None,
        criteria: Sequence[Criterion] = (),
        scores: list[np.ndarray] | None = None,
    ):
        rows = prompts.ids.repeat(completions, axis=0)
        self._ids, self._length = np.pad(rows, ((0, 0), (0, max_length - prompts.width))), prompts.width
        self._prompts, self._streamer, self._criteria, self._scores = prompts, streamer, criteria, scores
        if streamer is not None:
            streamer.put(prompts.back(rows))

    def tokens(self, drawn: np.ndarray, alive: np.ndarray) -> np.ndarray:
        self._ids[:, self._length] = drawn
        self._length += 1
        if self._streamer is not None:
            self._streamer.put(self._prompts.back(drawn.astype(np.int64)))
        ends, scores = np.zeros(len(drawn), bool), None if self._scores is None else tuple(self._scores)
        for criterion in self._criteria:
            ends |= criterion(self._ids[:, : self._length], scores)
        return ~ends

    def end(self) -> None:
        if self._streamer is not None:
            self._streamer.end()
