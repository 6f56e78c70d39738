"""Streams of pairs: rows get the same ids and the same checks as those of a table, one at a time as they arrive."""

from __future__ import annotations

from typing import Any

from datasets import IterableDataset

from trl_jax.data.rows import checks, cutting
from trl_jax.data.rows.masks import unmasked
from trl_jax.data.rows.preference.reward import pair_checks, pairs
from trl_jax.data.rows.streaming import StreamState, check_has, warn_once, without_long


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
    bound = None if pair_checks.IDS[0] in columns else cutting.character_bound(tokenizer, max_length)
    shared = {"where": where, "state": StreamState(), "max_characters": bound, "max_length": max_length}
    facts = {"tokenizer": tokenizer, "columns": columns, "masks": masks}
    hidden = list(masks.values())
    dataset = dataset.map(_read_row, with_indices=True, fn_kwargs=facts | shared, remove_columns=hidden)
    return without_long(dataset, columns=pair_checks.IDS, unit="pair", **shared)


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
        pair_checks.check_margin(checks.row_block(row, ("margin",), f"Row {index} of {where}"), index, where)
    ids = {column: row[column] for column in columns if column in pair_checks.IDS}
    if not ids:
        rows = {key: [value] for key, value in row.items()}
        batch = pairs.tokenise_batch(rows, [index], tokenizer, where, max_characters)
        ids = {column: values[0] for column, values in batch.items()}
        if "" in (row["chosen"], row["rejected"]):
            warn_once(f"Row {index} of {where} has an empty chosen or rejected text", "empty", state)
    ids |= _unmasked(row, index, masks, where, state)
    block = checks.row_block(ids, pair_checks.IDS, f"Row {index} of {where}")
    tokens, identical = pair_checks.check_ids(block, index, where)
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
