"""Whether two datasets hold the same pairs: a digest of the prepared rows, whatever file or cache they came from."""

from __future__ import annotations

from typing import Any

import numpy as np
import xxhash
from datasets import Dataset

from trl_jax.data.rows import checks


def fingerprint(dataset: Dataset) -> str:
    """Of every pair of a prepared table, in order: ids, lengths and margins."""
    columns = (*checks.IDS, "margin") if "margin" in dataset.column_names else checks.IDS
    digest = xxhash.xxh3_128(" ".join(columns).encode())
    for _, block in checks.blocks(dataset, columns):
        for column in checks.IDS:
            lists = block.column(column).combine_chunks()
            digest.update(lists.value_lengths().to_numpy(zero_copy_only=False).astype(np.int64))
            digest.update(lists.flatten().to_numpy(zero_copy_only=False).astype(np.int64))
        if "margin" in columns:
            digest.update(block.column("margin").to_numpy().astype(np.float64))
    return digest.hexdigest()


def row_digest(row: dict[str, Any], so_far: int) -> int:
    """Of a stream's pairs up to this one: 64 bits, chained, so that any prefix has its own."""
    digest = xxhash.xxh3_64(seed=so_far)
    for column in checks.IDS:
        digest.update(np.asarray(row[column], np.int64))
        digest.update(b"|")
    digest.update(np.float64(row.get("margin") or 0.0).tobytes())
    return digest.intdigest()
