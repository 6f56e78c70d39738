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
    format_options = _format_options(dataset)
    if "columns" in format_options and strategy != "wrapped":
        format_options["columns"] = [*format_options["columns"], "seq_lengths"]
    options = {"seq_length": seq_length} | ({} if strategy == "wrapped" else {"split": strategy == "bfd_split"})
    function = _wrapped if strategy == "wrapped" else _best_fit
    packed = dataset.with_format("arrow").map(function, batched=True, fn_kwargs=options, **(map_kwargs or {}))
    return packed.with_format(**format_options)


def _format_options(dataset: Any) -> dict[str, Any]:
    """The arguments of `with_format` that restore a dataset's format."""
    split = next(iter(dataset.values())) if isinstance(dataset, dict) else dataset
    if not isinstance(split, Dataset):  # streams have no public attribute for their format
        return {"type": None if split._formatting is None else split._formatting.format_type}
    format_options = dict(split.format)
    return format_options | format_options.pop("format_kwargs")


def _lists(table: pa.Table) -> dict[str, pa.Array]:
    """The columns as arrays, checked to be lists of equal lengths."""
    lists = {name: table[name].combine_chunks() for name in table.column_names}
    for name, column in lists.items():
        if not (pa.types.is_list(column.type) or pa.types.is_large_list(column.type)):
            raise TypeError(
                f"Packing requires every column to hold lists, but {name!r} is {column.type}. Remove it with "
                f"dataset.remove_columns({name!r})."
            )
    first, *other_names = lists
    for name in other_names:
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
        nonempty = pa.array(np.diff(ends, prepend=0) > 0)
        pieces = {name: pc.list_slice(column.filter(nonempty), 0, seq_length) for name, column in lists.items()}
    lengths = pc.list_value_length(next(iter(pieces.values())))
    rows = _rows(lengths.to_numpy(), seq_length)
    order = pa.array([piece for row in rows for piece in row], pa.int64())
    counts = np.cumsum([0, *map(len, rows)])
    piece_lengths = lengths.take(order)
    offsets = np.append(0, np.cumsum(piece_lengths))[counts]
    packed = _recut({name: column.take(order) for name, column in pieces.items()}, offsets)
    return pa.table(packed | {"seq_lengths": pa.ListArray.from_arrays(pa.array(counts, pa.int32()), piece_lengths)})


def _rows(lengths: np.ndarray, size: int) -> list[list[int]]:
    """Assign pieces to rows by best-fit decreasing: each goes into the row with the least sufficient space; ties go to
    the row that has had this space longest."""
    rows: list[list[int]] = []
    with_space: dict[int, deque[list[int]]] = defaultdict(deque)
    spaces: list[int] = []  # sorted keys of with_space that have a row
    for piece in np.argsort(-lengths, kind="stable").tolist():
        length = int(lengths[piece])
        index = bisect_left(spaces, length)
        if index == len(spaces):
            row, space = [], size
            rows.append(row)
        else:
            space = spaces[index]
            row = with_space[space].popleft()
            if not with_space[space]:
                del spaces[index]
        row.append(piece)
        remaining = space - length
        if remaining:
            if not with_space[remaining]:
                insort(spaces, remaining)
            with_space[remaining].append(row)
    return rows
