"""Rows of supervised fine-tuning to token ids and labels: texts, conversations, prompts with completions, token ids."""

from __future__ import annotations

import logging
from collections.abc import Callable
from functools import cache
from itertools import pairwise, takewhile
from typing import Any, NamedTuple

import numpy as np
import pyarrow as pa

from trl_jax.core.printable import printable
from trl_jax.data.example import IGNORED
from trl_jax.data.rows import chat, checks, masks
from trl_jax.data.rows.sft.row_format import Masking, RowFormat
from trl_jax.data.rows.streaming import check_has

logger = logging.getLogger(__name__)

_MIXED = "Write the prompt and the completion in the same way."


class _Talk(NamedTuple):
    """A conversation, its keyword arguments of the chat template, and the row's name in errors."""

    messages: list[dict[str, Any]]
    options: dict[str, Any]
    where: str


def tokenise_batch(
    batch: Any,
    indices: list[int],
    tokenizer: Any,
    row_format: RowFormat,
    masking: Masking,
    max_length: int | None,
    keep_end: bool,
    where: str,
) -> dict[str, Any]:
    """Make `input_ids` and `labels` of a block of rows, as `Dataset.map` passes it, of at most `max_length` tokens.

    Only these are returned, so that the user's own columns stay as they are. `indices` and `where` name the rows in
    errors.

    Raises:
        ValueError: a row has another form, by row and column.
        RuntimeError: the assistant says nothing in a row, and only what it says is trained on.
    """
    check_has(batch, indices[0], row_format.needed, where)
    if row_format.kind == "ids":
        ids, labels = _given(batch, indices[0], row_format, max_length, where)
    else:
        cells = zip(*(batch[column] for column in batch), strict=True)
        rows = [dict(zip(batch, row, strict=True)) for row in cells]
        read = _READERS[row_format.kind]
        ids, labels = read(rows, [f"Row {i} of {where}" for i in indices], tokenizer, row_format, masking)
    if max_length is None:
        return {"input_ids": ids, "labels": labels}
    part = slice(-max_length, None) if keep_end else slice(max_length)
    return {"input_ids": [row[part] for row in ids], "labels": [row[part] for row in labels]}


def _given(batch: Any, first: int, row_format: RowFormat, max_length: int | None, where: str) -> tuple[list, list]:
    """Ids of rows that have them, and their labels, or labels by their masks."""
    others = row_format.masks or (("labels",) if "labels" in batch else ())
    block = _table(batch, ("input_ids", *others), first, where)
    lists = checks.id_lists(block, "input_ids", first, where)
    lengths = lists.value_lengths().to_numpy(zero_copy_only=False)
    labels = lists.flatten().to_numpy(zero_copy_only=False).astype(np.int64)
    for column in row_format.masks:
        labels[~masks.kept(block, first, column, lengths, "of 'input_ids'", where)] = IGNORED
    if others == ("labels",):
        labels = _labels_beside(block, lengths, first, where)
    if "seq_lengths" in batch:
        _check_documents(batch["seq_lengths"], lengths, max_length, first, where)
    values, ends = labels.tolist(), np.cumsum(lengths).tolist()
    return batch["input_ids"], [values[start:end] for start, end in pairwise([0, *ends])]


def _labels_beside(block: pa.Table, lengths: np.ndarray, first: int, where: str) -> np.ndarray:
    """The labels of a block laid end to end, `[tokens]`; `lengths` are those of the ids: `[rows]`."""
    lists = checks.id_lists(block, "labels", first, where)
    found = lists.value_lengths().to_numpy(zero_copy_only=False)
    if (found != lengths).any():
        row = int(np.argmax(found != lengths))
        raise ValueError(
            f"Row {first + row} of {where}, column 'labels': found {found[row]:,} values, wanted {lengths[row]:,}, one "
            "for each token of 'input_ids': its id, or -100 where it is no target."
        )
    return lists.flatten().to_numpy(zero_copy_only=False)


def _check_documents(
    documents: list[list[int]], lengths: np.ndarray, max_length: int | None, first: int, where: str
) -> None:
    """Raise ValueError for a packed row whose documents are not all of its tokens, or that is too long."""
    for row, (tokens, found) in enumerate(zip(lengths.tolist(), documents, strict=True), start=first):
        if not isinstance(found, list) or sum(found) != tokens or min(found) < 1:
            wanted = f"the tokens of each document of the row, {tokens:,} together"
            raise checks.cell_error(f"Row {row} of {where}", "seq_lengths", found, wanted)
        if max_length is not None and tokens > max_length:
            raise ValueError(
                f"Row {row} of {where} is packed already (it has 'seq_lengths') and has {tokens:,} tokens, "
                f"max_length={max_length}. Pack the rows to that length, or pass max_length={tokens}."
            )


def _table(batch: Any, columns: tuple[str, ...], first: int, where: str) -> pa.Table:
    try:
        return pa.table({column: pa.array(batch[column]) for column in columns})
    except (pa.ArrowInvalid, pa.ArrowTypeError, OverflowError) as error:
        raise ValueError(f"Rows from {first} of {where}, columns {list(columns)}: {printable(str(error))}") from error


def _of_texts(rows: list[dict], places: list[str], tokenizer: Any, row_format: RowFormat, _: Masking) -> tuple:
    texts = []
    for row, where in zip(rows, places, strict=True):
        column = row_format.column
        if row_format.formatting_func:
            text, column = _formatted(row, row_format.formatting_func), "formatting_func(row)"
        else:
            text = row[column]
        if not isinstance(text, str):
            raise checks.cell_error(where, column, text, "a string")
        chat.check_unicode(text, column, where)
        texts.append(chat.with_eos(text, tokenizer, where))
    ids = tokenizer(text=texts)["input_ids"]
    return ids, ids


def _formatted(row: dict[str, Any], formatting_func: Callable[[dict[str, Any]], Any]) -> Any:
    """The text that a script makes of a row. A function that makes a list, or fails on a row, may be one of earlier
    TRL's, which gave it a batch, a dict of columns, and took a text for each row of it."""
    try:
        text = formatting_func(row)
    except (IndexError, KeyError, TypeError):
        text = _of_batch(row, formatting_func)
        if not isinstance(text, str):
            raise
    return _of_batch(row, formatting_func) if isinstance(text, list) else text


def _of_batch(row: dict[str, Any], formatting_func: Callable[[dict[str, Any]], Any]) -> Any:
    """The one text that the function makes of a batch of this row alone; else whatever it makes."""
    _tell_of_batches()
    texts = formatting_func({column: [cell] for column, cell in row.items()})
    return texts[0] if isinstance(texts, list) and len(texts) == 1 else texts


@cache
def _tell_of_batches() -> None:
    logger.warning(
        "formatting_func makes a list, or fails on a row, as functions for batches of earlier TRL do: it is given a "
        "batch of one row at a time. Today's takes a row and returns its text."
    )


def _of_messages(rows: list[dict], places: list[str], tokenizer: Any, row_format: RowFormat, masking: Masking) -> tuple:
    talks = []
    for row, where in zip(rows, places, strict=True):
        messages = row[row_format.kind]
        if row_format.kind == "conversations":
            messages = _as_messages(messages, where)
        if not chat.is_messages(messages):
            wanted = "a non-empty list of messages, each with a 'role'"
            raise checks.cell_error(where, row_format.kind, messages, wanted)
        chat.check_unicode(messages, row_format.kind, where)
        checks.check_no_media(messages, f"{where}, column {row_format.kind!r}")
        talks.append(_Talk(messages, _options(row, tokenizer, masking, where), where))
    ids, said = _tokenise(talks, tokenizer, masking.assistant)
    return ids, [_labels(*both) for both in zip(ids, *said, strict=True)]


def _as_messages(conversation: Any, where: str) -> list[dict[str, Any]]:
    """Messages of a conversation in the form of ShareGPT: `from` and `value` become `role` and `content`."""
    names = {"from": "role", "value": "content"}
    if not isinstance(conversation, list) or not all(isinstance(message, dict) for message in conversation):
        raise checks.cell_error(where, "conversations", conversation, "a list of messages with 'from' and 'value'")
    return [{names.get(key, key): value for key, value in message.items()} for message in conversation]


def _of_completions(
    rows: list[dict], places: list[str], tokenizer: Any, row_format: RowFormat, masking: Masking
) -> tuple:
    for row, where in zip(rows, places, strict=True):
        chat.check_contents(row, ["prompt", "completion"], where, _MIXED)
        for column in ("prompt", "completion"):
            chat.check_unicode(row[column], column, where)
            checks.check_no_media(row[column], f"{where}, column {column!r}")
        if chat.is_messages(row["prompt"]) != row_format.conversational:
            found, first = ("text", "a conversation") if row_format.conversational else ("a conversation", "text")
            raise ValueError(f"{where} is {found}, and the first row is {first}. Make all rows the same.")
    return (_conversations if row_format.conversational else _joined)(rows, places, tokenizer, masking)


def _joined(rows: list[dict], places: list[str], tokenizer: Any, masking: Masking) -> tuple[list, list]:
    """Texts: the completion, ended with EOS, behind the prompt."""
    ended = [chat.with_eos(row["completion"], tokenizer, where) for row, where in zip(rows, places, strict=True)]
    ids = tokenizer(text=[row["prompt"] + text for row, text in zip(rows, ended, strict=True)])["input_ids"]
    if not masking.completion:
        return ids, ids
    prompts = tokenizer(text=[row["prompt"] for row in rows])["input_ids"]
    behind = [_behind(prompt, whole) for prompt, whole in zip(prompts, ids, strict=True)]
    return ids, [_labels(whole, mask) for whole, mask in zip(ids, behind, strict=True)]


def _conversations(rows: list[dict], places: list[str], tokenizer: Any, masking: Masking) -> tuple[list, list]:
    """Messages: the completion's behind the prompt's."""
    options = [_options(row, tokenizer, masking, where) for row, where in zip(rows, places, strict=True)]
    whole = [row["prompt"] + row["completion"] for row in rows]
    ids, found = _tokenise(list(map(_Talk, whole, options, places)), tokenizer, masking.assistant)
    if masking.completion:
        asked = [row["prompt"] for row in rows]
        prompts, _ = _tokenise(list(map(_Talk, asked, options, places)), tokenizer, add_generation_prompt=True)
        found = [*found, list(map(_behind, prompts, ids))]
    return ids, [_labels(*all_) for all_ in zip(ids, *found, strict=True)]


def _options(row: dict[str, Any], tokenizer: Any, masking: Masking, where: str) -> dict[str, Any]:
    options = chat.template_options(row, where)
    if masking.chat_template is not None:
        return {"chat_template": masking.chat_template, **options}
    chat.check_template(tokenizer, options, where)
    return options


def _tokenise(
    talks: list[_Talk], tokenizer: Any, assistant: bool = False, **options: Any
) -> tuple[list[list[int]], list[list[list[int]]]]:
    """The ids of conversations and, in a list for that, the masks of what the assistant says, if they are asked for.

    Without masks, texts are rendered one by one and tokenised together, which is faster.
    """
    if not assistant and all(chat.ABOUT_TOKENS.isdisjoint(talk.options) for talk in talks):
        texts = [_render(talk, tokenizer, tokenize=False, **options) for talk in talks]
        return tokenizer(text=texts, add_special_tokens=False)["input_ids"], []
    options |= {"tokenize": True, "return_dict": True, "return_assistant_tokens_mask": assistant}
    rendered = [_render(talk, tokenizer, **options) for talk in talks]
    ids = [one["input_ids"] for one in rendered]
    return ids, [[_said(one, talk.where) for one, talk in zip(rendered, talks, strict=True)]] if assistant else []


def _render(talk: _Talk, tokenizer: Any, **options: Any) -> Any:
    return chat.rendered(tokenizer, talk.messages, talk.where, **options, **talk.options)


def _said(rendered: dict[str, list[int]], where: str) -> list[int]:
    """The mask of what the assistant says."""
    if 1 not in rendered["assistant_masks"]:
        raise RuntimeError(
            "You're using `assistant_only_loss=True`, but at least one example has no assistant tokens. This usually "
            "means the tokenizer's chat template doesn't generate assistant masks: it may be missing the "
            f"`{{% generation %}}` keyword. {where} is such an example: correct the template, or leave out rows in "
            "which the assistant says nothing."
        )
    return rendered["assistant_masks"]


def _behind(prompt: list[int], whole: list[int]) -> list[int]:
    """The mask of what is behind the prompt: 0 as far as both begin alike."""
    alike = common_prefix(prompt, whole)
    return [0] * alike + [1] * (len(whole) - alike)


def common_prefix(prompt: list[int], whole: list[int]) -> int:
    """How many tokens a prompt, and it with an answer, begin alike with; warns where these are not the whole prompt."""
    alike = sum(1 for _ in takewhile(lambda pair: pair[0] == pair[1], zip(prompt, whole, strict=False)))
    if alike < len(prompt):
        warn_of_prefix()
    return alike


@cache
def warn_of_prefix() -> None:
    """Warn once in a process, by the cache."""
    logger.warning(
        "The tokenized prompt is not a prefix of the tokenized prompt+completion: the chat template renders the prompt "
        "in another way when it is alone, or tokens merge where the two meet. The completion begins where they differ, "
        "so the model is trained on another end of the prompt than it will read. Let the prompt end where a token "
        "ends, or choose a template that renders it the same. Other rows like it are not reported."
    )


def _labels(ids: list[int], *found: list[int]) -> list[int]:
    """The ids where all masks are 1, and -100 elsewhere."""
    if not found:
        return ids
    return [token if all(bits) else IGNORED for token, *bits in zip(ids, *found, strict=True)]


_READERS = {
    "text": _of_texts,
    "messages": _of_messages,
    "conversations": _of_messages,
    "completion": _of_completions,
}
