"""Rows that arrive one at a time: the same ids and the same checks as of a table, made as each row passes."""

from __future__ import annotations

import logging
from dataclasses import dataclass, field
from itertools import islice
from typing import Any

from datasets import IterableDataset

from trl_jax.data.rows import chat, checks, cutting
from trl_jax.data.rows.masks import unmasked

logger = logging.getLogger(__name__)
MOST_REMOVED = 100_000  # rows in succession that max_length may remove


@dataclass
class Passed:
    """What is known of the rows of one prepared stream that went by, of every epoch."""

    told: set[str] = field(default_factory=set)  # the kinds of warnings
    removed: int = 0  # by max_length, since the last row that was kept
    shortest: int = 0  # of those, in tokens of the longer side
    about: str = ""  # "at least " where texts were cut


def first_row(dataset: IterableDataset, where: str) -> dict[str, Any]:
    """A stream may not know its columns: its first row does."""
    rows = list(islice(dataset, 1))
    if not rows:
        raise ValueError(f"{where} is empty")
    return rows[0]


def prepare(
    dataset: IterableDataset,
    tokenizer: Any,
    columns: tuple[str, ...],
    masks: dict[str, str],
    max_length: int | None,
    where: str,
) -> IterableDataset:
    """The rows with their ids, as they come, and without `masks` and what these hide.

    `columns` are those every row must have, beside the masks: column of ids -> column of its mask. How many rows a
    stream has is not known before its end, so warnings name the first row instead of a count.
    """
    shared = {"where": where, "passed": Passed()}
    shared["most"] = None if checks.IDS[0] in columns else cutting.most_characters(tokenizer, max_length)
    shared["max_length"] = max_length
    facts = {"tokenizer": tokenizer, "columns": columns, "masks": masks}
    hidden = list(masks.values())
    dataset = dataset.map(_read_row, with_indices=True, fn_kwargs=facts | shared, remove_columns=hidden)
    return without_long(dataset, columns=checks.IDS, unit="pair", **shared)


def without_long(
    dataset: IterableDataset,
    *,
    columns: tuple[str, ...],
    unit: str,
    max_length: int | None,
    where: str,
    passed: Passed,
    most: int | None = None,
) -> IterableDataset:
    """The rows none of whose `columns` of ids has more than `max_length` tokens; None keeps all.

    Args:
        where, unit: how messages call the dataset and one row, as in "train_dataset" and "pair".
        most: characters of a text beyond which it was not tokenised to its end.
    """
    if max_length is None:
        return dataset
    facts = {"where": where, "passed": passed, "most": most, "max_length": max_length, "columns": columns, "unit": unit}
    return dataset.filter(_fits, with_indices=True, fn_kwargs=facts)


def _read_row(
    row: dict[str, Any],
    index: int,
    tokenizer: Any,
    columns: tuple[str, ...],
    masks: dict[str, str],
    where: str,
    passed: Passed,
    most: int | None,
    max_length: int | None,
) -> dict[str, Any]:
    _check_columns(row, index, (*columns, *masks.values()), where)
    if "margin" in columns:
        checks.check_margin(checks.row_block(row, ("margin",), f"Row {index} of {where}"), index, where)
    ids = {column: row[column] for column in columns if column in checks.IDS}
    if not ids:
        batch = chat.tokenise_batch({key: [value] for key, value in row.items()}, [index], tokenizer, where, most)
        ids = {column: values[0] for column, values in batch.items()}
        if "" in (row["chosen"], row["rejected"]):
            _warn_once(f"Row {index} of {where} has an empty chosen or rejected text", "empty", passed)
    ids |= _unmasked(row, index, masks, where, passed)
    block = checks.row_block(ids, checks.IDS, f"Row {index} of {where}")
    tokens, identical = checks.check_ids(block, index, where)
    if identical[0] and (max_length is None or tokens[0] <= max_length):
        what = f"Row {index} of {where} has identical chosen and rejected tokens: no preference"
        _warn_once(what, "identical", passed)
    return ids


def _unmasked(row: dict[str, Any], index: int, masks: dict[str, str], where: str, passed: Passed) -> dict[str, Any]:
    """The ids that masks leave of a row."""
    left = {}
    for column, mask in masks.items():
        block = checks.row_block(row, (column, mask), f"Row {index} of {where}")
        left[column] = unmasked(block, index, column, mask, where)[0].as_py()
        if len(left[column]) < len(row[column]):
            _warn_once(f"Row {index} of {where} has padding by {mask!r}: it is left out", "padding", passed)
    return left


def _check_columns(row: dict[str, Any], index: int, columns: tuple[str, ...], where: str) -> None:
    check_has(row, index, columns, where)
    if "margin" in row and "margin" not in columns:
        raise ValueError(
            f"Row {index} of {where} has a margin and the first row has none. Give one to every row, or none."
        )


def check_has(row: dict[str, Any], index: int, columns: tuple[str, ...], where: str) -> None:
    """Raise ValueError for a row that lacks columns of the first one."""
    missing = [column for column in columns if column not in row]
    if missing:
        raise ValueError(
            f"Row {index} of {where} lacks the columns {missing}, which the first row has; found {list(row)}."
        )


def _fits(
    row: dict[str, Any],
    index: int,
    where: str,
    passed: Passed,
    most: int | None,
    max_length: int,
    columns: tuple[str, ...],
    unit: str,
) -> bool:
    tokens = max(len(row[column]) for column in columns)
    if tokens <= max_length:
        passed.removed, passed.about = 0, ""
        return True
    if cutting.is_long([row.get(column) for column in cutting.TEXTS], most):
        passed.about = "at least "
    what = f"max_length={max_length} removes row {index} of {where} ({passed.about}{tokens:,} tokens)"
    _warn_once(what, "long", passed)
    passed.shortest = min(tokens, passed.shortest) if passed.removed else tokens
    passed.removed += 1
    if passed.removed in (1_000, 10_000, MOST_REMOVED):
        _tell_removed(index, max_length, where, passed, unit)
    return False


def _tell_removed(index: int, max_length: int, where: str, passed: Passed, unit: str) -> None:
    """Of a stream that gives nothing to train on: it need not ever end."""
    what = (
        f"max_length={max_length} removed {passed.removed:,} rows of {where} in succession, up to row {index}: the "
        f"shortest {unit} of them has {passed.about}{passed.shortest:,} tokens."
    )
    if passed.removed < MOST_REMOVED:
        logger.warning(f"{what} After {MOST_REMOVED:,} the run ends.")
        return
    raise ValueError(
        f"{what} Raise max_length, pass max_length=None, or leave such rows out of the stream with its filter method."
    )


def _warn_once(what: str, kind: str, passed: Passed) -> None:
    """A line a kind, not a line a row."""
    if kind not in passed.told:
        passed.told.add(kind)
        logger.warning(f"{what}; later rows like it are not reported.")
