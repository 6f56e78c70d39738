"""The functions of `trl.extras.dataset_formatting`, which write rows as text for `formatting_func` or `Dataset.map`."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any, Literal

from trl_jax.data.rows.templates.rendering import apply_chat_template

Formatting = Callable[[dict[str, Any]], str | list[str]]


def conversations_formatting_function(
    tokenizer: Any, messages_field: Literal["messages", "conversations"], tools: list | None = None
) -> Formatting:
    """A function that writes the conversation of a row, or those of a batch, in the tokenizer's chat template.

    Args:
        messages_field: the column of the messages, each with a `role` and a `content`.
        tools: described to the template.
    """

    def format_dataset(examples: dict[str, Any]) -> str | list[str]:
        found = examples[messages_field]
        options = {"tokenize": False, "tools": tools}
        if found and isinstance(found[0], list):
            return [apply_chat_template(tokenizer, messages, **options) for messages in found]
        return apply_chat_template(tokenizer, found, **options)

    return format_dataset


def instructions_formatting_function(tokenizer: Any) -> Formatting:
    """A function that writes `prompt` and `completion` of a row, or those of a batch, as a user's message and the
    answer, in the tokenizer's chat template."""

    def written(prompt: str, completion: str) -> str:
        messages = [{"role": "user", "content": prompt}, {"role": "assistant", "content": completion}]
        return apply_chat_template(tokenizer, messages, tokenize=False)

    def format_dataset(examples: dict[str, Any]) -> str | list[str]:
        both = examples["prompt"], examples["completion"]
        return list(map(written, *both)) if isinstance(both[0], list) else written(*both)

    return format_dataset


def get_formatting_func_from_dataset(dataset: Any, tokenizer: Any, tools: list | None = None) -> Formatting | None:
    """The function of these two that fits a dataset's columns; None where none does."""
    for field in ("messages", "conversations"):
        if field in dataset.column_names:
            return conversations_formatting_function(tokenizer, field, tools)
    fits = {"prompt", "completion"} <= set(dataset.column_names)
    return instructions_formatting_function(tokenizer) if fits else None
