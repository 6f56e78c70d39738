"""Rows of prompts, which a language model completes: checking them, and their token ids."""

from __future__ import annotations

import warnings
from collections.abc import Callable, Mapping, Sequence
from typing import Any

import pyarrow as pa
from datasets import Dataset, IterableDataset, Value

from trl_jax.core.printable import brief
from trl_jax.data.rows import checks

_ROWS = 10_000
_EMPTY = "A completion follows at least one token: leave the row out, or begin prompts with a token, such as the BOS."


def check_prompts(dataset: Dataset | IterableDataset, name: str, tokenizer: Any) -> Dataset | IterableDataset:
    """The rows as they are: each has a `prompt`, and further columns are for reward functions.

    Raises:
        TypeError: it is no dataset.
        KeyError: there is no such column.
        ValueError: a row has images, or its prompt is neither a text nor messages, or has no token.
    """
    if not isinstance(dataset, Dataset | IterableDataset):
        raise TypeError(f"{name}: got a {type(dataset).__name__}, wanted a Dataset or IterableDataset of datasets.")
    columns = dataset.column_names
    if columns is not None and "prompt" not in columns:
        raise KeyError(f"{name}: no column 'prompt', found {', '.join(columns)}. Rename the column of the prompts.")
    where = checks.argument(name)
    checks.check_no_images(columns or (), where)
    for row in dataset.take(1):
        checks.check_no_images(row, where)
        _check(row, name)
        checks.check_no_media(row["prompt"], f"Row 0 of {where}, column 'prompt'")
    if isinstance(dataset, Dataset) and _may_have_media(dataset.data.schema.field("prompt").type):
        for number, prompt in enumerate(dataset.with_format(None)["prompt"]):
            checks.check_no_media(prompt, f"Row {number} of {where}, column 'prompt'")
    empty = _first_empty(dataset) if isinstance(dataset, Dataset) else None
    if empty is not None and not _ids([""], tokenizer)[0]:
        raise ValueError(f"{name}: row {empty} has an empty prompt. {_EMPTY}")
    return dataset


def _may_have_media(kind: pa.DataType) -> bool:
    """Whether prompts of this Arrow type may have contents in parts: they are neither texts nor messages of text."""
    if pa.types.is_string(kind) or pa.types.is_large_string(kind):
        return False
    message = kind.value_type if checks.is_list(kind) else kind
    content = message.field("content").type if pa.types.is_struct(message) and "content" in message.names else message
    return not pa.types.is_string(content) and not pa.types.is_large_string(content)


def _first_empty(dataset: Dataset) -> int | None:
    """The row of the first prompt that is an empty text; None without one."""
    if dataset.features["prompt"] != Value("string"):
        return None
    for number, batch in enumerate(dataset.select_columns("prompt").with_format("arrow").iter(_ROWS)):
        if (row := batch["prompt"].index("").as_py()) >= 0:
            return number * _ROWS + row
    return None


def _check(row: Mapping[str, Any], name: str) -> None:
    prompt = row.get("prompt")
    if not isinstance(prompt, str) and not (prompt and is_messages(prompt)):
        raise ValueError(
            f"{name}: row 0 has the prompt {brief(prompt)}, wanted a text, or messages such as "
            '[{"role": "user", "content": "..."}].'
        )


def is_messages(prompt: Any) -> bool:
    """Whether a prompt is a conversation."""
    return isinstance(prompt, Sequence) and bool(prompt) and isinstance(prompt[0], Mapping) and "role" in prompt[0]


def prompt_ids(
    prompts: Sequence[Any],
    tokenizer: Any,
    *,
    template_options: Mapping[str, Any] | None = None,
    max_prompt_length: int | None = None,
) -> list[list[int]]:
    """Token ids of prompts: of texts with the special tokens that the tokenizer adds, of conversations rendered up to
    where the assistant begins.

    Args:
        template_options: further arguments of the chat template.
        max_prompt_length: how many of the last tokens stay; None: all.
    """
    if is_messages(prompts[0]):
        if any(prompt[-1]["role"] == "assistant" for prompt in prompts):
            warnings.warn(
                "A prompt ends with a message of the assistant. As in TRL, that message is not continued: a completion "
                "is another one behind it. End prompts with a message of the user.",
                stacklevel=2,
            )
        options = {"add_generation_prompt": True, "tokenize": True, "return_dict": True, **(template_options or {})}
        ids = tokenizer.apply_chat_template([list(prompt) for prompt in prompts], **options)["input_ids"]
    else:
        ids = _ids(prompts, tokenizer)
    if not all(map(len, ids)):
            empty = next(prompt for prompt, own in zip(prompts, ids, strict=True) if not own)
            raise ValueError(f"The prompt {brief(empty)} is empty. {_EMPTY}")
    return [list(own) if max_prompt_length is None else list(own[-max_prompt_length:]) for own in ids]


def _ids(prompts: Sequence[str], tokenizer: Any) -> list[list[int]]:
    return tokenizer(text=list(prompts))["input_ids"]


def completion_texts(
    prompts: Sequence[Any],
    ids: Sequence[Sequence[int]],
    tokenizer: Any,
    prompt_ids: Sequence[Sequence[int]] | None = None,
) -> list[Any]:
    """Completions as reward functions see them: texts without special tokens, or an assistant's message each where
    prompts are conversations.

    Args:
        prompt_ids: the tokens of the prompts, with which messages are parsed by the tokenizer's `response_template`, if
            it has one; None: they are not.
    """
    if prompt_ids is not None and is_messages(prompts[0]) and vars(tokenizer).get("response_template") is not None:
        both = zip(ids, prompt_ids, strict=True)
        return [[parsed_message(list(own), list(before), tokenizer)] for own, before in both]
    texts = tokenizer.batch_decode([list(own) for own in ids], skip_special_tokens=True)
    if not is_messages(prompts[0]):
        return texts
    return [[{"role": "assistant", "content": text}] for text in texts]


def parsed_message(
    ids: list[int], before: list[int], tokenizer: Any, tools: list[Callable] | None = None
) -> dict[str, Any]:
    """A message with what the tokenizer's template tells apart, thoughts and calls of tools among it; the text alone,
    where it is malformed.

    Args:
        before: the tokens that the message follows.
        tools: functions whose annotations say which types the arguments of calls have.
    """
    try:
        message = tokenizer.parse_response(ids, prefix=before, tools=tools)
        if message is None:
            raise ValueError("no message")
        content = message.get("content")
        message["content"] = content.removesuffix(tokenizer.eos_token) if isinstance(content, str) else content or ""
        for call in message.get("tool_calls") or ():
            _settle_call(call)
        return message
    except (TypeError, ValueError):
        return {"role": "assistant", "content": tokenizer.decode(ids, skip_special_tokens=True)}


def _settle_call(call: Any) -> None:
    """Give a call of a tool the arguments that it lacks, none. Raises ValueError where it has no name."""
    function = call.get("function", call) if isinstance(call, dict) else None
    if not isinstance(function, dict) or not isinstance(function.get("name"), str):
        raise ValueError("a call of a tool without a name")
    if function.get("arguments") is None:
        function["arguments"] = {}
