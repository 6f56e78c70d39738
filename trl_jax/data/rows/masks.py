"""Attention masks of rows from early releases of TRL: masked tokens are padding, and are dropped.

Those releases passed the masks to the model. Here texts are padded, or laid end to end, when batches are made.
"""

from __future__ import annotations

import numpy as np
import pyarrow as pa
import pyarrow.compute as pc
from datasets import Dataset, Features, LargeList, Value

from trl_jax.data.rows import checks

MASKS = {"chosen_ids": "attention_mask_chosen", "rejected_ids": "attention_mask_rejected"}


def drop_padding(dataset: Dataset, masks: dict[str, str], num_proc: int | None, where: str) -> Dataset:
    """Drop the masks of a table and the tokens that they mask out.

    Args:
        masks: column of ids -> column of its mask, as in `MASKS`.
        where: the dataset's name in errors.

    Raises:
        ValueError: as `unmasked`.
    """
    left = {column: kind for column, kind in dataset.features.items() if column not in masks.values()}
    shorter = dataset.with_format("arrow").map(
        _unmasked_batch,
        with_indices=True,
        batched=True,
        num_proc=num_proc,
        features=Features(left | {column: LargeList(Value("int64")) for column in masks}),
        fn_kwargs={"masks": masks, "where": where},
        desc=f"Dropping padding of {where.replace('_', ' ', 1)}",
    )
    return shorter.with_format(None)


def _unmasked_batch(block: pa.Table, indices: list[int], masks: dict[str, str], where: str) -> pa.Table:
    for column, mask in masks.items():
        left = unmasked(block, indices[0], column, mask, where)
        block = block.set_column(block.column_names.index(column), column, left).drop_columns(mask)
    return block


def unmasked(block: pa.Table, first: int, column: str, mask: str, where: str) -> pa.Array:
    """The ids of a column where its mask is 1.

    Raises:
        ValueError: a mask of another length, of other values than 0 and 1, or with zeros between ones, by row and
            column. (Dropping tokens in the middle would change the positions of those after them.)
    """
    lists = checks.id_lists(block, column, first, where)
    lengths = pc.list_value_length(lists).to_numpy(zero_copy_only=False)
    keeps = kept(block, first, mask, lengths, f"of {column!r}", where)
    rows = np.repeat(np.arange(len(lengths)), lengths)
    before = np.append(False, keeps[:-1] & (rows[1:] == rows[:-1]))
    runs = np.bincount(rows[keeps & ~before], minlength=len(lengths))
    if (runs != 1).any():
        row = int(np.argmax(runs != 1))
        found = "zeros between ones" if runs[row] else "nothing but zeros"
        raise ValueError(
            f"Row {first + row} of {where}, column {mask!r}: found {found}, wanted ones for the text, and zeros for "
            f"padding before or behind it. Leave what is not text out of {column!r}."
        )
    ends = np.append(0, np.cumsum(np.bincount(rows[keeps], minlength=len(lengths))))
    values = lists.flatten().cast(pa.int64()).filter(pa.array(keeps))
    return pa.LargeListArray.from_arrays(pa.array(ends), values)


def kept(block: pa.Table, first: int, mask: str, lengths: np.ndarray, of: str, where: str) -> np.ndarray:
    """Whether the mask keeps each token of a block: bool `[tokens]`, rows laid end to end."""
    wanted, lists = f"a list of 0 and 1, one for each token {of}", block.column(mask).combine_chunks()
    if not checks.is_list(lists.type):
        raise checks.cell_error(f"Row {first} of {where}", mask, lists[0].as_py(), wanted)
    found = pc.list_value_length(lists).fill_null(-1).to_numpy(zero_copy_only=False)
    if (found != lengths).any():
        row = int(np.argmax(found != lengths))
        if found[row] < 0:
            raise checks.cell_error(f"Row {first + row} of {where}", mask, None, wanted)
        raise ValueError(
            f"Row {first + row} of {where}, column {mask!r}: found {found[row]:,} values, wanted "
            f"{lengths[row]:,}, one for each token {of}."
        )
    values = lists.flatten()
    good = np.zeros(len(values), bool)
    if pa.types.is_integer(values.type) or pa.types.is_boolean(values.type) or pa.types.is_floating(values.type):
        marks = values.to_numpy(zero_copy_only=False)
        good = (marks == 0) | (marks == 1)
    if not good.all():
        bad = int(np.argmin(good))
        row = first + int(np.searchsorted(np.cumsum(lengths), bad, side="right"))
        raise checks.cell_error(f"Row {row} of {where}", mask, values[bad].as_py(), wanted)
    return marks == 1
