"""Convert rows between TRL's dataset formats: the functions of `trl.data_utils`."""

from __future__ import annotations

import os
from collections.abc import Callable
from functools import partial
from typing import Any

from trl_jax.data.chat import prompt_options
from trl_jax.data.chat_templates import apply_chat_template as render_messages
from trl_jax.data.chat_templates import prepare_multimodal_messages as prepare_multimodal_messages
from trl_jax.data.packing import pack_dataset as pack_dataset
from trl_jax.data.preference import get_dataset_column_names as get_dataset_column_names
from trl_jax.data.preference import unpair_preference_dataset as unpair_preference_dataset

_COLUMNS = ("prompt", "chosen", "rejected", "completion", "messages", "label")
_FORMATS = (
    {"messages"},
    {"prompt"},
    {"prompt", "completion"},
    {"prompt", "chosen", "rejected"},
    {"chosen", "rejected"},
    {"prompt", "completion", "label"},
)
_ANSWERS = ("chosen", "rejected", "completion")
_CONVERSATIONS = ("prompt", "completion", "chosen", "rejected", "messages", "conversations")


def is_conversational(example: dict[str, Any]) -> bool:
    """Whether a row has messages with roles rather than text."""
    values = [example[name] for name in ("prompt", "chosen", "rejected", "completion", "messages") if name in example]
    return bool(values) and _are_messages(values[0], "role")


def is_conversational_from_value(example: dict[str, Any]) -> bool:
    """Whether a row has `conversations` in ShareGPT format: messages with `from` and `value`."""
    conversation = example.get("conversations")
    return _are_messages(conversation, "from") and "value" in conversation[0]


def _are_messages(value: Any, key: str) -> bool:
    return isinstance(value, list) and bool(value) and isinstance(value[0], dict) and key in value[0]


def maybe_convert_to_chatml(example: dict[str, Any]) -> dict[str, Any]:
    """Convert ShareGPT messages: `from` and `value` become `role` and `content`, `conversations` becomes `messages`."""
    names = {"from": "role", "value": "content"}

    def converted(message: Any) -> Any:
        if not isinstance(message, dict):
            return message
        return {names.get(key, key): value for key, value in message.items()}

    lists = {name: value for name, value in example.items() if name in _CONVERSATIONS and isinstance(value, list)}
    new = {name: [converted(message) for message in conversation] for name, conversation in lists.items()}
    return {("messages" if name == "conversations" else name): new.get(name, value) for name, value in example.items()}


def apply_chat_template(
    example: dict[str, Any], processing_class: Any, tools: list[dict | Callable] | None = None, **template_kwargs: Any
) -> dict[str, Any]:
    """Render a conversational row as text: the prompt, and each answer as its continuation.

    The prompt is the longest common prefix of the rendered conversations, so prompt + answer is the full conversation.

    Raises:
        KeyError: the row's columns match none of TRL's formats.
        ValueError: the role of the prompt's last message is not user, tool or assistant.
    """
    names_found = {name for name in _COLUMNS if name in example}
    if names_found not in _FORMATS:
        raise KeyError(f"Invalid keys in the example: {names_found}. They must be one of {_FORMATS}.")
    options = {"tools": tools or None, "tokenize": False, **example.get("chat_template_kwargs", {}), **template_kwargs}
    render = partial(render_messages, processing_class, **options)
    label = {"label": example["label"]} if "label" in names_found else {}
    answers = [name for name in _ANSWERS if name in names_found]
    if "messages" in names_found:
        return {"text": render(example["messages"])}
    if "prompt" not in names_found:
        return {name: render(example[name]) for name in answers}
    full_texts = {name: render(example["prompt"] + example[name]) for name in answers}
    rendered_prompt = render(example["prompt"], **prompt_options(example["prompt"]))
    prompt = os.path.commonprefix([rendered_prompt, *full_texts.values()])
    return {"prompt": prompt, **{name: text[len(prompt) :] for name, text in full_texts.items()}, **label}


def maybe_apply_chat_template(
    example: dict[str, Any], processing_class: Any, tools: list[dict | Callable] | None = None, **template_kwargs: Any
) -> dict[str, Any]:
    """Apply `apply_chat_template` to a conversational row; return any other row unchanged."""
    return (
        apply_chat_template(example, processing_class, tools, **template_kwargs)
        if is_conversational(example)
        else example
    )


def extract_prompt(example: dict[str, Any]) -> dict[str, Any]:
    """Move the common prefix of `chosen` and `rejected` to `prompt`; a space at its end stays with the answers.

    If one answer is a prefix of the other, its last character or message stays in the answer.
    """
    chosen, rejected = example["chosen"], example["rejected"]
    shorter = min(len(chosen), len(rejected))
    at = next((i for i in range(shorter) if chosen[i] != rejected[i]), None)
    if at is None:
        at = shorter - 1
    elif chosen[at - 1] == " ":
        at -= 1
    return {"prompt": chosen[:at], "chosen": chosen[at:], "rejected": rejected[at:]}


def maybe_extract_prompt(example: dict[str, Any]) -> dict[str, Any]:
    """Apply `extract_prompt` to a preference row with an implicit prompt; return any other row unchanged.

    A `prompt` whose format (text or messages) differs from that of the answers is replaced.
    """
    if "chosen" not in example or "rejected" not in example:
        return example
    if "prompt" in example:
        if is_conversational({"chosen": example["chosen"]}) == is_conversational({"prompt": example["prompt"]}):
            return example
    return extract_prompt({"chosen": example["chosen"], "rejected": example["rejected"]})


def maybe_unpair_preference_dataset(dataset: Any, num_proc: int | None = None, desc: str | None = None) -> Any:
    """Apply `unpair_preference_dataset` to a dataset of pairs; return any other dataset unchanged."""
    if not {"chosen", "rejected"} <= set(get_dataset_column_names(dataset)):
        return dataset
    return unpair_preference_dataset(dataset, num_proc=num_proc, desc=desc)
