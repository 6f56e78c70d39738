"""Prompts with their completions, before these are judged."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

import numpy as np

Ids = Sequence[Sequence[int]]


@dataclass(frozen=True)
class Written:
    """Prompts with their completions, B of them.

    prompt_ids, completion_ids: token ids; a completion has the token that ended it.
    by_model: bool, of each token of a completion whether the model wrote it; only those are learned from and counted.
    columns: for the reward functions, beside those of the rows: a list has the values of the rows, all else is of each.
    messages: of each completion, as reward functions see it; None: what its tokens say.
    metrics: of how they were written, by TRL's names.
    """

    prompt_ids: Sequence[Sequence[int]]
    completion_ids: Sequence[np.ndarray]
    by_model: Sequence[np.ndarray]
    columns: Mapping[str, Any] = field(default_factory=dict)
    messages: Sequence[list[dict[str, Any]]] | None = None
    metrics: Mapping[str, float] = field(default_factory=dict)

    def with_columns(self, rows: Sequence[Mapping[str, Any]]) -> list[dict[str, Any]]:
        """These rows with the columns. A list that is too short says nothing of the last rows, as in TRL."""
        return [{**row, **self._of(place)} for place, row in enumerate(rows)]

    def _of(self, place: int) -> dict[str, Any]:
        lists = {name: values for name, values in self.columns.items() if isinstance(values, list)}
        own = {name: values[place] for name, values in lists.items() if place < len(values)}
        return own | {name: value for name, value in self.columns.items() if name not in lists}


def all_written(completions: Sequence[np.ndarray]) -> list[np.ndarray]:
    """`by_model` of completions that the model wrote to the last token."""
    return [np.ones(len(own), bool) for own in completions]
