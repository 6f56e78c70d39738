"""Tokenize text columns of tables and streams."""

from __future__ import annotations

import json
import logging
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from itertools import islice
from typing import Any

import numpy as np
import pyarrow as pa
import pyarrow.compute as pc
from datasets import Dataset, IterableDataset
from tokenizers import normalizers, pre_tokenizers
from tokenizers.models import BPE
from transformers import PreTrainedTokenizerFast

from trl_jax.core.text import brief
from trl_jax.data import chat, checks
from trl_jax.data.batch import Columns
from trl_jax.data.checks import drop_long

logger = logging.getLogger(__name__)
MAX_REMOVED = 100_000  # consecutive rows that max_length may remove from a stream
TEXTS = ("prompt", "chosen", "rejected")
_DECOMPOSED = 4  # maximum number of characters that Unicode's canonical composition merges into one
_KEEPS_ALL = ("ByteLevel", "Digits", "Split")  # pre-tokenizers that drop no characters

# Plain text for any task

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
    """Add a task's token id columns to a dataset and drop rows that are too long.

    The tokenizer's EOS token is appended to texts, as in TRL. A dataset that already has these columns is only checked
    and filtered.

    Args:
        texts_of: maps a row to its texts, keyed by the column that gets their token ids. Define it at module level, so
            that the cache of `datasets` recognizes it.
        columns: the task's columns; every row must have its numbers, except the optional ones.
        needed: text columns that `texts_of` reads.
        max_length, num_proc, name: see `Task.prepare`.

    Raises:
        TypeError, ValueError: not a dataset, empty, or a column is missing; a text is not a string, or a number is not
            finite. A stream raises when it reaches the row.
    """
    checks.check_type(dataset, name)
    where, plain = checks.argument(name), dataset.with_format(None)
    streams = isinstance(plain, IterableDataset)
    names = list(first_row(plain, where)) if streams else plain.column_names
    if not streams and not len(plain):
        raise ValueError(f"{where} is empty")
    missing_numbers = set(columns.optional).difference(names)
    columns = columns._replace(numbers=tuple(name for name in columns.numbers if name not in missing_numbers))
    tokenized = set(columns.texts) <= set(names)
    required = (*(columns.texts if tokenized else needed), *columns.numbers)
    if missing := [column for column in required if column not in names]:
        raise ValueError(
            f"{where} must have the columns {list(required)}, got {brief(names, 500)}: {missing} are missing."
        )
    arguments = {"tokenizer": tokenizer, "texts_of": texts_of, "columns": columns, "needed": needed, "where": where}
    if streams:
        rows = plain.map(_read_row, with_indices=True, fn_kwargs=arguments | {"tokenized": tokenized})
        limits = {"max_length": max_length, "where": where, "state": StreamState()}
        return without_long(rows, columns=columns.texts, **limits)
    if not tokenized:
        options = map_options(plain, num_proc, f"Tokenizing {where}")
        plain = plain.map(_tokenize, with_indices=True, batched=True, fn_kwargs=arguments, **options)
    lengths = [_checked(block, columns, first, where) for first, block in checks.blocks(plain, columns.all)]
    return drop_long(plain, np.concatenate(lengths), max_length, where, "row")


def _tokenize(
    batch: Any,
    indices: list[int],
    tokenizer: Any,
    texts_of: TextsOf,
    columns: Columns,
    needed: tuple[str, ...],
    where: str,
) -> dict[str, list[list[int]]]:
    """Tokenize a batch of `Dataset.map`."""
    cells = zip(*(batch[column] for column in batch), strict=True)
    rows = [dict(zip(batch, row, strict=True)) for row in cells]
    row_names = [f"Row {i} of {where}" for i in indices]
    texts = [_texts(row, texts_of, tokenizer, needed, row_name) for row, row_name in zip(rows, row_names, strict=True)]
    return {column: tokenizer(text=[row_texts[column] for row_texts in texts])["input_ids"] for column in columns.texts}


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
    tokenized: bool,
    **options: Any,
) -> dict[str, Any]:
    """Tokenize a row of a stream, with the same checks as for a table."""
    check_has(row, index, (*(columns.texts if tokenized else needed), *columns.numbers), where)
    ids = {}
    if not tokenized:
        batch = {column: [value] for column, value in row.items()}
        tokens = _tokenize(batch, [index], columns=columns, needed=needed, where=where, **options)
        ids = {column: rows[0] for column, rows in tokens.items()}
    _checked(checks.row_block(row | ids, columns.all, f"Row {index} of {where}"), columns, index, where)
    return ids


def _checked(block: pa.Table, columns: Columns, first: int, where: str) -> np.ndarray:
    """Check ids and numbers; returns the number of tokens of each row's longest text, `[rows]`."""
    for column in columns.numbers:
        checks.check_numbers(block, column, first, where)
    lists = [checks.id_lists(block, column, first, where) for column in columns.texts]
    return np.maximum.reduce([checks.numbers_of(pc.list_value_length(column)) for column in lists])


# Streams: rows are tokenized and checked as they arrive


@dataclass
class StreamState:
    """Warnings and counts for one prepared stream, over all epochs."""

    warned: set[str] = field(default_factory=set)  # kinds of warnings already given
    removed: int = 0  # rows removed by max_length since the last row that was kept
    shortest: int = 0  # tokens of the shortest of these
    about: str = ""  # "at least " if texts were cut before tokenizing


def peek(dataset: Any, name: str, messages: Sequence[str] = ()) -> tuple[Dataset | IterableDataset, dict[str, Any]]:
    """The dataset without the user's format, so that rows are Python values, and its first row.

    Args:
        messages: see `first_row`.

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


def map_options(dataset: Dataset | IterableDataset, num_proc: int | None, description: str) -> dict[str, Any]:
    """Arguments of `map` and `filter` that only tables accept; `description` labels the progress bar."""
    if isinstance(dataset, IterableDataset):
        return {}
    return {"num_proc": num_proc, "desc": description.replace("_", " ", 1)}


def kept_tokens(max_length: int | None, keep_end: bool) -> slice:
    """The slice of a text that is kept: its first or last `max_length` tokens, or all."""
    if max_length is None:
        return slice(None)
    return slice(-max_length, None) if keep_end else slice(max_length)


def with_columns(dataset: Dataset | IterableDataset, columns: Sequence[str], where: str) -> Dataset | IterableDataset:
    """Make a stream raise ValueError for rows without these columns; a table is returned unchanged."""
    if isinstance(dataset, Dataset):
        return dataset
    return dataset.map(_require_columns, with_indices=True, fn_kwargs={"columns": tuple(columns), "where": where})


def _require_columns(row: dict[str, Any], index: int, columns: tuple[str, ...], where: str) -> dict[str, Any]:
    check_has(row, index, columns, where)
    return row


def first_row(dataset: IterableDataset, where: str, messages: Sequence[str] = ()) -> dict[str, Any]:
    """The first row of a stream, whose columns may be unknown otherwise.

    Args:
        messages: columns that a chat template will render; checked here for the first row only.

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
    max_length: int | None,
    where: str,
    state: StreamState,
    max_characters: int | None = None,
) -> IterableDataset:
    """Drop the rows of a stream with more than `max_length` tokens in any of `columns`; None keeps all.

    Args:
        where: the dataset's name in messages.
        max_characters: the number of characters at which texts were cut before tokenizing; None: they were not cut.
    """
    if max_length is None:
        return dataset
    arguments = {
        "where": where, "state": state, "max_characters": max_characters, "max_length": max_length, "columns": columns,
    }  # fmt: skip
    return dataset.filter(_fits, with_indices=True, fn_kwargs=arguments)


def check_has(row: dict[str, Any], index: int, columns: tuple[str, ...], where: str) -> None:
    """Raise ValueError if a row lacks columns of the first row."""
    missing = [column for column in columns if column not in row]
    if missing:
        raise ValueError(
            f"Row {index} of {where} lacks the columns {missing}, which the first row has. "
            f"It has {brief(list(row), 500)}."
        )


def _fits(
    row: dict[str, Any],
    index: int,
    where: str,
    state: StreamState,
    max_characters: int | None,
    max_length: int,
    columns: tuple[str, ...],
) -> bool:
    tokens = max(len(row[column]) for column in columns)
    if tokens <= max_length:
        state.removed, state.about = 0, ""
        return True
    if is_long([row.get(column) for column in TEXTS], max_characters):
        state.about = "at least "
    what = f"max_length={max_length} removes row {index} of {where} ({state.about}{tokens:,} tokens)"
    warn_once(what, "long", state)
    state.shortest = min(tokens, state.shortest) if state.removed else tokens
    state.removed += 1
    if state.removed in (1_000, 10_000, MAX_REMOVED):
        _report_removed(index, max_length, where, state)
    return False


def _report_removed(index: int, max_length: int, where: str, state: StreamState) -> None:
    """Warn after many consecutive removed rows; raise after MAX_REMOVED, because the stream may be infinite."""
    what = (
        f"max_length={max_length} removed {state.removed:,} consecutive rows of {where}, up to row {index}; the "
        f"shortest of these has {state.about}{state.shortest:,} tokens."
    )
    if state.removed < MAX_REMOVED:
        logger.warning(f"{what} Training stops after {MAX_REMOVED:,} such rows.")
        return
    raise ValueError(
        f"{what} Raise max_length, pass max_length=None, or filter such rows out of the stream with its filter method."
    )


def warn_once(what: str, kind: str, state: StreamState) -> None:
    """Warn only for the first row of each kind."""
    if kind not in state.warned:
        state.warned.add(kind)
        logger.warning(f"{what}; further rows like it are not reported.")


# Character bound: texts that are certainly longer than max_length need not be tokenized to their end


def character_bound(tokenizer: Any, max_length: int | None) -> int | None:
    """The number of characters beyond which a text certainly has more than `max_length` tokens; None if unbounded.

    A bound exists for byte-level BPE: every byte is part of a token, and no token has more bytes than the longest one
    in the vocabulary. Other tokenizers may drop characters, or merge any number of unknown ones into one token.
    """
    if max_length is None or not _is_byte_level(tokenizer):
        return None
    longest = max(map(len, tokenizer.get_vocab()))
    return max_length * longest * (1 if tokenizer.backend_tokenizer.normalizer is None else _DECOMPOSED)


def _is_byte_level(tokenizer: Any) -> bool:
    if not isinstance(tokenizer, PreTrainedTokenizerFast) or not type(tokenizer).__module__.startswith("transformers."):
        return False
    backend = tokenizer.backend_tokenizer
    if not isinstance(backend.model, BPE) or not isinstance(backend.normalizer, normalizers.NFC | None):
        return False
    if any(token.lstrip or token.rstrip for token in tokenizer.added_tokens_decoder.values()):
        return False  # such tokens absorb any number of spaces
    alphabet = pre_tokenizers.ByteLevel.alphabet()
    return _splits_bytes(backend.pre_tokenizer) and set(alphabet) <= tokenizer.get_vocab().keys()


def _splits_bytes(splitter: pre_tokenizers.PreTokenizer | None) -> bool:
    """Whether the pre-tokenizer ends with a byte-level step and drops nothing."""
    if splitter is None:
        return False
    state = json.loads(splitter.__getstate__())
    steps = state["pretokenizers"] if state["type"] == "Sequence" else [state]
    drops_characters = any(step["type"] not in _KEEPS_ALL or step.get("behavior") == "Removed" for step in steps)
    return not drops_characters and steps[-1]["type"] == "ByteLevel"


def character_bound_of_table(dataset: Dataset, tokenizer: Any, max_length: int | None) -> int | None:
    """`character_bound`, or None if no row exceeds it, so that cached ids do not depend on max_length."""
    columns = tuple(column for column in TEXTS if column in dataset.column_names)
    if max_length is None:
        return None
    counts = [sum(_characters(block.column(c)) for c in columns).max() for _, block in checks.blocks(dataset, columns)]
    if max(counts) <= max_length:  # no bound is lower
        return None
    max_characters = character_bound(tokenizer, max_length)
    return None if max_characters is None or max(counts) <= max_characters else max_characters


def _characters(values: pa.Array | pa.ChunkedArray) -> np.ndarray:
    """Number of characters in all (nested) strings of each value: `[values]`, int64."""
    if isinstance(values, pa.ChunkedArray):
        values = values.combine_chunks()
    kind = values.type
    if pa.types.is_string(kind) or pa.types.is_large_string(kind):
        return pc.utf8_length(values).fill_null(0).to_numpy(zero_copy_only=False).astype(np.int64)
    if checks.is_list(kind):
        lengths = pc.list_value_length(values).fill_null(0).to_numpy(zero_copy_only=False)
        parents = np.repeat(np.arange(len(values)), lengths)
        return np.bincount(parents, _characters(values.flatten()), len(values)).astype(np.int64)
    if pa.types.is_struct(kind):
        return sum((_characters(part) for part in values.flatten()), np.zeros(len(values), np.int64))
    return np.zeros(len(values), np.int64)


def is_long(value: Any, max_characters: int | None) -> bool:
    """Whether a text or conversation has more than `max_characters` characters."""
    return max_characters is not None and _count(value) > max_characters


def _count(value: Any) -> int:
    if isinstance(value, str):
        return len(value)
    if isinstance(value, dict):
        value = value.values()
    elif not isinstance(value, list):
        return 0
    return sum(map(_count, value))
