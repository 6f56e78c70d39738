"""Check the labels of prepared rows: under a language model's head, what each place of a text is trained to predict."""

from __future__ import annotations

import logging
from typing import Any

import numpy as np
import pyarrow as pa
from datasets import Dataset, IterableDataset

from trl_jax.data.example import IGNORED, Columns
from trl_jax.data.rows.checks import argument, blocks, cell_error, list_lengths, row_block

logger = logging.getLogger(__name__)


def check_labels(
    dataset: Dataset | IterableDataset, columns: Columns, vocab_size: int, name: str
) -> Dataset | IterableDataset:
    """Raise ValueError for labels that are not as many as their text has ids, or that are neither an id nor -100; warn
    of a table where no token is predicted.

    Returns the same dataset; a stream is returned with the check mapped over its rows.
    """
    where = f"the prepared {argument(name)}"
    if isinstance(dataset, IterableDataset):
        facts = {"columns": columns, "vocab_size": vocab_size, "where": where}
        return dataset.map(_check_stream_labels, with_indices=True, fn_kwargs=facts)
    predicted = 0
    for first, block in blocks(dataset, (*columns.texts, *columns.labels)):
        _check_label_block(block, first, columns, vocab_size, where)
        predicted += _predicted(block, columns)
    if len(dataset) and not predicted:
        longest = max(len(row) for column in columns.texts for row in dataset[column])
        logger.warning(
            f"No token of {where} is predicted, so losses are 0.0 throughout: in all {len(dataset):,} rows the labels "
            f"behind the first token are {IGNORED}. The longest row has {longest} tokens: raise max_length where it "
            "cuts them, look for empty texts, and for masks that leave every token out."
        )
    return dataset


def _predicted(block: pa.Table, columns: Columns) -> int:
    """How many tokens are predicted: those with a label, but for the first ones of texts, which have no context."""
    count = 0
    for column in columns.labels:
        labels, lengths = list_lengths(block, column)
        real = labels != IGNORED
        firsts = (np.cumsum(lengths) - lengths)[lengths > 0]
        count += np.count_nonzero(real) - np.count_nonzero(real[firsts])
    return int(count)


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
