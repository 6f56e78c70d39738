"""Prepare preference datasets for ORPO and CPO: each answer behind its prompt, as TRL's trainers of pairs without a
reference tokenise them.

Conversations are rendered as text first, and no token is added but these: BOS before a prompt, EOS behind an answer,
each where the tokenizer has one and it is not there.
"""

from __future__ import annotations

import os
from typing import Any

from datasets import Dataset, IterableDataset

from trl_jax.core.printable import brief
from trl_jax.data.example import IGNORED
from trl_jax.data.rows import chat, checks, streaming
from trl_jax.data.rows.preference import answers
from trl_jax.data.rows.templates.rendering import apply_chat_template

TEXTS, LABELS = ("chosen_input_ids", "rejected_input_ids"), ("chosen_labels", "rejected_labels")
_SIDES = ("chosen", "rejected")


def prepare(
    dataset: Dataset | IterableDataset,
    tokenizer: Any,
    *,
    max_length: int | None,
    max_prompt_length: int | None,
    num_proc: int | None,
    name: str,
) -> Dataset | IterableDataset:
    """Add TRL's `chosen_input_ids`, `rejected_input_ids`, `chosen_labels`, `rejected_labels` and `prompt_input_ids` to
    rows of `chosen` and `rejected`, with or without `prompt`. Labels are the ids of the answers.

    Texts lose what is beyond `max_length`; rows whose prompt alone is as long are left out.

    Args:
        max_prompt_length: how many of a prompt's last tokens stay where it is too long with an answer; None: all.
        num_proc: processes that tokenise.
        name: "train", "eval", "test", or the dataset's name in errors.

    Raises:
        TypeError, ValueError: the dataset, a column or a row cannot be trained on; a stream raises when it reaches the
            row.
    """
    where = checks.argument(name)
    plain, first = streaming.opened(dataset, name, ("prompt", "chosen", "rejected"))
    if all(column in first for column in (*TEXTS, *LABELS)) and not any(side in first for side in _SIDES):
        return streaming.with_columns(plain, (*TEXTS, *LABELS), where)  # prepared before
    if not all(side in first for side in _SIDES):
        found = brief(list(first), 500)
        raise ValueError(f"{where} needs the columns 'chosen' and 'rejected', and maybe 'prompt'; found {found}.")
    plain = streaming.with_columns(plain, [column for column in ("prompt", *_SIDES) if column in first], where)
    options = answers.map_options(plain, where, num_proc)
    facts = {"tokenizer": tokenizer, "where": where, "most": max_length, "most_of_prompt": max_prompt_length}
    plain = plain.map(tokenise_row, with_indices=True, fn_kwargs=facts, **options("Tokenizing"))
    prompts = "prompt_input_ids"
    plain = answers.without_full_prompts(plain, max_length, max_prompt_length, where, options, column=prompts)
    return answers.warn_of_rows(plain, TEXTS, LABELS[0], where)


def tokenise_row(
    row: dict[str, Any], index: int, tokenizer: Any, where: str, most: int | None, most_of_prompt: int | None
) -> dict[str, list[int]]:
    """The columns that `prepare` adds to a row; `index` and `where` name it in errors."""
    place = f"Row {index} of {where}"
    texts = _rendered(answers.read_row(row, _SIDES, place), tokenizer, place)
    sides = _behind_prompt(texts, tokenizer, place)
    longest = max(len(answer) for _, answer in sides)
    columns = {}
    for side, (prompt, answer) in zip(_SIDES, sides, strict=True):
        if most_of_prompt is not None and most is not None and len(prompt) + longest > most:
            prompt = prompt[-most_of_prompt:]
        columns[f"{side}_input_ids"] = (prompt + answer)[:most]
        columns[f"{side}_labels"] = ([IGNORED] * len(prompt) + answer)[:most]
        columns["prompt_input_ids"] = min(columns.get("prompt_input_ids", prompt), prompt, key=len)
    return columns


def _rendered(row: dict[str, Any], tokenizer: Any, place: str) -> list[str]:
    """The texts of a row's prompt and of it with each answer."""
    prompt = row["prompt"]
    if isinstance(prompt, str):
        return [prompt, *(prompt + row[side] for side in _SIDES)]
    options = chat.template_options(row, place)
    chat.check_template(tokenizer, options, place)
    with chat.errors_of_template(place):
        texts = [
            apply_chat_template(tokenizer, messages, tokenize=False, **extra, **options)
            for messages, extra in [(prompt, chat.opening(prompt)), *((prompt + row[side], {}) for side in _SIDES)]
        ]
    return [os.path.commonprefix(texts), *texts[1:]]


def _behind_prompt(texts: list[str], tokenizer: Any, place: str) -> list[tuple[list[int], list[int]]]:
    """For each answer the tokens of its prompt and its own.

    Raises:
        ValueError: the prompt's tokens are others before one answer than before the other.
    """
    alone, *whole = tokenizer(texts, add_special_tokens=False)["input_ids"]
    sides = []
    for ids in whole:
        start = len(alone) - (ids[: len(alone)] != alone)  # its last token may have become one with the answer's first
        start = max(start, 0)
        sides.append((ids[:start], ids[start:]))
    (one, _), (other, _) = sides
    if sum(a != b for a, b in zip(one, other, strict=False)) > 1:
        raise ValueError(
            f"{place}: the tokens of the prompt are others before 'chosen' than before 'rejected', by more than the "
            "last one. Let the prompt end where a token ends, as before a space."
        )
    return [(_begun(prompt, tokenizer), _ended(answer, tokenizer)) for prompt, answer in sides]


def _begun(prompt: list[int], tokenizer: Any) -> list[int]:
    bos = tokenizer.bos_token_id
    return prompt if bos is None or prompt[:1] == [bos] else [bos, *prompt]


def _ended(answer: list[int], tokenizer: Any) -> list[int]:
    eos = tokenizer.eos_token_id
    return answer if eos is None or answer[-1:] == [eos] else [*answer, eos]
