"""Check the labels of prepared rows: under a language model's head, what each place of a text is trained to predict."""

from __future__ import annotations

from typing import Any

import numpy as np
import pyarrow as pa
from datasets import Dataset, IterableDataset

from trl_jax.data.example import IGNORED, Columns
from trl_jax.data.rows.checks import argument, blocks, cell_error, list_lengths, row_block


def check_labels(
    dataset: Dataset | IterableDataset, columns: Columns, vocab_size: int, name: str
) -> Dataset | IterableDataset:
    """Raise ValueError for labels that are not as many as their text has ids, or that are neither an id nor -100.

    Returns the same dataset; a stream is returned with the check mapped over its rows.
    """
    where = f"the prepared {argument(name)}"
    if isinstance(dataset, IterableDataset):
        facts = {"columns": columns, "vocab_size": vocab_size, "where": where}
        return dataset.map(_check_stream_labels, with_indices=True, fn_kwargs=facts)
    for first, block in blocks(dataset, (*columns.texts, *columns.labels)):
        _check_label_block(block, first, columns, vocab_size, where)
    return dataset


def _check_stream_labels(
    row: dict[str, Any], index: int, columns: Columns, vocab_size: int, where: str
) -> dict[str, Any]:
    block = row_block(row, (*columns.texts, *columns.labels), f"Row {index} of {where}")
    _check_label_block(block, index, columns, vocab_size, where)
    return row


def _check_label_block(block: pa.Table, first: int, columns: Columns, vocab_size: int, where: str) -> None:
    for text, column in zip(columns.texts, columns.labels, strict=True):
        (_, wanted), (labels, found) = list_lengths(block, text), list_lengths(block, column)
        if (wanted != found).any():
            row = int(np.argmax(wanted != found))
            asked = f"a label for each of the {wanted[row]:,} ids of {text}"
            raise cell_error(f"Row {first + row} of {where}", column, f"a list of {found[row]:,}", asked)
        wrong = (labels != IGNORED) & ((labels < 0) | (labels >= vocab_size))
        if wrong.any():
            place = int(np.argmax(wrong))
            row = int(np.searchsorted(np.cumsum(found), place, side="right"))
            asked = f"token ids from 0 to {vocab_size - 1:,}, or {IGNORED} where nothing is predicted"
            raise cell_error(f"Row {first + row} of {where}", column, int(labels[place]), asked)
