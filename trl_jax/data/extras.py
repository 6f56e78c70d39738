"""Numbers that a loss needs besides the model's outputs, by name, each on an axis of its own. Pure NumPy."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any, NamedTuple

import numpy as np


class Extras(NamedTuple):
    """Numbers of examples, of their texts, and of their reads.

    Of one example: `example` has a number by name, `text` one for each of its texts, and `read`, under a language
    model's head, for each of its texts one for each target, in the order of `Example.targets`. All examples of a task
    have the same names. Of a batch they are float32 `[E]`, `[X]` and `[N]`, in the order of `Batch.weight`, of the
    outputs, and of `Batch.reads`; zeros for what only fills the shape.
    """

    example: Mapping[str, Any] = {}
    text: Mapping[str, Any] = {}
    read: Mapping[str, Any] = {}

    def zeros(self, *leading: int, examples: int, texts: int, reads: int) -> Extras:
        """Zeros `[*leading, E]`, `[*leading, X]` and `[*leading, N]` under the names of this example's."""
        sizes = (examples, texts, reads)
        return Extras(
            *(
                {name: np.zeros((*leading, size), np.float32) for name in of}
                for of, size in zip(self, sizes, strict=True)
            )
        )

    def enter(self, index: tuple[int, ...], slot: int, examples: int, own: Extras) -> None:
        """Enter the numbers of an example, and of its texts, into those of a pass.

        Args:
            index: of the pass.
            slot: of the example among the pass's E `examples`.
            own: the example's.
        """
        for name, values in self.example.items():
            values[index][slot] = own.example[name]
        for name, values in self.text.items():
            values[index][slot::examples] = own.text[name]

    def enter_reads(self, index: tuple[int, ...], start: int, count: int, text: int, own: Extras) -> None:
        """Enter the numbers of the `count` reads of an example's text, from read `start` of a pass on.

        Raises:
            ValueError: there are more or fewer numbers than reads.
        """
        for name, values in self.read.items():
            numbers = own.read[name][text]
            if len(numbers) != count:
                raise ValueError(
                    f"extras.read[{name!r}] of text {text} has {len(numbers)} numbers, and the text has {count} "
                    "targets. Give it one for each, in the order of Example.targets."
                )
            values[index][start : start + count] = numbers
