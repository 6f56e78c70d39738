"""Prompts and answers to token ids, and joined as a language model scores them: the rows of DPO and KTO."""

from __future__ import annotations

import logging
from collections.abc import Callable, Sequence
from typing import Any

from datasets import Dataset, IterableDataset

from trl_jax.data.example import IGNORED
from trl_jax.data.rows import chat, checks
from trl_jax.data.rows.sft.rows import common_prefix
from trl_jax.data.rows.templates.rendering import apply_chat_template

logger = logging.getLogger(__name__)

_OPTIONS = ("tools", "chat_template_kwargs")

Options = Callable[[str], dict[str, Any]]


def map_options(dataset: Dataset | IterableDataset, where: str, num_proc: int | None) -> Options:
    """From the words of a progress bar to the arguments of `map` and `filter`; those of a stream have none."""

    def options(words: str) -> dict[str, Any]:
        streams = isinstance(dataset, IterableDataset)
        return {} if streams else {"num_proc": num_proc, "desc": f"{words} {where}".replace("_", " ", 1)}

    return options


def read_row(row: dict[str, Any], answers: Sequence[str], place: str) -> dict[str, Any]:
    """The columns of a row that are read, the prompt taken from both answers where it has none.

    Args:
        answers: the columns of the answers.
        place: the row's name in errors.
    """
    row = {column: row[column] for column in ("prompt", *answers, *_OPTIONS) if column in row}
    given = [column for column in row if column not in _OPTIONS]
    chat.check_contents(row, given, place, "Write prompts and answers in the same way.")
    for column in given:
        chat.check_unicode(row[column], column, place)
        checks.check_no_media(row[column], f"{place}, column {column!r}")
    if "prompt" not in row:
        row |= extract_prompt(*(row[answer] for answer in answers), place)
    return row


def tokenised(row: dict[str, Any], answers: Sequence[str], tokenizer: Any, place: str) -> list[list[int]]:
    """The token ids of a row's prompt, and those of it with each answer, which ends with EOS unless it is messages."""
    if isinstance(row["prompt"], str):
        ended = [row["prompt"] + chat.with_eos(row[answer], tokenizer, place) for answer in answers]
        return tokenizer(text=[row["prompt"], *ended])["input_ids"]
    options = chat.template_options(row, place)
    chat.check_template(tokenizer, options, place)
    prompt = row["prompt"]
    rendered = [(prompt, {"add_generation_prompt": True}), *((prompt + row[answer], {}) for answer in answers)]
    with chat.errors_of_template(place):
        return [
            apply_chat_template(tokenizer, messages, tokenize=True, return_dict=True, **extra, **options)["input_ids"]
            for messages, extra in rendered
        ]


def behind_prompt(prompt: list[int], *whole: list[int]) -> list[list[int]]:
    """The ids of the prompt, and those that each answer adds to it.

    An answer begins where its tokens, with the prompt's, differ from the prompt's alone, or before, where another's do.
    """
    alike = min(common_prefix(prompt, ids) for ids in whole)
    return [prompt[:alike], *(ids[alike:] for ids in whole)]


def extract_prompt(chosen: str | list, rejected: str | list, where: str) -> dict[str, Any]:
    """Split what both answers begin with off as their prompt; a text's prompt ends before a space.

    Raises:
        ValueError: conversations that begin with different messages.
    """
    pairs = zip(chosen, rejected, strict=False)
    alike = next((at for at, (one, other) in enumerate(pairs) if one != other), min(len(chosen), len(rejected)))
    if alike == min(len(chosen), len(rejected)):
        alike -= 1  # an answer keeps its last message or character
    if isinstance(chosen, str):
        alike -= alike > 0 and chosen[alike - 1] == " "
    alike = max(alike, 0)
    if not alike and not isinstance(chosen, str):
        raise ValueError(
            f"{where}: 'chosen' and 'rejected' begin with different messages, so there is no prompt. Add a column "
            "'prompt'."
        )
    return {"prompt": chosen[:alike], "chosen": chosen[alike:], "rejected": rejected[alike:]}


def without_full_prompts(
    dataset: Dataset | IterableDataset,
    max_length: int | None,
    max_prompt_length: int | None,
    where: str,
    options: Options,
    column: str = "prompt_ids",
) -> Dataset | IterableDataset:
    """Leave out rows whose prompt alone has `max_length` tokens or more, and say how many these are.

    Args:
        max_prompt_length: how many tokens will stay of a prompt that is too long; None: all.
        column: of the prompts' tokens.

    Raises:
        ValueError: no row of a table is left.
    """
    if max_length is None:
        return dataset
    words = options("Dropping fully truncated rows from")
    if max_prompt_length is not None and max_prompt_length < max_length:
        return dataset
    kept = dataset.filter(_has_room, fn_kwargs={"max_length": max_length, "column": column}, **words)
    if isinstance(dataset, IterableDataset) or len(kept) == len(dataset):
        return kept
    missing, total = len(dataset) - len(kept), len(dataset)
    if not len(kept):
        raise ValueError(
            f"All {total:,} rows of {where} have prompts of {max_length:,} tokens or more: none is left. Raise "
            "max_length."
        )
    logger.warning(
        f"{missing:,} of {total:,} rows of {where} have prompts that fill max_length={max_length}: left out."
    )
    return kept


def joined(row: dict[str, Any], column: str, kept: slice, place: str) -> tuple[list[int], list[int]]:
    """The part of a row's prompt with the answer of this column that is kept, and its labels, the answer's ids."""
    prompt, answer = row["prompt_ids"], row[column]
    if not prompt and not answer:
        raise checks.cell_error(place, column, answer, "a token, as it has no prompt")
    return (prompt + answer)[kept], ([IGNORED] * len(prompt) + answer)[kept]


def shortened(
    row: dict[str, Any], ids: str, labels: str, kept: slice, max_prompt_length: int | None, beyond: int = 0
) -> dict[str, list[int]]:
    """The columns of a text that was joined before, of which a part is kept, and of its prompt the end.

    Args:
        max_prompt_length: tokens of the prompt, where the text has more than `beyond`; None: all.
    """
    start = 0
    if max_prompt_length is not None and len(row[ids]) > beyond:
        prompt = next((at for at, label in enumerate(row[labels]) if label != IGNORED), len(row[labels]))
        start = max(prompt - max_prompt_length, 0)
    return {column: row[column][start:][kept] for column in (ids, labels)}


def warn_of_rows(
    dataset: Dataset | IterableDataset, texts: Sequence[str], labels: str, where: str
) -> Dataset | IterableDataset:
    """Warn, once each, of rows of a table without a prompt, and of those whose two answers are equal.

    Args:
        texts: the columns of whole texts, one or two.
        labels: the column of the first one's labels.

    Returns:
        The same dataset.
    """
    if isinstance(dataset, IterableDataset):
        return dataset
    bare, equal = [], []
    for _, block in checks.blocks(dataset, (*texts, labels)):
        whole = [block.column(text).to_pylist() for text in texts]
        bare += [row[:1] not in ([], [IGNORED]) for row in block.column(labels).to_pylist()]
        equal += [one == other for one, other in zip(whole[0], whole[-1], strict=True)]
    told = {"have no prompt: the first token of their answers has no context, and is not scored": bare}
    if len(texts) == 2:
        told["have equal chosen and rejected answers: no preference"] = equal
    for words, rows in told.items():
        if any(rows):
            logger.warning(f"{sum(rows):,} of {len(rows):,} rows of {where} (first: row {rows.index(True)}) {words}.")
    return dataset


def _has_room(row: dict[str, Any], max_length: int, column: str) -> bool:
    return len(row[column]) < max_length
