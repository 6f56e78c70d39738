"""Completions with their advantages, as a run trains on them and checkpoints keep them."""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from typing import NamedTuple

import numpy as np


class Completed(NamedTuple):
    """A prompt with one completion.

    prompt, completion: token ids, int32.
    completion_mask: bool, for each token of the completion whether it is learned from.
    advantage: how much better its reward is than that of the prompt's other completions.
    old_logps, ref_logps: float32, log-probabilities of the completion's tokens under the policy that wrote it and under
        the reference; None where nobody needs them.
    """

    prompt: np.ndarray
    completion: np.ndarray
    completion_mask: np.ndarray
    advantage: float
    old_logps: np.ndarray | None = None
    ref_logps: np.ndarray | None = None

    @property
    def num_tokens(self) -> int:
        """Tokens that are learned from."""
        return int(self.completion_mask.sum())


_SAVED_AS = {"completion_mask": "counted"}  # as earlier checkpoints call it


@dataclass(frozen=True)
class Experience:
    """The completions of one generation, in the order in which they are trained on; micro-batches are cut from it."""

    rows: Sequence[Completed]

    @property
    def num_tokens(self) -> int:
        """Tokens of all completions that are learned from."""
        return sum(row.num_tokens for row in self.rows)

    @property
    def logps(self) -> frozenset[str]:
        """Which log-probabilities the completions come with, by the names of their fields."""
        first = self.rows[0]._asdict()
        return frozenset(name for name in ("old_logps", "ref_logps") if first[name] is not None)

    def ordered(self, order: Iterable[int]) -> Experience:
        """The same completions in another order."""
        return Experience([self.rows[place] for place in order])

    def part(self, number: int, parts: int, ranks: int) -> list[Completed]:
        """The completions of one of `parts` micro-batches: of each of `ranks` equal runs of rows, its part."""
        of_rank = len(self.rows) // ranks
        size = of_rank // parts
        starts = (rank * of_rank + number * size for rank in range(ranks))
        return [row for start in starts for row in self.rows[start : start + size]]

    def arrays(self) -> dict[str, np.ndarray]:
        """The whole of it as a few flat arrays, by name."""
        rows = self.rows
        arrays = {"advantage": np.asarray([row.advantage for row in rows], np.float32)}
        for name in ("prompt", "completion"):
            arrays[f"{name}_length"] = np.asarray([len(row._asdict()[name]) for row in rows], np.int32)
        for name in ("prompt", "completion", "completion_mask", "old_logps", "ref_logps"):
            values = [row._asdict()[name] for row in rows]
            if values[0] is not None:
                arrays[_SAVED_AS.get(name, name)] = np.concatenate(values)
        return arrays

    @classmethod
    def of_arrays(cls, arrays: dict[str, np.ndarray]) -> Experience:
        """Back from `arrays`."""

        def split(name: str, of: str) -> list:
            saved = _SAVED_AS.get(name, name)
            if saved not in arrays:
                return [None] * len(arrays["advantage"])
            return np.split(arrays[saved], np.cumsum(arrays[f"{of}_length"])[:-1])

        columns = [split("prompt", "prompt"), split("completion", "completion"), split("completion_mask", "completion")]
        logps = [split(name, "completion") for name in ("old_logps", "ref_logps")]
        return cls([Completed(*row) for row in zip(*columns, arrays["advantage"].tolist(), *logps, strict=True)])
