"""Rows of prompts, which a language model completes: checking them, and their token ids."""

from __future__ import annotations

import warnings
from collections.abc import Mapping, Sequence
from typing import Any

from datasets import Dataset, IterableDataset

from trl_jax.core.printable import brief

_IMAGES = ("image", "images")


def check_prompts(dataset: Dataset | IterableDataset, name: str) -> Dataset | IterableDataset:
    """The rows as they are: each has a `prompt`, and further columns are for reward functions.

    Raises:
        KeyError: there is no such column.
        ValueError: a row has images, or its prompt is neither a text nor messages.
    """
    columns = dataset.column_names
    if columns is not None and "prompt" not in columns:
        raise KeyError(f"{name}: no column 'prompt', found {', '.join(columns)}. Rename the column of the prompts.")
    found = [column for column in _IMAGES if column in (columns or ())]
    if found:
        raise ValueError(f"{name}: the column {found[0]!r} has images, which are not supported here. Remove it.")
    for row in dataset.take(1):
        _check(row, name)
    return dataset


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
        ids = tokenizer(text=list(prompts))["input_ids"]
    return [list(own) if max_prompt_length is None else list(own[-max_prompt_length:]) for own in ids]


def completion_texts(prompts: Sequence[Any], ids: Sequence[Sequence[int]], tokenizer: Any) -> list[Any]:
    """Completions as reward functions see them: texts without special tokens, or an assistant's message each where
    prompts are conversations."""
    texts = tokenizer.batch_decode([list(own) for own in ids], skip_special_tokens=True)
    if not is_messages(prompts[0]):
        return texts
    return [[{"role": "assistant", "content": text}] for text in texts]
