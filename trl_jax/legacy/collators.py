"""Data collators, chat templates, ConstantLengthDataset and formatting functions of TRL before 1.0."""

from __future__ import annotations

import random
from collections.abc import Callable, Iterable, Iterator, Sequence
from dataclasses import dataclass
from typing import Any, Literal

import numpy as np
from datasets import IterableDataset

from trl_jax.core.text import brief
from trl_jax.data.batch import IGNORED
from trl_jax.data.chat_templates import apply_chat_template
from trl_jax.data.sft import AnswerMarks, answer_labels
from trl_jax.trainer.collators import DataCollatorForLanguageModeling, as_kind, padded

__all__ = [
    "ConstantLengthDataset",
    "DataCollatorForCompletionOnlyLM",
    "RewardDataCollatorWithPadding",
    "SIMPLE_CHAT_TEMPLATE",
    "SIMPLE_QUERY_CHAT_TEMPLATE",
    "SIMPLE_SFT_CHAT_TEMPLATE",
    "conversations_formatting_function",
    "get_formatting_func_from_dataset",
    "instructions_formatting_function",
]

# Chat templates that were in `trl.trainer.utils`

# "User: ..." and "Assistant: ...", with an empty line after each message.
SIMPLE_CHAT_TEMPLATE = (
    "{% for message in messages %}{{ message['role'].capitalize() + ': ' + message['content'] + '\\n\\n' }}{% endfor %}"
    "{% if add_generation_prompt %}{{ 'Assistant:' }}{% endif %}"
)
# Only the contents, with a space before each.
SIMPLE_QUERY_CHAT_TEMPLATE = "{% for message in messages %}{{ ' ' + message['content'] }}{% endfor %}"
SIMPLE_SFT_CHAT_TEMPLATE = SIMPLE_QUERY_CHAT_TEMPLATE + "{{ eos_token }}"


class ConstantLengthDataset:
    """Concatenated texts, cut into rows of `seq_length` tokens: the packing of TRL up to 0.19.

    Calling the class returns a `datasets.IterableDataset` of rows with `input_ids` and `labels`. Pass it to SFTTrainer
    with `dataset_kwargs={"skip_prepare_dataset": True}` and `max_steps`.

    Args:
        dataset: the rows. With `infinite`, they are repeated without end.
        dataset_text_field: column of the text.
        formatting_func: row -> text, instead of dataset_text_field.
        seq_length: tokens per row; a shorter remainder is dropped.
        num_of_sequences, chars_per_token: texts are read until they have about num_of_sequences * seq_length tokens,
            and their rows are shuffled together.
        eos_token_id: separates texts if the tokenizer has no EOS token.
        shuffle: whether to shuffle the rows that were read together.
        append_concat_token: whether to append the EOS token to each text.
        add_special_tokens: whether the tokenizer adds its special tokens.

    Raises:
        ValueError: neither dataset_text_field nor formatting_func is given.
    """

    def __new__(
        cls,
        tokenizer: Any,
        dataset: Iterable[dict[str, Any]],
        dataset_text_field: str | None = None,
        formatting_func: Callable[[dict[str, Any]], str] | None = None,
        infinite: bool = False,
        seq_length: int = 1024,
        num_of_sequences: int = 1024,
        chars_per_token: float = 3.6,
        eos_token_id: int = 0,
        shuffle: bool = True,
        append_concat_token: bool = True,
        add_special_tokens: bool = True,
    ) -> IterableDataset:
        if dataset_text_field is None and formatting_func is None:
            raise ValueError("ConstantLengthDataset needs dataset_text_field=, such as 'text', or formatting_func=.")
        get_text = formatting_func or (lambda row: row[dataset_text_field])
        eos = eos_token_id if tokenizer.eos_token_id is None else tokenizer.eos_token_id
        max_chars = int(seq_length * chars_per_token * num_of_sequences)
        options = {"add_special_tokens": add_special_tokens, "truncation": False}

        def rows() -> Iterator[dict[str, list[int]]]:
            for texts in _read_texts(dataset, get_text, max_chars, infinite):
                ids: list[int] = []
                for text_ids in tokenizer(texts, **options)["input_ids"]:
                    ids += [*text_ids, eos] if append_concat_token else text_ids
                chunks = [ids[start : start + seq_length] for start in range(0, len(ids) - seq_length + 1, seq_length)]
                if shuffle:
                    random.shuffle(chunks)
                yield from ({"input_ids": row, "labels": row} for row in chunks)

        return IterableDataset.from_generator(rows)


def _read_texts(dataset: Iterable, get_text: Callable, max_chars: int, infinite: bool) -> Iterator[list[str]]:
    """Lists of texts with at least `max_chars` characters in total; the last list may have fewer."""
    texts: list[str] = []
    size, empty = 0, True
    while True:
        for row in dataset:
            text, empty = get_text(row), False
            texts.append(text)
            size += len(text)
            if text and size >= max_chars:
                yield texts
                texts, size = [], 0
        if not infinite or empty:
            break
    if texts:
        yield texts


# Collators


class DataCollatorForCompletionOnlyLM:
    """SFTTrainer's collator of TRL up to 0.19: masks everything except responses, which follow a template text.

    A call returns `input_ids`, `labels` and `attention_mask`, like DataCollatorForLanguageModeling. As in TRL, a token
    with the id of the pad token is never a target.

    Args:
        response_template: text or token ids right before a response.
        instruction_template: text or token ids at the start of an instruction, which ends the preceding response. None:
            a text has one response, after the last response_template.
        tokenizer: encodes the templates and provides the pad token.
        pad_to_multiple_of, return_tensors: as in DataCollatorForLanguageModeling.

    Raises:
        ValueError: mlm, padding_free or an ignore_index other than -100 is given, or a template has no tokens.
    """

    def __init__(
        self,
        response_template: str | Sequence[int],
        instruction_template: str | Sequence[int] | None = None,
        tokenizer: Any = None,
        mlm: bool = False,
        ignore_index: int = IGNORED,
        padding_free: bool = False,
        pad_to_multiple_of: int | None = None,
        return_tensors: str | None = None,
    ):
        refused = {"mlm": mlm, "padding_free": padding_free, "ignore_index": ignore_index != IGNORED}
        if passed := [name for name, is_set in refused.items() if is_set]:
            raise ValueError(
                f"DataCollatorForCompletionOnlyLM({passed[0]}=...) is not in this release of trl_jax. Remove it; to "
                "train without padding, use SFTConfig(padding_free=True) with 'prompt' and 'completion' columns."
            )
        if tokenizer is None:
            raise TypeError("DataCollatorForCompletionOnlyLM needs tokenizer=, which encodes response_template.")
        self.response_template, self.instruction_template = response_template, instruction_template
        self.tokenizer, self.pad_to_multiple_of = tokenizer, pad_to_multiple_of
        response = _ids("response_template", response_template, tokenizer)
        instruction = None
        if instruction_template is not None:
            instruction = _ids("instruction_template", instruction_template, tokenizer)
        self.marks = AnswerMarks(response, instruction, tokenizer.pad_token_id)
        self._inner = DataCollatorForLanguageModeling(
            tokenizer.pad_token_id, pad_to_multiple_of=pad_to_multiple_of, return_tensors=return_tensors
        )

    def __call__(self, examples: list[dict[str, Any]]) -> dict[str, Any]:
        return self._inner([row | {"labels": answer_labels(row["input_ids"], self.marks)} for row in examples])


def _ids(name: str, template: str | Sequence[int], tokenizer: Any) -> tuple[int, ...]:
    ids = tokenizer.encode(template, add_special_tokens=False) if isinstance(template, str) else template
    if not len(ids):
        raise ValueError(f"{name}={brief(template)} has no tokens: pass the text before each answer.")
    return tuple(int(token) for token in ids)


@dataclass
class RewardDataCollatorWithPadding:
    """RewardTrainer's collator of TRL up to 0.19: pads rows with `input_ids_chosen`, `input_ids_rejected` and
    optionally `margin`.

    A call returns `input_ids_*` and `attention_mask_*` for `chosen` and `rejected`, int64 `[P, T]` with a different T
    for each side; `margin`, float32 `[P]`; and `return_loss`.

    Args:
        tokenizer: provides the pad token.
        padding: True or "longest"; rows are padded to the longest one.
        pad_to_multiple_of, return_tensors: as in DataCollatorForPreference.

    Raises:
        ValueError: any other padding.
    """

    tokenizer: Any
    padding: bool | str = True
    max_length: int | None = None
    pad_to_multiple_of: int | None = None
    return_tensors: str | None = None

    def __post_init__(self):
        if self.padding not in (True, "longest"):
            raise ValueError(f"padding={self.padding!r} is not supported: rows are padded to the longest. Remove it.")

    def __call__(self, examples: list[dict[str, Any]]) -> dict[str, Any]:
        batch: dict[str, Any] = {}
        for side in ("chosen", "rejected"):
            rows = [row[f"input_ids_{side}"] for row in examples]
            batch[f"input_ids_{side}"] = padded(rows, self.tokenizer.pad_token_id, self.pad_to_multiple_of)
            masks = [row.get(f"attention_mask_{side}") for row in examples]
            masks = [np.ones(len(ids)) if mask is None else mask for mask, ids in zip(masks, rows, strict=True)]
            batch[f"attention_mask_{side}"] = padded(masks, 0, self.pad_to_multiple_of)
        if "margin" in examples[0]:
            batch["margin"] = np.asarray([row["margin"] for row in examples], np.float32)
        return as_kind(self.return_tensors, batch) | {"return_loss": True}


# Formatting functions of `trl.extras.dataset_formatting`

Formatting = Callable[[dict[str, Any]], str | list[str]]


def conversations_formatting_function(
    tokenizer: Any, messages_field: Literal["messages", "conversations"], tools: list | None = None
) -> Formatting:
    """Make a function that formats the conversation of a row, or all conversations of a batch, with the chat template.

    Args:
        messages_field: the column of the messages.
        tools: passed to the template.
    """

    def format_dataset(examples: dict[str, Any]) -> str | list[str]:
        column = examples[messages_field]
        options = {"tokenize": False, "tools": tools}
        if column and isinstance(column[0], list):
            return [apply_chat_template(tokenizer, messages, **options) for messages in column]
        return apply_chat_template(tokenizer, column, **options)

    return format_dataset


def instructions_formatting_function(tokenizer: Any) -> Formatting:
    """Make a function that formats `prompt` and `completion` of a row, or of all rows of a batch, as a user and an
    assistant message, with the chat template."""

    def render(prompt: str, completion: str) -> str:
        messages = [{"role": "user", "content": prompt}, {"role": "assistant", "content": completion}]
        return apply_chat_template(tokenizer, messages, tokenize=False)

    def format_dataset(examples: dict[str, Any]) -> str | list[str]:
        columns = examples["prompt"], examples["completion"]
        return list(map(render, *columns)) if isinstance(columns[0], list) else render(*columns)

    return format_dataset


def get_formatting_func_from_dataset(dataset: Any, tokenizer: Any, tools: list | None = None) -> Formatting | None:
    """The formatting function for a dataset's columns; None if neither fits."""
    for field in ("messages", "conversations"):
        if field in dataset.column_names:
            return conversations_formatting_function(tokenizer, field, tools)
    fits = {"prompt", "completion"} <= set(dataset.column_names)
    return instructions_formatting_function(tokenizer) if fits else None
