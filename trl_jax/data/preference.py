"""Rows of preference tasks (DPO, KTO, ORPO, CPO): prompts with chosen and rejected answers, as token ids."""

from __future__ import annotations

import logging
import os
from collections.abc import Collection, Sequence
from typing import Any

from datasets import Dataset, DatasetDict, IterableDataset

from trl_jax.core.text import brief
from trl_jax.data import chat, checks, tokenize
from trl_jax.data.batch import IGNORED
from trl_jax.data.chat_templates import apply_chat_template
from trl_jax.data.sft import common_prefix

logger = logging.getLogger(__name__)

_OPTIONS = ("tools", "chat_template_kwargs")

# DPO

IDS = ("prompt_ids", "chosen_ids", "rejected_ids")
JOINED = ("chosen_input_ids", "rejected_input_ids", "chosen_labels", "rejected_labels")
_NEEDED = ("chosen", "rejected")


def prepare_dpo(
    dataset: Dataset | IterableDataset,
    tokenizer: Any,
    *,
    max_length: int | None,
    keep_end: bool,
    max_prompt_length: int | None = None,
    num_proc: int | None,
    name: str,
) -> Dataset | IterableDataset:
    """Add the columns that DPO trains on.

    These are TRL's `prompt_ids`, `chosen_ids` and `rejected_ids`, and the columns that a step uses: `chosen_input_ids`
    and `rejected_input_ids`, the prompt with each answer truncated to `max_length`, and their labels. Rows that already
    have the first three are not tokenized. Rows that already have the joined columns, as prepared by early TRL
    releases, are only truncated, unless they also have the texts, which TRL prefers. Unless `keep_end`, rows whose
    prompt alone has at least `max_length` tokens are dropped.

    Args:
        keep_end: truncate at the start instead of at the end.
        max_prompt_length: keep only this many last tokens of a prompt, before any other truncation; None keeps all.
        num_proc: number of processes for tokenization.
        name: "train", "eval", "test", or the dataset's name in errors, such as "eval_dataset['key']".

    Raises:
        TypeError, ValueError: the dataset, a column or a row is invalid; a stream raises when it reaches the row.
    """
    where = checks.argument(name)
    plain, first = tokenize.peek(dataset, name, ("prompt", "chosen", "rejected"))
    has_ids, has_texts = has_all(first, IDS), has_all(first, _NEEDED)
    limits = {"max_length": max_length, "keep_end": keep_end, "max_prompt_length": max_prompt_length}
    if has_all(first, JOINED) and (has_ids or not has_texts):
        plain = tokenize.with_columns(plain, JOINED, where)
        if max_length is None and max_prompt_length is None:
            return plain
        return plain.map(_truncate_pair, fn_kwargs=limits)
    if not has_ids and not has_texts:
        raise ValueError(
            f"{where} must have the columns 'chosen' and 'rejected' (with an optional 'prompt'), or "
            f"{', '.join(IDS)}, got {brief(list(first), 500)}. Rename columns with dataset.rename_column."
        )
    if has_ids:
        plain = tokenize.with_columns(plain, IDS, where)
    else:
        plain = tokenize.with_columns(plain, [name for name in ("prompt", *_NEEDED) if name in first], where)
        arguments = {"tokenizer": tokenizer, "where": where}
        options = tokenize.map_options(plain, num_proc, f"Tokenizing {where}")
        plain = plain.map(tokenize_dpo_row, with_indices=True, fn_kwargs=arguments, **options)
    if not keep_end:
        plain = without_full_prompts(plain, max_length, max_prompt_length, where, num_proc)
    options = tokenize.map_options(plain, num_proc, f"Joining prompts and answers of {where}")
    plain = plain.map(_join_pair, with_indices=True, fn_kwargs=limits | {"where": where}, **options)
    warn_of_rows(plain, JOINED[:2], JOINED[2], where)
    return plain


def tokenize_dpo_row(row: dict[str, Any], index: int, tokenizer: Any, where: str) -> dict[str, list[int]]:
    """Tokenize a row: ids of the prompt, and the ids that each answer adds. `index` and `where` name it in errors."""
    row_name = f"Row {index} of {where}"
    checked_row = read_row(row, _NEEDED, row_name)
    ids = split_at_prompt(*tokenize_with_prompt(checked_row, _NEEDED, tokenizer, row_name))
    return dict(zip(IDS, ids, strict=True))


def _truncate_pair(
    row: dict[str, Any], max_length: int | None, keep_end: bool, max_prompt_length: int | None
) -> dict[str, Any]:
    window = tokenize.kept_tokens(max_length, keep_end)
    chosen = truncate_joined(row, ("chosen_input_ids", "chosen_labels"), window, max_prompt_length)
    return chosen | truncate_joined(row, ("rejected_input_ids", "rejected_labels"), window, max_prompt_length)


def _join_pair(
    row: dict[str, Any],
    index: int,
    max_length: int | None,
    keep_end: bool,
    max_prompt_length: int | None,
    where: str,
) -> dict[str, Any]:
    """Join the prompt with each answer, truncate, and build labels from the answer's ids."""
    row_name, columns = f"Row {index} of {where}", {}
    if max_prompt_length is not None:
        columns["prompt_ids"] = row["prompt_ids"][-max_prompt_length:]
        row = {**row, **columns}
    for side in _NEEDED:
        ids, labels = join_with_prompt(row, f"{side}_ids", tokenize.kept_tokens(max_length, keep_end), row_name)
        columns |= {f"{side}_input_ids": ids, f"{side}_labels": labels}
    return columns


# ORPO and CPO

TEXTS, LABELS = ("chosen_input_ids", "rejected_input_ids"), ("chosen_labels", "rejected_labels")
_SIDES = ("chosen", "rejected")


def prepare_reference_free(
    dataset: Dataset | IterableDataset,
    tokenizer: Any,
    *,
    max_length: int | None,
    max_prompt_length: int | None,
    num_proc: int | None,
    name: str,
) -> Dataset | IterableDataset:
    """Add the columns that ORPO and CPO train on.

    These are TRL's `chosen_input_ids`, `rejected_input_ids`, `chosen_labels`, `rejected_labels` and
    `prompt_input_ids`, built from `chosen`, `rejected` and an optional `prompt`. Labels are the ids of the answers.
    Texts are truncated to `max_length`; rows whose prompt alone is that long are dropped.

    Args:
        max_prompt_length: if prompt and answer exceed `max_length`, only this many last tokens of the prompt are kept;
            None keeps all.
        num_proc: number of processes for tokenization.
        name: "train", "eval", "test", or the dataset's name in errors.

    Raises:
        TypeError, ValueError: the dataset, a column or a row is invalid; a stream raises when it reaches the row.
    """
    where = checks.argument(name)
    plain, first = tokenize.peek(dataset, name, ("prompt", "chosen", "rejected"))
    if has_all(first, (*TEXTS, *LABELS)) and not any(side in first for side in _SIDES):
        return tokenize.with_columns(plain, (*TEXTS, *LABELS), where)  # prepared before
    if not has_all(first, _SIDES):
        columns = brief(list(first), 500)
        raise ValueError(
            f"{where} must have the columns 'chosen' and 'rejected' (with an optional 'prompt'), got {columns}. Rename "
            "columns with dataset.rename_column."
        )
    plain = tokenize.with_columns(plain, [column for column in ("prompt", *_SIDES) if column in first], where)
    options = tokenize.map_options(plain, num_proc, f"Tokenizing {where}")
    arguments = {"tokenizer": tokenizer, "where": where}
    arguments |= {"max_length": max_length, "max_prompt_length": max_prompt_length}
    plain = plain.map(tokenize_reference_free_row, with_indices=True, fn_kwargs=arguments, **options)
    plain = without_full_prompts(plain, max_length, max_prompt_length, where, num_proc, column="prompt_input_ids")
    warn_of_rows(plain, TEXTS, LABELS[0], where)
    return plain


def tokenize_reference_free_row(
    row: dict[str, Any], index: int, tokenizer: Any, where: str, max_length: int | None, max_prompt_length: int | None
) -> dict[str, list[int]]:
    """The columns that `prepare_reference_free` adds to a row; `index` and `where` name it in errors."""
    row_name = f"Row {index} of {where}"
    texts = _rendered(read_row(row, _SIDES, row_name), tokenizer, row_name)
    sides = _split_texts(texts, tokenizer, row_name)
    longest = max(len(answer) for _, answer in sides)
    columns = {}
    for side, (prompt, answer) in zip(_SIDES, sides, strict=True):
        if max_prompt_length is not None and max_length is not None and len(prompt) + longest > max_length:
            prompt = prompt[-max_prompt_length:]
        columns[f"{side}_input_ids"] = (prompt + answer)[:max_length]
        columns[f"{side}_labels"] = ([IGNORED] * len(prompt) + answer)[:max_length]
        columns["prompt_input_ids"] = min(columns.get("prompt_input_ids", prompt), prompt, key=len)
    return columns


def _rendered(row: dict[str, Any], tokenizer: Any, row_name: str) -> list[str]:
    """The prompt as text, and the prompt with each answer."""
    prompt = row["prompt"]
    if isinstance(prompt, str):
        return [prompt, *(prompt + row[side] for side in _SIDES)]
    options = chat.template_options(row, row_name)
    chat.check_template(tokenizer, options, row_name)
    with chat.errors_of_template(row_name):
        conversations = [(prompt, chat.prompt_options(prompt)), *((prompt + row[side], {}) for side in _SIDES)]
        texts = [
            apply_chat_template(tokenizer, messages, tokenize=False, **extra, **options)
            for messages, extra in conversations
        ]
    return [os.path.commonprefix(texts), *texts[1:]]


def _split_texts(texts: list[str], tokenizer: Any, row_name: str) -> list[tuple[list[int], list[int]]]:
    """For each answer, its prompt's tokens and its own tokens.

    Raises:
        ValueError: the prompt is tokenized differently before the two answers.
    """
    prompt, *texts_ids = tokenizer(texts, add_special_tokens=False)["input_ids"]
    sides = []
    for ids in texts_ids:
        is_merged = ids[: len(prompt)] != prompt  # the prompt's last token with the answer
        start = max(len(prompt) - is_merged, 0)
        sides.append((ids[:start], ids[start:]))
    (chosen_prompt, _), (rejected_prompt, _) = sides
    if sum(a != b for a, b in zip(chosen_prompt, rejected_prompt, strict=False)) > 1:
        raise ValueError(
            f"{row_name}: the prompt is tokenized differently before 'chosen' than before 'rejected', by more than its "
            "last token. End the prompt at a token boundary, for example before a space."
        )
    return [(_with_bos(prompt, tokenizer), _with_eos(answer, tokenizer)) for prompt, answer in sides]


def _with_bos(prompt: list[int], tokenizer: Any) -> list[int]:
    bos = tokenizer.bos_token_id
    return prompt if bos is None or prompt[:1] == [bos] else [bos, *prompt]


def _with_eos(answer: list[int], tokenizer: Any) -> list[int]:
    eos = tokenizer.eos_token_id
    return answer if eos is None or answer[-1:] == [eos] else [*answer, eos]


# Shared by DPO and KTO


def has_all(columns: Collection[str], needed: Sequence[str]) -> bool:
    return all(column in columns for column in needed)


def read_row(row: dict[str, Any], answers: Sequence[str], row_name: str) -> dict[str, Any]:
    """Check a row and return only the columns that are used. A missing prompt is extracted from the answers.

    Args:
        answers: the columns of the answers.
        row_name: the row's name in errors.
    """
    row = {column: row[column] for column in ("prompt", *answers, *_OPTIONS) if column in row}
    contents = [column for column in row if column not in _OPTIONS]
    hint = "Write the prompt and the answers either all as text or all as messages."
    chat.check_contents(row, contents, row_name, hint)
    for column in contents:
        chat.check_unicode(row[column], column, row_name)
        checks.check_no_media(row[column], f"{row_name}, column {column!r}")
    if "prompt" not in row:
        row |= extract_prompt(*(row[answer] for answer in answers), row_name)
    return row


def tokenize_with_prompt(row: dict[str, Any], answers: Sequence[str], tokenizer: Any, row_name: str) -> list[list[int]]:
    """Token ids of the prompt, and of the prompt with each answer. EOS is appended unless answers are messages."""
    if isinstance(row["prompt"], str):
        texts = [row["prompt"] + chat.with_eos(row[answer], tokenizer, row_name) for answer in answers]
        return tokenizer(text=[row["prompt"], *texts])["input_ids"]
    options = chat.template_options(row, row_name)
    chat.check_template(tokenizer, options, row_name)
    prompt = row["prompt"]
    rendered = [(prompt, {"add_generation_prompt": True}), *((prompt + row[answer], {}) for answer in answers)]
    with chat.errors_of_template(row_name):
        return [
            apply_chat_template(tokenizer, messages, tokenize=True, return_dict=True, **extra, **options)["input_ids"]
            for messages, extra in rendered
        ]


def split_at_prompt(prompt: list[int], *texts: list[int]) -> list[list[int]]:
    """Split token ids into the prompt and the answers, at the end of the longest common prefix of the prompt and all of
    `texts`."""
    prompt_length = min(common_prefix(prompt, ids) for ids in texts)
    return [prompt[:prompt_length], *(ids[prompt_length:] for ids in texts)]


def extract_prompt(chosen: str | list, rejected: str | list, where: str) -> dict[str, Any]:
    """Split the common prefix off both answers as their prompt, as TRL's `extract_prompt`: in texts that differ, a
    space at its end stays with the answers; if one answer begins with the other, the last message or character does.

    Raises:
        ValueError: the answers are conversations whose first messages differ.
    """
    pairs = zip(chosen, rejected, strict=False)
    prefix_length = next((index for index, (a, b) in enumerate(pairs) if a != b), None)
    if prefix_length is None:
        prefix_length = max(min(len(chosen), len(rejected)) - 1, 0)
    elif prefix_length and chosen[prefix_length - 1] == " ":
        prefix_length -= 1
    if not prefix_length and not isinstance(chosen, str):
        raise ValueError(
            f"{where}: 'chosen' and 'rejected' begin with different messages, so no prompt can be extracted. Add a "
            "'prompt' column."
        )
    return {"prompt": chosen[:prefix_length], "chosen": chosen[prefix_length:], "rejected": rejected[prefix_length:]}


def without_full_prompts(
    dataset: Dataset | IterableDataset,
    max_length: int | None,
    max_prompt_length: int | None,
    where: str,
    num_proc: int | None,
    column: str = "prompt_ids",
) -> Dataset | IterableDataset:
    """Drop rows whose prompt alone has at least `max_length` tokens, and warn.

    Args:
        max_prompt_length: the length to which prompts will be truncated; None if they are not.
        column: column of the prompt's tokens.

    Raises:
        ValueError: all rows of a table would be dropped.
    """
    if max_length is None or (max_prompt_length is not None and max_prompt_length < max_length):
        return dataset
    options = tokenize.map_options(dataset, num_proc, f"Dropping fully truncated rows from {where}")
    remaining = dataset.filter(_has_room, fn_kwargs={"max_length": max_length, "column": column}, **options)
    if isinstance(dataset, IterableDataset) or len(remaining) == len(dataset):
        return remaining
    num_dropped, total = len(dataset) - len(remaining), len(dataset)
    if not len(remaining):
        raise ValueError(
            f"All {total:,} rows of {where} have prompts of at least {max_length:,} tokens, so none is left. Raise "
            "max_length."
        )
    logger.warning(
        f"Dropped {num_dropped:,} of {total:,} rows of {where}: their prompts alone fill max_length={max_length}."
    )
    return remaining


def join_with_prompt(row: dict[str, Any], column: str, window: slice, row_name: str) -> tuple[list[int], list[int]]:
    """Join a row's prompt with the answer in `column` and truncate; returns ids and labels."""
    prompt, answer = row["prompt_ids"], row[column]
    if not prompt and not answer:
        raise checks.cell_error(row_name, column, answer, "at least one token, because the row has no prompt")
    return (prompt + answer)[window], ([IGNORED] * len(prompt) + answer)[window]


def truncate_joined(
    row: dict[str, Any], columns: tuple[str, str], window: slice, max_prompt_length: int | None, fits: int = 0
) -> dict[str, list[int]]:
    """Truncate a text that is already joined with its prompt: `columns` are its ids and its labels.

    Args:
        window: the slice to keep, after the prompt is truncated.
        max_prompt_length: number of last tokens of the prompt that are kept if the text has more than `fits` tokens;
            None keeps all.
    """
    ids, labels = row[columns[0]], row[columns[1]]
    start = 0
    if max_prompt_length is not None and len(ids) > fits:
        prompt_length = next((index for index, label in enumerate(labels) if label != IGNORED), len(labels))
        start = max(prompt_length - max_prompt_length, 0)
    return {column: row[column][start:][window] for column in columns}


def warn_of_rows(dataset: Dataset | IterableDataset, texts: Sequence[str], labels: str, where: str) -> None:
    """Warn about rows of a table without a prompt, and about rows with two equal answers.

    Args:
        texts: the columns of the full texts, one or two.
        labels: the label column of the first one.
    """
    if isinstance(dataset, IterableDataset):
        return
    without_prompt, equal = [], []
    for _, block in checks.blocks(dataset, (*texts, labels)):
        ids = [block.column(text).to_pylist() for text in texts]
        without_prompt += [row[:1] not in ([], [IGNORED]) for row in block.column(labels).to_pylist()]
        equal += [chosen == rejected for chosen, rejected in zip(ids[0], ids[-1], strict=True)]
    warnings = {"have no prompt: the first token of their answers has no context and is not scored": without_prompt}
    if len(texts) == 2:
        warnings["have equal chosen and rejected answers: no preference"] = equal
    for problem, rows in warnings.items():
        if any(rows):
            logger.warning(f"{sum(rows):,} of {len(rows):,} rows of {where} (first: row {rows.index(True)}) {problem}.")


def _has_room(row: dict[str, Any], max_length: int, column: str) -> bool:
    return len(row[column]) < max_length


# Unpairing


def unpair_preference_dataset(dataset: Any, **map_kwargs: Any) -> Any:
    """Split each pair into two rows with `completion` and `label`; in each batch of `map`, chosen answers come first.

    Args:
        dataset: Dataset, DatasetDict or IterableDataset of pairs.
        map_kwargs: passed to the dataset's `map`.
    """
    return dataset.map(_unpaired, batched=True, remove_columns=get_dataset_column_names(dataset), **map_kwargs)


def _unpaired(batch: dict[str, list[Any]]) -> dict[str, list[Any]]:
    pairs = len(batch["chosen"])
    unpaired = {"completion": batch["chosen"] + batch["rejected"], "label": [True] * pairs + [False] * pairs}
    other_columns = {name: values * 2 for name, values in batch.items() if name not in ("chosen", "rejected")}
    return unpaired | other_columns


def get_dataset_column_names(dataset: Dataset | IterableDataset | DatasetDict) -> list[str]:
    """Column names of a dataset; if a stream does not know them, the keys of its first row."""
    if isinstance(dataset, dict):
        dataset = next(iter(dataset.values()))
    return list(next(iter(dataset))) if dataset.column_names is None else dataset.column_names
