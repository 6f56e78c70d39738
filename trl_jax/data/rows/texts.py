"""Prepare datasets of plain text for any task: the texts of each row become columns of token ids."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import numpy as np
import pyarrow as pa
import pyarrow.compute as pc
from datasets import Dataset, IterableDataset

from trl_jax.core.printable import brief
from trl_jax.data.example import Columns
from trl_jax.data.rows import chat, checks, streaming
from trl_jax.data.rows.lengths import drop_long

TextsOf = Callable[[dict[str, Any]], dict[str, str]]


def prepare_texts(
    dataset: Dataset | IterableDataset,
    tokenizer: Any,
    texts_of: TextsOf,
    columns: Columns,
    *,
    needed: tuple[str, ...],
    max_length: int | None,
    num_proc: int | None,
    name: str,
) -> Dataset | IterableDataset:
    """Add a task's columns of token ids to the dataset's own, and leave out the rows that are too long.

    Texts end with the tokenizer's EOS token, as TRL's do. A dataset that has these columns already is not tokenised
    again; its rows are checked, and left out where they are too long.

    Args:
        texts_of: maps a row to its texts, each under the name of the column that gets its token ids. Define it at the
            top of a module, so that the cache of datasets recognises it.
        columns: the task's; every row must have its numbers, but for the optional ones.
        needed: columns of text that `texts_of` reads.
        max_length: as in `Task.prepare`.
        num_proc: likewise.
        name: likewise.

    Raises:
        TypeError, ValueError: it is no dataset, is empty or lacks a column; a text is no string, or a number is not
            finite. A stream raises when it reaches the row.
    """
    checks.check_type(dataset, name)
    where, plain = checks.argument(name), dataset.with_format(None)
    streams = isinstance(plain, IterableDataset)
    found = list(streaming.first_row(plain, where)) if streams else plain.column_names
    if not streams and not len(plain):
        raise ValueError(f"{where} is empty")
    lacking = set(columns.optional).difference(found)
    columns = columns._replace(numbers=tuple(name for name in columns.numbers if name not in lacking))
    tokenised = set(columns.texts) <= set(found)
    read = (*(columns.texts if tokenised else needed), *columns.numbers)
    if missing := [column for column in read if column not in found]:
        raise ValueError(f"{where} needs the columns {list(read)}; {missing} are missing, found {brief(found, 500)}.")
    facts = {"tokenizer": tokenizer, "texts_of": texts_of, "columns": columns, "needed": needed, "where": where}
    if streams:
        rows = plain.map(_read_row, with_indices=True, fn_kwargs=facts | {"tokenised": tokenised})
        limits = {"max_length": max_length, "where": where, "state": streaming.StreamState()}
        return streaming.without_long(rows, columns=columns.texts, unit="row", **limits)
    if not tokenised:
        words = f"Tokenizing {where.replace('_', ' ', 1)}"
        plain = plain.map(_tokenise, with_indices=True, batched=True, num_proc=num_proc, fn_kwargs=facts, desc=words)
    lengths = [_checked(block, columns, first, where) for first, block in checks.blocks(plain, columns.all)]
    return drop_long(plain, np.concatenate(lengths), max_length, where, "row")


def _tokenise(
    batch: Any,
    indices: list[int],
    tokenizer: Any,
    texts_of: TextsOf,
    columns: Columns,
    needed: tuple[str, ...],
    where: str,
) -> dict[str, list[list[int]]]:
    """Tokenise a block of rows, as `Dataset.map` passes it."""
    cells = zip(*(batch[column] for column in batch), strict=True)
    rows = [dict(zip(batch, row, strict=True)) for row in cells]
    places = [f"Row {i} of {where}" for i in indices]
    texts = [_texts(row, texts_of, tokenizer, needed, place) for row, place in zip(rows, places, strict=True)]
    return {column: tokenizer(text=[one[column] for one in texts])["input_ids"] for column in columns.texts}


def _texts(
    row: dict[str, Any], texts_of: TextsOf, tokenizer: Any, needed: tuple[str, ...], where: str
) -> dict[str, str]:
    for column in needed:
        if not isinstance(row[column], str):
            raise checks.cell_error(where, column, row[column], "a string")
        chat.check_unicode(row[column], column, where)
    return {column: chat.with_eos(text, tokenizer, where) for column, text in texts_of(row).items()}


def _read_row(
    row: dict[str, Any],
    index: int,
    columns: Columns,
    needed: tuple[str, ...],
    where: str,
    tokenised: bool,
    **options: Any,
) -> dict[str, Any]:
    """The token ids of a stream's row, checked as those of a table."""
    streaming.check_has(row, index, (*(columns.texts if tokenised else needed), *columns.numbers), where)
    ids = {}
    if not tokenised:
        batch = {column: [value] for column, value in row.items()}
        tokens = _tokenise(batch, [index], columns=columns, needed=needed, where=where, **options)
        ids = {column: rows[0] for column, rows in tokens.items()}
    _checked(checks.row_block(row | ids, columns.all, f"Row {index} of {where}"), columns, index, where)
    return ids


def _checked(block: pa.Table, columns: Columns, first: int, where: str) -> np.ndarray:
    """Number of tokens of the longest text of each row, `[rows]`; ValueError for a wrong id or number."""
    for column in columns.numbers:
        checks.check_numbers(block, column, first, where)
    lists = [checks.id_lists(block, column, first, where) for column in columns.texts]
    return np.maximum.reduce([pc.list_value_length(one).to_numpy(zero_copy_only=False) for one in lists])
