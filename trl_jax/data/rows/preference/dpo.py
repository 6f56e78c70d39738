"""Prepare preference datasets for direct preference optimisation: a prompt's tokens, and those of two answers."""

from __future__ import annotations

import logging
from typing import Any

from datasets import Dataset, IterableDataset

from trl_jax.core.printable import brief
from trl_jax.data.example import IGNORED
from trl_jax.data.rows import chat, checks, streaming
from trl_jax.data.rows.sft.rows import common_prefix
from trl_jax.data.rows.templates.rendering import apply_chat_template

logger = logging.getLogger(__name__)

IDS = ("prompt_ids", "chosen_ids", "rejected_ids")
JOINED = ("chosen_input_ids", "rejected_input_ids", "chosen_labels", "rejected_labels")
_NEEDED = ("chosen", "rejected")
_READ = ("prompt", *_NEEDED, "tools", "chat_template_kwargs")
_TWICE = "Write the prompt and both answers in the same way."


def prepare(
    dataset: Dataset | IterableDataset,
    tokenizer: Any,
    *,
    max_length: int | None,
    keep_end: bool,
    num_proc: int | None,
    name: str,
) -> Dataset | IterableDataset:
    """Add TRL's `prompt_ids`, `chosen_ids` and `rejected_ids` to the dataset's own columns, and what a step reads:
    `chosen_input_ids` and `rejected_input_ids`, the prompt with each answer, cut to `max_length`, and their labels.

    Rows that have the three columns already are not tokenised. Rows with ids and labels of both texts, which early
    releases of TRL prepared, are only cut. Unless `keep_end`, rows whose prompt alone has
    `max_length` tokens or more are left out.

    Args:
        keep_end: cut at the beginning, and not at the end.
        num_proc: processes that tokenise.
        name: "train", "eval", "test", or the dataset's name in errors, such as "eval_dataset['key']".

    Raises:
        TypeError, ValueError: the dataset, a column or a row cannot be trained on; a stream raises when it reaches the
            row.
    """
    where = checks.argument(name)
    plain, first = streaming.opened(dataset, name)
    streams = isinstance(plain, IterableDataset)
    part = _part(max_length, keep_end)
    if all(column in first for column in JOINED):
        plain = streaming.with_columns(plain, JOINED, where)
        return plain if max_length is None else plain.map(_cut, fn_kwargs={"part": (part.start, part.stop)})
    tokenised = all(column in first for column in IDS)
    if not tokenised and not all(column in first for column in _NEEDED):
        raise ValueError(
            f"{where} needs the columns 'chosen' and 'rejected', and maybe 'prompt', or {', '.join(IDS)}; found "
            f"{brief(list(first), 500)}."
        )

    plain = streaming.with_columns(plain, IDS if tokenised else [name for name in _READ[:3] if name in first], where)

    def options(words: str) -> dict[str, Any]:
        return {} if streams else {"num_proc": num_proc, "desc": f"{words} {where}".replace("_", " ", 1)}

    if not tokenised:
        facts = {"tokenizer": tokenizer, "where": where}
        plain = plain.map(tokenise_row, with_indices=True, fn_kwargs=facts, **options("Tokenizing"))
    if max_length is not None and not keep_end:
        facts = {"max_length": max_length}
        kept = plain.filter(_has_room, fn_kwargs=facts, **options("Dropping fully truncated rows from"))
        if not streams:
            _tell_dropped(len(plain) - len(kept), len(plain), where, max_length)
        plain = kept
    facts = {"part": (part.start, part.stop), "where": where}
    return plain.map(_joined, with_indices=True, fn_kwargs=facts, **options("Joining prompts and answers of"))


def _tell_dropped(missing: int, total: int, where: str, max_length: int) -> None:
    if missing == total:
        raise ValueError(
            f"All {total:,} rows of {where} have prompts of {max_length:,} tokens or more: none is left. Raise "
            "max_length."
        )
    if missing:
        logger.warning(
            f"{missing:,} of {total:,} rows of {where} have prompts that fill max_length={max_length}: left out."
        )


def tokenise_row(row: dict[str, Any], index: int, tokenizer: Any, where: str) -> dict[str, list[int]]:
    """The token ids of a row's prompt and of what both answers add to it.

    An answer begins where its tokens, with the prompt's, differ from the prompt's alone, or before, where the other's
    do. `index` and `where` name the row in errors.
    """
    place = f"Row {index} of {where}"
    row = {column: row[column] for column in _READ if column in row}
    given = [column for column in _READ[:3] if column in row]
    chat.check_contents(row, given, place, _TWICE)
    for column in given:
        chat.check_unicode(row[column], column, place)
    if "prompt" not in row:
        row |= extract_prompt(row["chosen"], row["rejected"], place)
    if not isinstance(row["chosen"], str):
        prompt, chosen, rejected = _conversation(row, tokenizer, place)
    else:
        answers = [row["prompt"] + chat.with_eos(row[side], tokenizer, place) for side in _NEEDED]
        prompt, chosen, rejected = tokenizer(text=[row["prompt"], *answers])["input_ids"]
    alike = min(common_prefix(prompt, chosen), common_prefix(prompt, rejected))
    return {"prompt_ids": prompt[:alike], "chosen_ids": chosen[alike:], "rejected_ids": rejected[alike:]}


def _conversation(row: dict[str, Any], tokenizer: Any, where: str) -> list[list[int]]:
    options = chat.template_options(row, where)
    chat.check_template(tokenizer, options, where)
    prompt = row["prompt"]
    rendered = [(prompt, {"add_generation_prompt": True}), *((prompt + row[side], {}) for side in _NEEDED)]
    with chat.errors_of_template(where):
        return [
            apply_chat_template(tokenizer, messages, tokenize=True, return_dict=True, **extra, **options)["input_ids"]
            for messages, extra in rendered
        ]


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


def _has_room(row: dict[str, Any], max_length: int) -> bool:
    return len(row["prompt_ids"]) < max_length


def _part(max_length: int | None, keep_end: bool) -> slice:
    """The part of a text that is kept: its first or last `max_length` tokens, or all."""
    if max_length is None:
        return slice(None)
    return slice(-max_length, None) if keep_end else slice(max_length)


def _cut(row: dict[str, Any], part: tuple[int | None, int | None]) -> dict[str, Any]:
    return {column: row[column][slice(*part)] for column in JOINED}


def _joined(row: dict[str, Any], index: int, part: tuple[int | None, int | None], where: str) -> dict[str, Any]:
    """The part of the prompt with each answer that is kept, and labels, which are the answer's ids."""
    joined: dict[str, list[int]] = {}
    for side in _NEEDED:
        prompt, answer = row["prompt_ids"], row[f"{side}_ids"]
        if not prompt and not answer:
            raise checks.cell_error(f"Row {index} of {where}", f"{side}_ids", answer, "a token, as it has no prompt")
        joined[f"{side}_input_ids"] = (prompt + answer)[slice(*part)]
        joined[f"{side}_labels"] = ([IGNORED] * len(prompt) + answer)[slice(*part)]
    return joined
