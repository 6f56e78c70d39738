"""Pack the rows of a dataset into longer rows: TRL's `pack_dataset`."""

from __future__ import annotations

from bisect import bisect_left, insort
from collections import defaultdict, deque
from typing import Any

import numpy as np
import pyarrow as pa
import pyarrow.compute as pc
from datasets import Dataset

_STRATEGIES = ("bfd", "bfd_split", "wrapped")


def pack_dataset(dataset: Any, seq_length: int, strategy: str = "bfd", map_kwargs: dict[str, Any] | None = None) -> Any:
    """Pack rows into rows of at most `seq_length` items. Columns must hold lists, of equal length within a row.

    Args:
        dataset: Dataset, IterableDataset or a dict of either.
        strategy: "bfd" truncates long rows and packs best-fit decreasing (Ding et al. 2024, arXiv:2404.10830);
            "bfd_split" splits long rows instead of truncating them; "wrapped" concatenates all rows and splits the
            result. The first two add the column `seq_lengths`, the lengths of the pieces in each row.
        map_kwargs: passed to the dataset's `map`; each of its batches is packed separately.

    Raises:
        TypeError: a column does not hold lists.
        ValueError: lists of different lengths within a row, an unknown strategy, or a seq_length below 1.
    """
    if strategy not in _STRATEGIES:
        raise ValueError(f"strategy must be one of {', '.join(_STRATEGIES)}, got {strategy!r}.")
    if seq_length < 1:
        raise ValueError(f"seq_length must be at least 1, got {seq_length}.")
    form = _form(dataset)
    if "columns" in form and strategy != "wrapped":
        form["columns"] = [*form["columns"], "seq_lengths"]
    options = {"seq_length": seq_length} | ({} if strategy == "wrapped" else {"split": strategy == "bfd_split"})
    function = _wrapped if strategy == "wrapped" else _best_fit
    packed = dataset.with_format("arrow").map(function, batched=True, fn_kwargs=options, **(map_kwargs or {}))
    return packed.with_format(**form)


def _form(dataset: Any) -> dict[str, Any]:
    """The arguments of `with_format` that restore a dataset's format."""
    one = next(iter(dataset.values())) if isinstance(dataset, dict) else dataset
    if not isinstance(one, Dataset):  # streams have no public attribute for their format
        return {"type": None if one._formatting is None else one._formatting.format_type}
    form = dict(one.format)
    return form | form.pop("format_kwargs")


def _lists(table: pa.Table) -> dict[str, pa.Array]:
    """The columns as arrays, checked to be lists of equal lengths."""
    lists = {name: table[name].combine_chunks() for name in table.column_names}
    for name, column in lists.items():
        if not (pa.types.is_list(column.type) or pa.types.is_large_list(column.type)):
            raise TypeError(
                f"Packing requires every column to hold lists, but {name!r} is {column.type}. Remove it with "
                f"dataset.remove_columns({name!r})."
            )
    first, *others = lists
    for name in others:
        if not np.array_equal(np.diff(lists[first].offsets), np.diff(lists[name].offsets)):
            raise ValueError(f"Packing requires lists of equal length within a row: {first!r} and {name!r} differ.")
    return lists


def _recut(lists: dict[str, pa.Array], offsets: np.ndarray) -> dict[str, pa.Array]:
    """The same items, split into lists at these `offsets`."""
    return {
        name: type(column).from_arrays(pa.array(offsets, column.offsets.type), column.flatten())
        for name, column in lists.items()
    }


def _wrapped(table: pa.Table, seq_length: int) -> pa.Table:
    lists = _lists(table)
    items = len(next(iter(lists.values())).flatten())
    return pa.table(_recut(lists, np.append(np.arange(0, items, seq_length), items)))


def _best_fit(table: pa.Table, seq_length: int, split: bool) -> pa.Table:
    lists = _lists(table)
    ends = np.cumsum(pc.fill_null(pc.list_value_length(next(iter(lists.values()))), 0))
    if split:
        starts = np.append(0, ends[:-1])
        cuts = [np.arange(start, end, seq_length) for start, end in zip(starts, ends, strict=True)]
        pieces = _recut(lists, np.concatenate([*cuts, ends[-1:]]))
    else:
        there = np.diff(ends, prepend=0) > 0
        pieces = {name: pc.list_slice(column.filter(pa.array(there)), 0, seq_length) for name, column in lists.items()}
    lengths = pc.list_value_length(next(iter(pieces.values())))
    rows = _rows(lengths.to_numpy(), seq_length)
    order = pa.array([piece for row in rows for piece in row], pa.int64())
    counts = np.cumsum([0, *map(len, rows)])
    taken = lengths.take(order)
    offsets = np.append(0, np.cumsum(taken))[counts]
    packed = _recut({name: column.take(order) for name, column in pieces.items()}, offsets)
    return pa.table(packed | {"seq_lengths": pa.ListArray.from_arrays(pa.array(counts, pa.int32()), taken)})


def _rows(lengths: np.ndarray, size: int) -> list[list[int]]:
    """Assign pieces to rows by best-fit decreasing: each goes into the row with the least sufficient space; ties go to
    the row that has had this space longest."""
    rows: list[list[int]] = []
    with_space: dict[int, deque[list[int]]] = defaultdict(deque)
    spaces: list[int] = []  # sorted keys of with_space that have a row
    for piece in np.argsort(-lengths, kind="stable").tolist():
        length = int(lengths[piece])
        at = bisect_left(spaces, length)
        if at == len(spaces):
            row, space = [], size
            rows.append(row)
        else:
            space = spaces[at]
            row = with_space[space].popleft()
            if not with_space[space]:
                del spaces[at]
        row.append(piece)
        left = space - length
        if left:
            if not with_space[left]:
                insort(spaces, left)
            with_space[left].append(row)
    return rows
