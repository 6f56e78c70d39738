"""How long the texts of a dataset are, and how much of them is shared. Pure NumPy."""

from __future__ import annotations

from dataclasses import dataclass
from typing import NamedTuple

import numpy as np
from datasets import Dataset

from trl_jax.data.layout.placing import greedy_bins
from trl_jax.data.rows.checks import blocks, list_lengths

SURVEYED = 16_384  # examples that are looked at, those of several epochs where there are fewer


class StepSize(NamedTuple):
    """Tokens of one step: `padded` as TRL pads its rows, `real`, of the longest packed row, of the longest text."""

    padded: int
    real: int
    packed: int
    text: int


@dataclass(frozen=True)
class Survey:
    """Tokens of examples, in the order they are visited: `[n, texts]` of each text, `[n]` of what two share."""

    texts: np.ndarray
    shared: np.ndarray

    def visited(self, order: np.ndarray) -> Survey:
        return Survey(self.texts[order], self.shared[order])

    def steps(
        self, batch_size: int, accumulation: int, layout: str, *, by_micro_batch: bool = False
    ) -> list[StepSize]:
        """The sizes of each step.

        Args:
            by_micro_batch: whether each micro-batch has a packed row to itself.
        """
        alone, longest = self.texts.sum(axis=1), self.texts.max(axis=1)
        costs, size = alone - self.shared if layout == "shared" else alone, batch_size * accumulation
        found = []
        for start in range(0, len(alone), size):
            own = costs[start : start + size].tolist()
            into = np.arange(len(own)) // batch_size if by_micro_batch else greedy_bins(own, accumulation)
            filled = np.bincount(into, own)
            micro = [longest[at : at + batch_size] for at in range(start, min(start + size, len(alone)), batch_size)]
            padded = sum(self.texts.shape[1] * len(rows) * int(rows.max()) for rows in micro)
            real, texts = int(alone[start : start + size].sum()), longest[start : start + size]
            found.append(StepSize(padded, real, int(filled.max()), int(texts.max())))
        return found


def survey(
    dataset: Dataset, order: np.ndarray, columns: tuple[str, ...], documents: str | None = None, virtual: int = 0
) -> Survey:
    """The examples at these places of a prepared dataset, whose texts are these columns of token ids.

    Args:
        documents: the column of lengths of the documents of the one text; a dataset may lack it.
        virtual: tokens that stand before each text, or document, beside its own.
    """
    lengths, shared, documents = [], [], documents if documents in dataset.column_names else None
    for _, block in blocks(dataset.select(order[:SURVEYED]), columns if documents is None else (*columns, documents)):
        texts = [list_lengths(block, column) for column in columns]
        parts = 1 if documents is None else list_lengths(block, documents)[1][:, None]
        lengths.append(np.stack([of_text for _, of_text in texts], axis=1) + virtual * parts)
        shared.append(_shared(*texts) + virtual if len(texts) == 2 else np.zeros(block.num_rows, np.int64))
    return Survey(np.concatenate(lengths), np.concatenate(shared))


def _shared(first: tuple[np.ndarray, np.ndarray], second: tuple[np.ndarray, np.ndarray]) -> np.ndarray:
    """`data.layout.placing.shared_tokens` of many examples; each text is (ids end to end, how many each row has)."""
    most = np.minimum(first[1], second[1]) - 1
    starts = np.cumsum(most) - most
    within = np.arange(most.sum()) - np.repeat(starts, most)
    ids, others = (
        ids[np.repeat(np.cumsum(lengths) - lengths, most) + within] for ids, lengths in (first, second)
    )
    shared, some = most.copy(), most > 0
    if some.any():
        apart = np.where(ids == others, np.iinfo(np.int64).max, within)
        shared[some] = np.minimum(np.minimum.reduceat(apart, starts[some]), most[some])
    return shared
