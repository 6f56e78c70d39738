"""Examples: the texts and numbers that one row of a prepared dataset gives a step. Pure NumPy."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any, NamedTuple

import numpy as np


class Example(NamedTuple):
    """One row, as layouts take it.

    texts: token ids of each text that the model reads; every example of a task has as many.
    extras: numbers that the loss needs beside the outputs, by name.
    """

    texts: tuple[Sequence[int], ...]
    extras: Mapping[str, float]

    @property
    def longest(self) -> int:
        """Tokens of the longest text."""
        return max(map(len, self.texts))

    @property
    def tokens(self) -> int:
        """Tokens of all texts."""
        return sum(map(len, self.texts))


class Columns(NamedTuple):
    """The columns of a prepared dataset that a step is computed from.

    texts: columns of token ids, one for each text of an example, in the order of the outputs.
    numbers: columns of numbers, each of which a dataset may lack.
    """

    texts: tuple[str, ...]
    numbers: tuple[str, ...] = ()

    @property
    def all(self) -> tuple[str, ...]:
        return (*self.texts, *self.numbers)

    def example(self, row: Mapping[str, Any]) -> Example:
        """The example whose texts and extras are these columns of the row, as they are."""
        texts = tuple(row[name] for name in self.texts)
        return Example(texts, {name: row[name] for name in self.numbers if name in row})


class Measured(NamedTuple):
    """What a loss needs of the examples of one batch beside the model's outputs; fields as in `Batch`.

    num_examples: how many of the E examples are real; the outputs of the others mean nothing.
    """

    weight: Any
    extras: dict[str, Any]
    num_examples: int
    micro_batch: Any = None


def measured(examples: Sequence[Example], size: int) -> Measured:
    """A batch that has room for `size` examples, each of the real ones with an equal share of its loss."""
    count = len(examples)
    weight = np.zeros(size, np.float32)
    weight[:count] = 1 / count
    extras = {name: np.zeros(size, np.float32) for name in examples[0].extras}
    for name, values in extras.items():
        values[:count] = [example.extras[name] for example in examples]
    return Measured(weight, extras, count)


def of_examples(outputs: Any, texts: int, num_examples: int) -> Any:
    """Outputs `[X, ...]` of a batch without those that only fill it: the first text of each real example, then the
    second of each, and so on."""
    by_text = outputs.reshape(texts, -1, *outputs.shape[1:])
    return by_text[:, :num_examples].reshape(-1, *outputs.shape[1:])
