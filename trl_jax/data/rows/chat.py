"""Preference rows to token ids: both answers as text, or as conversations with options of the chat template."""

from __future__ import annotations

import json
from typing import Any, NamedTuple

from trl_jax.core.memory_errors import is_panic
from trl_jax.core.printable import printable
from trl_jax.data.rows.checks import cell_error
from trl_jax.data.rows.cutting import is_long
from trl_jax.data.rows.rendering import apply_chat_template
from trl_jax.data.rows.template_limits import ITEM, MAX_CHARACTERS, MAX_WORK, TooLarge

_READ = ("prompt", "chosen", "rejected", "tools", "chat_template_kwargs")
# Arguments of apply_chat_template that a row may pass and that change the tokens, not the text.
_ABOUT_TOKENS = {"padding", "truncation", "max_length", "return_tensors", "tokenizer_kwargs", "sanitize_control_tokens"}
_SHOWN = 2000  # characters of what a template raises
_WANTED = "a string, or a non-empty list of messages, each with a 'role' and a 'content'"


class Pair(NamedTuple):
    """Both answers, each with the prompt in front.

    options: keyword arguments of the chat template, empty for text. where: the row's name in errors.
    """

    chosen: str | list[dict]
    rejected: str | list[dict]
    options: dict[str, Any]
    where: str


def is_messages(value: Any) -> bool:
    """Whether a value is a non-empty list of messages, each with a role."""
    return isinstance(value, list) and bool(value) and isinstance(value[0], dict) and "role" in value[0]


def tokenise_batch(
    batch: Any, indices: list[int], tokenizer: Any, where: str, max_characters: int | None = None
) -> dict[str, list[list[int]]]:
    """Tokenise a block of rows, as `Dataset.map` passes it, to `chosen_ids` and `rejected_ids`.

    Only the ids are returned, so that the user's own columns stay as they are. `indices` and `where` name the rows in
    errors. A text of more than `max_characters` is tokenised only up to there, which is enough to see that it is too
    long.

    Raises:
        ValueError: a row has another form than a text or a conversation with a template, by row and column.
    """
    columns = [column for column in _READ if column in batch]
    cells = zip(*(batch[column] for column in columns), strict=True)
    rows = [dict(zip(columns, row, strict=True)) for row in cells]
    pairs = [read_pair(row, f"Row {i} of {where}", tokenizer) for i, row in zip(indices, rows, strict=True)]
    chosen, rejected = zip(*tokenise(pairs, tokenizer, max_characters), strict=True)
    return {"chosen_ids": list(chosen), "rejected_ids": list(rejected)}


def read_pair(row: dict[str, Any], where: str, tokenizer: Any) -> Pair:
    """Join an explicit prompt to both answers, and end texts with EOS; a template ends conversations itself.

    `where` names the row in errors. EOS is looked for in the answer alone, before the prompt is joined to it.
    """
    columns = [column for column in ("prompt", "chosen", "rejected") if column in row]
    _check_contents(row, columns, where)
    chosen, rejected = row["chosen"], row["rejected"]
    options = {}
    if is_messages(chosen):
        options = _template_options(row, where)
        _check_template(tokenizer, options, where)
    else:
        chosen, rejected = (with_eos(text, tokenizer, where) for text in (chosen, rejected))
    if "prompt" in row:
        chosen, rejected = row["prompt"] + chosen, row["prompt"] + rejected
    for column in columns:
        check_unicode(row[column], column, where)
    return Pair(chosen, rejected, options, where)


def tokenise(pairs: list[Pair], tokenizer: Any, max_characters: int | None = None) -> list[tuple[list[int], list[int]]]:
    """Token ids (chosen, rejected) of each pair; all pairs are texts, or all are conversations.

    Args:
        max_characters: as in `tokenise_batch`.
    """
    if isinstance(pairs[0].chosen, str):
        texts = [_cut(text, max_characters) for pair in pairs for text in (pair.chosen, pair.rejected)]
        ids = _ids(tokenizer, texts, pairs)
        return list(zip(ids[::2], ids[1::2], strict=True))
    return [_render(pair, tokenizer, max_characters) for pair in pairs]


def _ids(tokenizer: Any, texts: list[str], pairs: list[Pair]) -> list[list[int]]:
    """The token ids of the texts, two a pair; where the tokenizer gives up, the error has the pair's row."""
    try:
        return tokenizer(text=texts)["input_ids"]
    except BaseException as error:
        if not is_panic(error):
            raise
        if len(pairs) == 1:
            raise ValueError(f"{pairs[0].where}: the tokenizer cannot read it: {str(error)[:200]}.") from None
    return [ids for i, pair in enumerate(pairs) for ids in _ids(tokenizer, texts[2 * i : 2 * i + 2], [pair])]


def _cut(text: str, max_characters: int | None) -> str:
    return text if max_characters is None else text[: max_characters + 1]


def _render(pair: Pair, tokenizer: Any, max_characters: int | None) -> tuple[list[int], list[int]]:
    sides = (pair.chosen, pair.rejected)
    try:
        return tuple(_render_side(side, pair.options, tokenizer, max_characters) for side in sides)
    except TooLarge as error:
        raise ValueError(
            f"{pair.where}: the tokenizer's chat template makes a text or a number that is too large, or takes too "
            f"many steps: wanted at most {MAX_CHARACTERS:,} characters and {MAX_WORK // ITEM:,} steps. Correct the "
            "template, or leave the row out."
        ) from error
    except Exception as error:  # a template may raise anything; the row's name is added
        error.args = tuple(printable(part[:_SHOWN]) if isinstance(part, str) else part for part in error.args)
        error.add_note(f"{pair.where}: raised by the tokenizer's chat template.")
        raise


def _render_side(
    messages: list[dict], options: dict[str, Any], tokenizer: Any, max_characters: int | None
) -> list[int]:
    if is_long(messages, max_characters) and _ABOUT_TOKENS.isdisjoint(options):
        text = apply_chat_template(tokenizer, messages, tokenize=False, **options)
        return tokenizer(_cut(text, max_characters), add_special_tokens=False)["input_ids"]
    return apply_chat_template(tokenizer, messages, tokenize=True, return_dict=True, **options)["input_ids"]


def with_eos(text: str, tokenizer: Any, where: str) -> str:
    """End a text with the tokenizer's EOS token, unless it ends so already, as TRL does.

    Raises:
        ValueError: the tokenizer has no EOS token; `where` names the row.
    """
    if tokenizer.eos_token is None:
        raise ValueError(
            f"{where} is plain text, which ends with the EOS token, and the tokenizer "
            f"({type(tokenizer).__name__}) has none. Name a token of its vocabulary with "
            "RewardConfig(eos_token=...)."
        )
    return text if text.endswith(tokenizer.eos_token) else text + tokenizer.eos_token


def _template_options(row: dict[str, Any], where: str) -> dict[str, Any]:
    tools = row.get("tools")
    if isinstance(tools, str):
        try:
            tools = json.loads(tools)
        except json.JSONDecodeError as error:
            raise cell_error(where, "tools", tools, "a list, or a list in JSON") from error
    options = row.get("chat_template_kwargs")
    if not isinstance(options, dict | None):
        raise cell_error(where, "chat_template_kwargs", options, "a dict")
    return {"tools": tools, **(options or {})}


def _check_contents(row: dict[str, Any], columns: list[str], where: str) -> None:
    for column in columns:
        if not isinstance(row[column], str) and not is_messages(row[column]):
            raise cell_error(where, column, row[column], _WANTED)
    kinds = {column: "a conversation" if is_messages(row[column]) else "text" for column in columns}
    if len(set(kinds.values())) > 1:
        found = ", ".join(f"{column!r} is {kind}" for column, kind in kinds.items())
        raise ValueError(
            f"{where}: {found}; they must be the same. If 'chosen' and 'rejected' already begin with the "
            'prompt, drop it: dataset.remove_columns("prompt").'
        )


def check_unicode(found: Any, column: str, where: str) -> None:
    """Raise ValueError for a lone surrogate (half a UTF-16 pair, from broken JSON escapes), which no tokenizer
    takes."""
    texts = [found] if isinstance(found, str) else [value for message in found for value in message.values()]
    for text in texts:
        try:
            str(text).encode()
        except UnicodeEncodeError as error:
            shown = ascii(text[max(0, error.start - 20) : error.start + 1])
            raise ValueError(
                f"{where}, column {column!r}: character {error.start:,} is half of one, at the end of {shown}, wanted "
                'Unicode text. Drop such halves: text.encode(errors="ignore").decode().'
            ) from error


def _check_template(tokenizer: Any, options: dict[str, Any], where: str) -> None:
    if tokenizer.chat_template is None and "chat_template" not in options:
        raise ValueError(
            f"{where} is a conversation and the tokenizer ({type(tokenizer).__name__}) has no chat template. "
            'Pass one with RewardConfig(chat_template_path="template.jinja"), or set tokenizer.chat_template.'
        )
