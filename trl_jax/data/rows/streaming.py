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

logger = logging.getLogger(__name__)
MAX_REMOVED = 100_000  # rows in succession that max_length may remove


@dataclass
class StreamState:
    """Warnings and counts of the rows of one prepared stream so far, over all epochs."""

    warned: set[str] = field(default_factory=set)  # kinds of warnings that were given
    removed: int = 0  # by max_length, since the last row that was kept
    shortest: int = 0  # tokens of the shortest of those
    about: str = ""  # "at least " where texts were cut


def opened(
    dataset: Any, name: str, messages: Sequence[str] = ()
) -> tuple[Dataset | IterableDataset, dict[str, Any]]:
    """A dataset with rows as Python values, whatever format the user has set, and its first row.

    Args:
        messages: as in `first_row`.

    Raises:
        TypeError, ValueError: not a dataset, empty, or with images.
    """
    checks.check_type(dataset, name)
    plain = dataset.with_format(None)
    if isinstance(plain, IterableDataset):
        return plain, first_row(plain, checks.argument(name), messages)
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


def first_row(dataset: IterableDataset, where: str, messages: Sequence[str] = ()) -> dict[str, Any]:
    """The first row of a stream, whose columns may not be known otherwise.

    Args:
        messages: columns that a chat template will render. Later rows are checked as they come.

    Raises:
        ValueError: there is no row, or it has images.
    """
    rows = list(islice(dataset, 1))
    if not rows:
        raise ValueError(f"{where} is empty")
    checks.check_no_images(rows[0], where)
    for column in messages:
        checks.check_no_media(rows[0].get(column), f"Row 0 of {where}, column {column!r}")
    return rows[0]


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
