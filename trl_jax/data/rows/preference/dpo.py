"""Prepare preference datasets for direct preference optimisation: a prompt's tokens, and those of two answers."""

from __future__ import annotations

from typing import Any

from datasets import Dataset, IterableDataset

from trl_jax.core.printable import brief
from trl_jax.data.rows import checks, streaming
from trl_jax.data.rows.preference import answers

IDS = ("prompt_ids", "chosen_ids", "rejected_ids")
JOINED = ("chosen_input_ids", "rejected_input_ids", "chosen_labels", "rejected_labels")
_NEEDED = ("chosen", "rejected")
_SIDES = tuple((f"{side}_input_ids", f"{side}_labels") for side in _NEEDED)


def prepare(
    dataset: Dataset | IterableDataset,
    tokenizer: Any,
    *,
    max_length: int | None,
    keep_end: bool,
    max_prompt_length: int | None = None,
    num_proc: int | None,
    name: str,
) -> Dataset | IterableDataset:
    """Add TRL's `prompt_ids`, `chosen_ids` and `rejected_ids` to the dataset's own columns, and what a step reads:
    `chosen_input_ids` and `rejected_input_ids`, the prompt with each answer, cut to `max_length`, and their labels.

    Rows that have the three columns already are not tokenised. Rows with ids and labels of both texts, which early
    releases of TRL prepared, are only cut, unless they have the texts, too, which TRL reads. Unless `keep_end`, rows
    whose prompt alone has `max_length` tokens or more are left out.

    Args:
        keep_end: cut at the beginning, and not at the end.
        max_prompt_length: how many of a prompt's last tokens stay, before anything else is cut; None: all.
        num_proc: processes that tokenise.
        name: "train", "eval", "test", or the dataset's name in errors, such as "eval_dataset['key']".

    Raises:
        TypeError, ValueError: the dataset, a column or a row cannot be trained on; a stream raises when it reaches the
            row.
    """
    where = checks.argument(name)
    plain, first = streaming.opened(dataset, name, ("prompt", "chosen", "rejected"))
    part = _part(max_length, keep_end)
    from_texts = all(column in first for column in _NEEDED) and not all(column in first for column in IDS)
    if all(column in first for column in JOINED) and not from_texts:
        plain = streaming.with_columns(plain, JOINED, where)
        facts = {"part": (part.start, part.stop), "max_prompt_length": max_prompt_length}
        return plain if max_length is None is max_prompt_length else plain.map(_cut, fn_kwargs=facts)
    tokenised = all(column in first for column in IDS)
    if not tokenised and not all(column in first for column in _NEEDED):
        raise ValueError(
            f"{where} needs the columns 'chosen' and 'rejected', and maybe 'prompt', or {', '.join(IDS)}; found "
            f"{brief(list(first), 500)}."
        )
    read = [name for name in ("prompt", *_NEEDED) if name in first]
    plain = streaming.with_columns(plain, IDS if tokenised else read, where)
    options = answers.map_options(plain, where, num_proc)
    if not tokenised:
        facts = {"tokenizer": tokenizer, "where": where}
        plain = plain.map(tokenise_row, with_indices=True, fn_kwargs=facts, **options("Tokenizing"))
    longest = None if keep_end else max_length
    plain = answers.without_full_prompts(plain, longest, max_prompt_length, where, options)
    facts = {"part": (part.start, part.stop), "max_prompt_length": max_prompt_length, "where": where}
    plain = plain.map(_joined, with_indices=True, fn_kwargs=facts, **options("Joining prompts and answers of"))
    return answers.warn_of_rows(plain, JOINED[:2], JOINED[2], where)


def tokenise_row(row: dict[str, Any], index: int, tokenizer: Any, where: str) -> dict[str, list[int]]:
    """The token ids of a row's prompt and of what both answers add to it; `index` and `where` name it in errors."""
    place = f"Row {index} of {where}"
    read = answers.read_row(row, _NEEDED, place)
    ids = answers.behind_prompt(*answers.tokenised(read, _NEEDED, tokenizer, place))
    return dict(zip(IDS, ids, strict=True))


def _part(max_length: int | None, keep_end: bool) -> slice:
    """The part of a text that is kept: its first or last `max_length` tokens, or all."""
    if max_length is None:
        return slice(None)
    return slice(-max_length, None) if keep_end else slice(max_length)


def _cut(row: dict[str, Any], part: tuple[int | None, int | None], max_prompt_length: int | None) -> dict[str, Any]:
    sides = (answers.shortened(row, *columns, slice(*part), max_prompt_length) for columns in _SIDES)
    return {column: ids for side in sides for column, ids in side.items()}


def _joined(
    row: dict[str, Any], index: int, part: tuple[int | None, int | None], max_prompt_length: int | None, where: str
) -> dict[str, Any]:
    """The part of the prompt with each answer that is kept, and labels, which are the answer's ids."""
    columns: dict[str, list[int]] = {}
    if max_prompt_length is not None:
        columns["prompt_ids"] = row["prompt_ids"][-max_prompt_length:]
        row = {**row, **columns}
    for side in _NEEDED:
        texts = answers.joined(row, f"{side}_ids", slice(*part), f"Row {index} of {where}")
        columns[f"{side}_input_ids"], columns[f"{side}_labels"] = texts
    return columns
