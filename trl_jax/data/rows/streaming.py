"""Streamed datasets: rows get the same ids and the same checks as those of a table, one at a time as they arrive."""

from __future__ import annotations

import logging
from collections.abc import Sequence
from dataclasses import dataclass, field
from itertools import islice
from typing import Any

from datasets import Dataset, IterableDataset

from trl_jax.core.printable import brief
from trl_jax.data.rows import checks, cutting
from trl_jax.data.rows.masks import unmasked
from trl_jax.data.rows.preference import pairs

logger = logging.getLogger(__name__)
MAX_REMOVED = 100_000  # rows in succession that max_length may remove


@dataclass
class StreamState:
    """Warnings and counts of the rows of one prepared stream so far, over all epochs."""

    warned: set[str] = field(default_factory=set)  # kinds of warnings that were given
    removed: int = 0  # by max_length, since the last row that was kept
    shortest: int = 0  # tokens of the shortest of those
    about: str = ""  # "at least " where texts were cut


def opened(dataset: Any, name: str) -> tuple[Dataset | IterableDataset, dict[str, Any]]:
    """A dataset with rows as Python values, whatever format the user has set, and its first row.

    Raises:
        TypeError, ValueError: it is no dataset, or empty.
    """
    checks.check_type(dataset, name)
    plain = dataset.with_format(None)
    if isinstance(plain, IterableDataset):
        return plain, first_row(plain, checks.argument(name))
    if not len(plain):
        raise ValueError(f"{checks.argument(name)} is empty")
    return plain, plain[0]


def with_columns(dataset: Dataset | IterableDataset, columns: Sequence[str], where: str) -> Dataset | IterableDataset:
    """The dataset; a stream whose rows lack one of these columns, as those of a table cannot, raises there."""
    if isinstance(dataset, Dataset):
        return dataset
    return dataset.map(_had, with_indices=True, fn_kwargs={"columns": tuple(columns), "where": where})


def _had(row: dict[str, Any], index: int, columns: tuple[str, ...], where: str) -> dict[str, Any]:
    check_has(row, index, columns, where)
    return row


def first_row(dataset: IterableDataset, where: str) -> dict[str, Any]:
    """The first row of a stream, whose columns may not be known otherwise; ValueError where there is none, or it has
    images."""
    rows = list(islice(dataset, 1))
    if not rows:
        raise ValueError(f"{where} is empty")
    checks.check_no_images(rows[0], where)
    return rows[0]


def prepare(
    dataset: IterableDataset,
    tokenizer: Any,
    columns: tuple[str, ...],
    masks: dict[str, str],
    max_length: int | None,
    where: str,
) -> IterableDataset:
    """Map a stream to rows with `chosen_ids` and `rejected_ids`, without `masks`, masked tokens and pairs too long.

    The number of rows is not known before the end, so warnings name the first row of a kind instead of a count.

    Args:
        columns: that every row must have, besides those of the masks.
        masks: column of ids -> column of its mask.
        where: the dataset's name in messages.
    """
    bound = None if checks.IDS[0] in columns else cutting.character_bound(tokenizer, max_length)
    shared = {"where": where, "state": StreamState(), "max_characters": bound, "max_length": max_length}
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
    state: StreamState,
    max_characters: int | None = None,
) -> IterableDataset:
    """Keep the rows none of whose `columns` of ids has more than `max_length` tokens; None keeps all.

    Args:
        where, unit: names of the dataset and of one row in messages, as in "train_dataset" and "pair".
        state: warnings and counts so far.
        max_characters: characters of a text beyond which it was not tokenised to its end.
    """
    if max_length is None:
        return dataset
    facts = {"where": where, "state": state, "max_characters": max_characters, "max_length": max_length}
    facts |= {"columns": columns, "unit": unit}
    return dataset.filter(_fits, with_indices=True, fn_kwargs=facts)


def _read_row(
    row: dict[str, Any],
    index: int,
    tokenizer: Any,
    columns: tuple[str, ...],
    masks: dict[str, str],
    where: str,
    state: StreamState,
    max_characters: int | None,
    max_length: int | None,
) -> dict[str, Any]:
    _check_columns(row, index, (*columns, *masks.values()), where)
    if "margin" in columns:
        checks.check_margin(checks.row_block(row, ("margin",), f"Row {index} of {where}"), index, where)
    ids = {column: row[column] for column in columns if column in checks.IDS}
    if not ids:
        rows = {key: [value] for key, value in row.items()}
        batch = pairs.tokenise_batch(rows, [index], tokenizer, where, max_characters)
        ids = {column: values[0] for column, values in batch.items()}
        if "" in (row["chosen"], row["rejected"]):
            warn_once(f"Row {index} of {where} has an empty chosen or rejected text", "empty", state)
    ids |= _unmasked(row, index, masks, where, state)
    block = checks.row_block(ids, checks.IDS, f"Row {index} of {where}")
    tokens, identical = checks.check_ids(block, index, where)
    if identical[0] and (max_length is None or tokens[0] <= max_length):
        what = f"Row {index} of {where} has identical chosen and rejected tokens: no preference"
        warn_once(what, "identical", state)
    return ids


def _unmasked(row: dict[str, Any], index: int, masks: dict[str, str], where: str, state: StreamState) -> dict[str, Any]:
    """The ids of a row that its masks keep, by column."""
    left = {}
    for column, mask in masks.items():
        block = checks.row_block(row, (column, mask), f"Row {index} of {where}")
        left[column] = unmasked(block, index, column, mask, where)[0].as_py()
        if len(left[column]) < len(row[column]):
            warn_once(f"Row {index} of {where} has padding by {mask!r}: it is left out", "padding", state)
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
            f"Row {index} of {where} lacks the columns {missing}, which the first row has; found "
            f"{brief(list(row), 500)}."
        )


def _fits(
    row: dict[str, Any],
    index: int,
    where: str,
    state: StreamState,
    max_characters: int | None,
    max_length: int,
    columns: tuple[str, ...],
    unit: str,
) -> bool:
    tokens = max(len(row[column]) for column in columns)
    if tokens <= max_length:
        state.removed, state.about = 0, ""
        return True
    if cutting.is_long([row.get(column) for column in cutting.TEXTS], max_characters):
        state.about = "at least "
    what = f"max_length={max_length} removes row {index} of {where} ({state.about}{tokens:,} tokens)"
    warn_once(what, "long", state)
    state.shortest = min(tokens, state.shortest) if state.removed else tokens
    state.removed += 1
    if state.removed in (1_000, 10_000, MAX_REMOVED):
        _report_removed(index, max_length, where, state, unit)
    return False


def _report_removed(index: int, max_length: int, where: str, state: StreamState, unit: str) -> None:
    """Warn of a stream that gives nothing to train on, and end the run after MAX_REMOVED rows: it may be endless."""
    what = (
        f"max_length={max_length} removed {state.removed:,} rows of {where} in succession, up to row {index}: the "
        f"shortest {unit} of them has {state.about}{state.shortest:,} tokens."
    )
    if state.removed < MAX_REMOVED:
        logger.warning(f"{what} After {MAX_REMOVED:,} the run ends.")
        return
    raise ValueError(
        f"{what} Raise max_length, pass max_length=None, or leave such rows out of the stream with its filter method."
    )


def warn_once(what: str, kind: str, state: StreamState) -> None:
    """Warn of the first row of each kind only."""
    if kind not in state.warned:
        state.warned.add(kind)
        logger.warning(f"{what}; later rows like it are not reported.")
