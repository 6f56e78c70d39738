"""Leave rows longer than max_length out of a table, with a warning; `streaming` does so as rows arrive."""

from __future__ import annotations

import logging

import numpy as np
from datasets import Dataset

logger = logging.getLogger(__name__)


def drop_long(
    dataset: Dataset, lengths: np.ndarray, max_length: int | None, where: str, unit: str, about: str = ""
) -> Dataset:
    """Keep the rows of at most `max_length` tokens; None keeps all.

    Args:
        lengths: tokens of the longest text of each row: `[rows]`.
        where, unit: names of the dataset and of one row in messages, as in "train_dataset" and "pair".
        about: "at least " where long texts were not tokenised to their end.

    Raises:
        ValueError: no row is left.
    """
    if max_length is None or lengths.max() <= max_length:
        return dataset
    kept = np.flatnonzero(lengths <= max_length)
    total = len(lengths)
    if not kept.size:
        raise ValueError(
            f"max_length={max_length} removes all {total:,} rows of {where}: the shortest {unit} has "
            f"{about}{lengths.min():,} tokens. Raise max_length or pass max_length=None."
        )
    logger.warning(
        f"max_length={max_length} removed {total - len(kept):,} of {total:,} {unit}s of {where} "
        f"(longest kept: {lengths[kept].max():,} tokens)"
    )
    return dataset.select(kept)
