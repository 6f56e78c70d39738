"""Rows in the forms TRL's datasets have, from one to another: TRL's `trl.data_utils`."""

from __future__ import annotations

import os
from collections.abc import Callable
from functools import partial
from typing import Any

from datasets import Dataset, DatasetDict, IterableDataset

from trl_jax.data.packing import pack_dataset as pack_dataset
from trl_jax.data.rows.multimodal import prepare_multimodal_messages as prepare_multimodal_messages

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
_TALKS = ("prompt", "completion", "chosen", "rejected", "messages", "conversations")


def is_conversational(example: dict[str, Any]) -> bool:
    """Whether a row holds messages, each with a role, and not text."""
    held = [example[name] for name in ("prompt", "chosen", "rejected", "completion", "messages") if name in example]
    return bool(held) and _are_messages(held[0], "role")


def is_conversational_from_value(example: dict[str, Any]) -> bool:
    """Whether a row holds `conversations` in the form of ShareGPT: messages with `from` and `value`."""
    talk = example.get("conversations")
    return _are_messages(talk, "from") and "value" in talk[0]


def _are_messages(value: Any, key: str) -> bool:
    return isinstance(value, list) and bool(value) and isinstance(value[0], dict) and key in value[0]


def maybe_convert_to_chatml(example: dict[str, Any]) -> dict[str, Any]:
    """The row with `role` and `content` where it had `from` and `value`, and `messages` for `conversations`."""
    names = {"from": "role", "value": "content"}

    def converted(message: Any) -> Any:
        if not isinstance(message, dict):
            return message
        return {names.get(key, key): value for key, value in message.items()}

    talks = {name: value for name, value in example.items() if name in _TALKS and isinstance(value, list)}
    new = {name: [converted(message) for message in talk] for name, talk in talks.items()}
    return {("messages" if name == "conversations" else name): new.get(name, value) for name, value in example.items()}


def apply_chat_template(
    example: dict[str, Any], processing_class: Any, tools: list[dict | Callable] | None = None, **template_kwargs: Any
) -> dict[str, Any]:
    """A conversational row as text: the prompt, and behind it each answer.

    What both share at the beginning is the prompt, so that prompt and answer joined are the rendered conversation.

    Raises:
        KeyError: the row has no form that TRL knows.
        ValueError: a prompt ends with a message of neither user, tool nor assistant.
    """
    held = {name for name in _COLUMNS if name in example}
    if held not in _FORMATS:
        raise KeyError(f"Invalid keys in the example: {held}; wanted one of {_FORMATS}.")
    options = {"tools": tools or None, "tokenize": False, **example.get("chat_template_kwargs", {}), **template_kwargs}
    render = partial(processing_class.apply_chat_template, **options)
    label = {"label": example["label"]} if "label" in held else {}
    answers = [name for name in _ANSWERS if name in held]
    if "messages" in held:
        return {"text": render(example["messages"])}
    if "prompt" not in held:
        return {name: render(example[name]) for name in answers}
    whole = {name: render(example["prompt"] + example[name]) for name in answers}
    prompt = os.path.commonprefix([render(example["prompt"], **_opening(example["prompt"])), *whole.values()])
    return {"prompt": prompt, **{name: text[len(prompt) :] for name, text in whole.items()}, **label}


def _opening(prompt: list[dict[str, Any]]) -> dict[str, bool]:
    """How a template leaves the prompt open for the answer."""
    role = prompt[-1]["role"]
    if role not in ("user", "tool", "assistant"):
        raise ValueError(f"Invalid role in the last message: {role}; wanted user, tool or assistant.")
    goes_on = role == "assistant"
    return {"add_generation_prompt": not goes_on, "continue_final_message": goes_on}


def maybe_apply_chat_template(
    example: dict[str, Any], processing_class: Any, tools: list[dict | Callable] | None = None, **template_kwargs: Any
) -> dict[str, Any]:
    """`apply_chat_template` of a conversational row; any other as it is."""
    return (
        apply_chat_template(example, processing_class, tools, **template_kwargs)
        if is_conversational(example)
        else example
    )


def extract_prompt(example: dict[str, Any]) -> dict[str, Any]:
    """What `chosen` and `rejected` begin with alike becomes `prompt`; a space before the answers stays with them.

    Of two that are alike to the end of the shorter, its last item counts as answer.
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
    """`extract_prompt` of a preference row whose prompt is in its answers, though it may stand beside them too."""
    if "chosen" not in example or "rejected" not in example:
        return example
    if "prompt" in example:
        if is_conversational({"chosen": example["chosen"]}) == is_conversational({"prompt": example["prompt"]}):
            return example
    return extract_prompt({"chosen": example["chosen"], "rejected": example["rejected"]})


def unpair_preference_dataset(dataset: Any, **map_kwargs: Any) -> Any:
    """Each pair as two rows with `completion` and `label`, all chosen ones of a block before its rejected ones.

    Args:
        dataset: Dataset, DatasetDict or IterableDataset of pairs.
        map_kwargs: for its `map`.
    """
    return dataset.map(_unpaired, batched=True, remove_columns=get_dataset_column_names(dataset), **map_kwargs)


def maybe_unpair_preference_dataset(dataset: Any, num_proc: int | None = None, desc: str | None = None) -> Any:
    """`unpair_preference_dataset` of pairs; any other dataset as it is."""
    if not {"chosen", "rejected"} <= set(get_dataset_column_names(dataset)):
        return dataset
    return unpair_preference_dataset(dataset, num_proc=num_proc, desc=desc)


def _unpaired(batch: dict[str, list[Any]]) -> dict[str, list[Any]]:
    pairs = len(batch["chosen"])
    own = {"completion": batch["chosen"] + batch["rejected"], "label": [True] * pairs + [False] * pairs}
    others = {name: values * 2 for name, values in batch.items() if name not in ("chosen", "rejected")}
    return own | others


def get_dataset_column_names(dataset: Dataset | IterableDataset | DatasetDict) -> list[str]:
    """Its columns; of a stream that does not know them, those of its first row."""
    if isinstance(dataset, dict):
        dataset = next(iter(dataset.values()))
    return list(next(iter(dataset))) if dataset.column_names is None else dataset.column_names
