"""Pairs of a chosen and a rejected answer to token ids: both as text, or as conversations."""

from __future__ import annotations

from typing import Any, NamedTuple

from trl_jax.core.memory_errors import is_panic
from trl_jax.data.rows import chat
from trl_jax.data.rows.checks import check_no_media
from trl_jax.data.rows.cutting import is_long
from trl_jax.data.rows.templates.rendering import apply_chat_template

_READ = ("prompt", "chosen", "rejected", "tools", "chat_template_kwargs")
_TWICE = "If 'chosen' and 'rejected' already begin with the prompt, drop it: dataset.remove_columns(\"prompt\")."


class Pair(NamedTuple):
    """Both answers, each with the prompt in front.

    options: keyword arguments of the chat template, empty for text. where: the row's name in errors.
    """

    chosen: str | list[dict]
    rejected: str | list[dict]
    options: dict[str, Any]
    where: str


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
    chat.check_contents(row, columns, where, _TWICE)
    chosen, rejected = row["chosen"], row["rejected"]
    options = {}
    if chat.is_messages(chosen):
        options = chat.template_options(row, where)
        chat.check_template(tokenizer, options, where)
    else:
        chosen, rejected = (chat.with_eos(text, tokenizer, where) for text in (chosen, rejected))
    if "prompt" in row:
        chosen, rejected = row["prompt"] + chosen, row["prompt"] + rejected
    for column in columns:
        chat.check_unicode(row[column], column, where)
        check_no_media(row[column], f"{where}, column {column!r}")
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
    with chat.errors_of_template(pair.where):
        return tuple(
            _render_side(side, pair.options, tokenizer, max_characters) for side in (pair.chosen, pair.rejected)
        )


def _render_side(
    messages: list[dict], options: dict[str, Any], tokenizer: Any, max_characters: int | None
) -> list[int]:
    if is_long(messages, max_characters) and chat.ABOUT_TOKENS.isdisjoint(options):
        text = apply_chat_template(tokenizer, messages, tokenize=False, **options)
        return tokenizer(_cut(text, max_characters), add_special_tokens=False)["input_ids"]
    return apply_chat_template(tokenizer, messages, tokenize=True, return_dict=True, **options)["input_ids"]
