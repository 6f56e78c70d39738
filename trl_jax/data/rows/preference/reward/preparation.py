"""Prepare preference datasets of every form that TRL accepts: their rows become token ids, in the same order."""

from __future__ import annotations

import logging
from typing import Any

import numpy as np
from datasets import Dataset, IterableDataset

from trl_jax.data.rows import checks, cutting, masks
from trl_jax.data.rows.lengths import drop_long
from trl_jax.data.rows.preference.reward import columns, pair_checks, pairs, streaming
from trl_jax.data.rows.streaming import first_row

logger = logging.getLogger(__name__)


def prepare(
    dataset: Dataset | IterableDataset,
    tokenizer: Any,
    *,
    max_length: int | None,
    num_proc: int | None,
    name: str,
) -> Dataset | IterableDataset:
    """Add `chosen_ids` and `rejected_ids` to the dataset's own columns, and leave out the pairs that are too long.

    A pair is left out where either answer, with its prompt, has more than `max_length` tokens; nothing is truncated. A
    dataset that is prepared already stays as it is.

    Args:
        num_proc: processes that tokenise.
        name: "train", "eval", "test", or the dataset's name in errors, such as "eval_dataset['key']".

    Raises:
        TypeError, ValueError: the dataset, a column or a row cannot be trained on; a stream raises when it reaches the
            row.
    """
    checks.check_type(dataset, name)
    plain = dataset.with_format(None)  # rows as Python values, whatever format the user has set
    if isinstance(plain, IterableDataset):
        opening = first_row(plain, checks.argument(name), ("prompt", "chosen", "rejected"))
        plain, read = columns.settle(plain, list(opening), name)
        needed = pair_checks.IDS if read.tokenised else pair_checks.TEXTS
        needed += ("margin",) if "margin" in opening else ()
        return streaming.prepare(plain, tokenizer, needed, read.masks, max_length, checks.argument(name))
    if len(plain) == 0:
        raise ValueError(f"{checks.argument(name)} is empty")
    plain, read = columns.settle(plain, plain.column_names, name)
    _check_margins(plain, checks.argument(name))
    if read.masks:
        plain = _drop_padding(plain, read.masks, num_proc, checks.argument(name))
    max_characters = None
    if not read.tokenised:
        max_characters = cutting.character_bound_of_table(plain, tokenizer, max_length)
        plain = _tokenise(plain, tokenizer, num_proc, name, max_characters)
    lengths = _check_pairs(plain, max_length, checks.argument(name))
    about = "" if max_characters is None else "at least "
    return drop_long(plain, lengths, max_length, checks.argument(name), "pair", about)


def _check_margins(dataset: Dataset, where: str) -> None:
    if "margin" in dataset.column_names:
        for first, block in checks.blocks(dataset, ("margin",)):
            pair_checks.check_margin(block, first, where)


def _drop_padding(dataset: Dataset, masks_of: dict[str, str], num_proc: int | None, where: str) -> Dataset:
    shorter = masks.drop_padding(dataset, masks_of, num_proc, where)
    padded = _tokens(dataset, tuple(masks_of)) != _tokens(shorter, tuple(masks_of))
    _warn_count(padded.any(axis=0), f"rows of {where} have padding by {list(masks_of.values())}: it is left out")
    return shorter


def _tokens(dataset: Dataset, columns: tuple[str, ...]) -> np.ndarray:
    """Number of tokens of each row of these checked columns of ids: `[columns, rows]`."""
    counts = [[checks.list_lengths(b, column)[1] for _, b in checks.blocks(dataset, columns)] for column in columns]
    return np.stack([np.concatenate(column) for column in counts])


def _tokenise(dataset: Dataset, tokenizer: Any, num_proc: int | None, name: str, max_characters: int | None) -> Dataset:
    where = checks.argument(name)
    dataset = dataset.map(
        pairs.tokenise_batch,
        with_indices=True,
        batched=True,
        num_proc=num_proc,
        fn_kwargs={
            "tokenizer": tokenizer,
            "where": where,
            "max_characters": max_characters,
        },  # not a closure: the cache finds the result again
        desc=f"Tokenizing {where.replace('_', ' ', 1)}",
    )
    empty = [pair_checks.empty_texts(block) for _, block in checks.blocks(dataset, pair_checks.TEXTS)]
    _warn_count(np.concatenate(empty), f"rows of {where} have an empty chosen or rejected text")
    return dataset


def _check_pairs(dataset: Dataset, max_length: int | None, where: str) -> np.ndarray:
    """Number of tokens of the longer answer of each pair, `[rows]`; for texts that were cut, a number above
    `max_length`.
    """
    scanned = [pair_checks.check_ids(block, first, where) for first, block in checks.blocks(dataset, pair_checks.IDS)]
    lengths, identical = (np.concatenate(part) for part in zip(*scanned, strict=True))
    if max_length is not None:
        identical &= lengths <= max_length
    _warn_count(identical, f"rows of {where} have identical chosen and rejected tokens: no preference")
    return lengths


def _warn_count(flags: np.ndarray, what: str) -> None:
    if flags.any():
        logger.warning(f"{flags.sum():,} of {len(flags):,} {what} (first: row {np.argmax(flags)})")
