"""Rows of GKD: conversations as token ids, with labels for the last message, as TRL's DataCollatorForChatML."""

from __future__ import annotations

from typing import Any

from datasets import Dataset, IterableDataset

from trl_jax.core.text import brief
from trl_jax.data import chat, checks, tokenize
from trl_jax.data.batch import IGNORED
from trl_jax.data.checks import cell_error

_LONGEST = 1024  # without a max_length, if the tokenizer names no smaller one
_PROMPTS = ("prompt", "original_prompt_text")


def prepare(
    dataset: Dataset | IterableDataset, tokenizer: Any, *, max_length: int | None, num_proc: int | None, name: str
) -> Dataset | IterableDataset:
    """Add `input_ids` and `labels`, which are -100 for the tokens of the prompt.

    A row has `messages`, the last of which is the completion; a text `prompt` may replace the messages before it. Or it
    has `input_ids` with `labels`, a `completion_mask`, or the text `prompt` that they begin with. No row is dropped:
    longer conversations keep their last `max_length` tokens.

    Args:
        max_length: None is the tokenizer's `model_max_length`, at most 1024.
        num_proc, name: see `Task.prepare`.

    Raises:
        TypeError, ValueError: a row cannot be trained on, or has no token of its prompt left to complete. A stream
            raises when it reaches the row.
    """
    plain, first = tokenize.opened(dataset, name, ("messages",))
    where, streams = checks.argument(name), isinstance(plain, IterableDataset)
    if "messages" not in first and "input_ids" not in first:
        raise ValueError(
            f"{where} must have the column 'messages', or 'input_ids' with a 'completion_mask' or a 'prompt', got "
            f"{brief(list(first), 500)}. Put the prompt and the completion into one list of messages."
        )
    if max_length is None:
        max_length = min(tokenizer.model_max_length, _LONGEST)
    facts = {"tokenizer": tokenizer, "max_length": max_length, "where": where}
    options = {} if streams else {"num_proc": num_proc, "desc": f"Tokenizing {where.replace('_', ' ', 1)}"}
    return plain.map(example_of, with_indices=True, fn_kwargs=facts, **options)


def example_of(row: dict[str, Any], index: int, tokenizer: Any, max_length: int, where: str) -> dict[str, list[int]]:
    """`input_ids` and `labels` of one row; `where` names the dataset."""
    place = f"Row {index} of {where}"
    given = row.get("input_ids") is not None
    ids, start = (_given if given else _rendered)(row, tokenizer, place)
    if not given and len(ids) > max_length:
        ids, start = ids[-max_length:], start - (len(ids) - max_length)
    if start <= 0:
        raise ValueError(
            f"{place} has no prompt tokens left after truncation to max_length={max_length}. This happens when the "
            "completion alone fills the whole window, so the prompt is entirely dropped, leaving nothing to generate "
            "from. Increase `max_length`."
        )
    return {"input_ids": ids, "labels": [IGNORED] * start + ids[start:]}


def _rendered(row: dict[str, Any], tokenizer: Any, place: str) -> tuple[list[int], int]:
    """The ids of a conversation, and where its completion begins."""
    messages = row["messages"]
    if not chat.is_messages(messages):
        raise cell_error(place, "messages", messages, "messages, each a dict with role and content")
    chat.check_unicode(messages, "messages", place)
    chat.check_template(tokenizer, {}, place)
    text = chat.rendered(tokenizer, messages, place, tokenize=False)
    prompt = _prompt(row, tokenizer, place)
    if not _is_byte_level(tokenizer):
        return _ids(tokenizer, text), len(_ids(tokenizer, prompt))
    encoded = tokenizer(text, add_special_tokens=False, return_offsets_mapping=True)
    ids, length = encoded["input_ids"], len(prompt.encode())
    for number, begins in enumerate(_first_bytes(text, encoded["offset_mapping"])):
        if begins >= length:
            return ids, number
    return ids, len(ids)


def _given(row: dict[str, Any], tokenizer: Any, place: str) -> tuple[list[int], int]:
    """The ids of a row that has them, and where its completion begins."""
    ids, mask, labels = row["input_ids"], row.get("completion_mask"), row.get("labels")
    if not isinstance(ids, list) or not ids:
        raise cell_error(place, "input_ids", ids, "a list of at least one token id")
    if 0 in (row.get("attention_mask") or ()):
        raise cell_error(place, "attention_mask", row["attention_mask"], "1 for every token: leave padding out")
    if labels is not None:  # of a row that was prepared before
        start = next((number for number, label in enumerate(labels) if label != IGNORED), len(ids))
        if labels[start:] != ids[start:]:
            raise cell_error(place, "labels", labels, f"{IGNORED} for the prompt, then the ids of the completion")
        return ids, start
    if mask is not None:
        if len(mask) != len(ids):
            raise cell_error(place, "completion_mask", mask, f"{len(ids):,} values, one per token of 'input_ids'")
        return ids, mask.index(1) if 1 in mask else len(ids)
    prompt = _ids(tokenizer, _prompt(row, tokenizer, place))[: len(ids)]
    if prompt != ids[: len(prompt)]:
        raise ValueError(
            f"{place}: 'input_ids' does not begin with the tokens of its prompt, so it is not known where the "
            "completion begins. Add a column 'completion_mask', 1 for each token of the completion."
        )
    return ids, len(prompt)


def _prompt(row: dict[str, Any], tokenizer: Any, place: str) -> str:
    """The text of the prompt."""
    for column in _PROMPTS:
        if row.get(column) is not None:
            if not isinstance(row[column], str):
                valid = "the text of the prompt. For a conversation, put all of it into 'messages' and leave this out"
                raise cell_error(place, column, row[column], valid)
            return row[column]
    messages = row.get("messages")
    if not messages:
        raise ValueError(f"{place} has 'input_ids' and neither a completion_mask, a prompt nor messages. Add one.")
    if len(messages) < 2:
        raise cell_error(place, "messages", messages, "a prompt of at least one message, and the completion")
    chat.check_template(tokenizer, {}, place)
    return chat.rendered(tokenizer, messages[:-1], place, add_generation_prompt=True, tokenize=False)


def _ids(tokenizer: Any, text: str) -> list[int]:
    return tokenizer(text, add_special_tokens=False)["input_ids"]


def _is_byte_level(tokenizer: Any) -> bool:
    """Whether tokens are pieces of UTF-8, by the same sign as in TRL. Other tokenizers may not have offsets."""
    backend = getattr(tokenizer, "backend_tokenizer", None)  # a tokenizer without Rust has none
    return backend is not None and "ByteLevel" in repr(backend.pre_tokenizer) + repr(backend.decoder)


def _first_bytes(text: str, spans: list[tuple[int, int]]) -> list[int]:
    """Where each token begins in the text's UTF-8.

    Args:
        spans: of characters; tokens that share a character have the same span. An empty one counts at the end of the
            token before it.
    """
    bytes_before = [0]
    for character in text:
        bytes_before.append(bytes_before[-1] + len(character.encode()))
    found, end = [], 0
    for first, last in spans:
        found.append(end if first == last else bytes_before[first])
        end = end if first == last else bytes_before[last]
    return found
