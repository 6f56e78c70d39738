"""Digests of prepared rows, to tell whether two datasets have the same examples, whatever file or cache they are
from."""

from __future__ import annotations

import json
from typing import Any

import numpy as np
import xxhash
from datasets import Dataset

from trl_jax.data.example import Columns
from trl_jax.data.rows.checks import blocks


def fingerprint(dataset: Dataset, columns: Columns) -> str:
    """The digest of all examples of a prepared table in order: ids, lengths and numbers. A hexadecimal string."""
    numbers = [name for name in columns.numbers if name in dataset.column_names]
    lists = [name for name in _lists(columns) if name in dataset.column_names]
    names = (*lists, *numbers)
    digest = xxhash.xxh3_128(" ".join(names).encode())
    for _, block in blocks(dataset, names):
        for column in lists:
            rows = block.column(column).combine_chunks()
            digest.update(rows.value_lengths().to_numpy(zero_copy_only=False).astype(np.int64))
            digest.update(rows.flatten().to_numpy(zero_copy_only=False).astype(np.int64))
        for column in numbers:
            digest.update(block.column(column).to_numpy().astype(np.float64))
    if columns.prompts is not None:
        for prompt in dataset[columns.prompts]:
            digest.update(json.dumps(prompt, sort_keys=True).encode() + b"\n")
    return digest.hexdigest()


def _lists(columns: Columns) -> tuple[str, ...]:
    """The columns that have a list of integers in each row."""
    return (*columns.texts, *columns.labels, *([columns.documents] if columns.documents else []))


def row_digest(row: dict[str, Any], columns: Columns, so_far: int) -> int:
    """The digest of a stream's examples up to this row: 64 bits, chained from `so_far`, the digest up to the row
    before."""
    digest = xxhash.xxh3_64(seed=so_far)
    for column in _lists(columns):
        digest.update(np.asarray(row.get(column, ()), np.int64))
        digest.update(b"|")
    for column in columns.numbers:
        digest.update(np.float64(row.get(column) or 0.0).tobytes())
    return digest.intdigest()
