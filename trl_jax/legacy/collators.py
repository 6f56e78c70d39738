"""Data collators and datasets of TRL before 1.0."""

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

# ----------------------------------------------------------------------------------------------------
# TRL's ConstantLengthDataset, of its early releases.


class ConstantLengthDataset:
    """Texts laid end to end and cut into rows of `seq_length` tokens: what TRL up to 0.19 packed with.

    Made, it is a `datasets.IterableDataset` of rows with `input_ids` and `labels`, for SFTTrainer with
    `dataset_kwargs={"skip_prepare_dataset": True}` and `max_steps`, or to look at.

    Args:
        tokenizer: of the texts.
        dataset: rows, read from the beginning again with `infinite`.
        dataset_text_field: column of the text. formatting_func: makes the text of a row, in its place.
        seq_length: tokens of a row; the last ones, which are fewer, are left out.
        num_of_sequences, chars_per_token: rows' worth of characters that are read, and shuffled, together.
        eos_token_id: between texts, where the tokenizer has none.
        shuffle: rows that were read together.
        append_concat_token: whether `eos_token_id` stands behind each text. add_special_tokens: whether the
            tokenizer's own are added.

    Raises:
        ValueError: neither dataset_text_field nor formatting_func.
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
            raise ValueError("ConstantLengthDataset: pass dataset_text_field='text', or formatting_func=.")
        text_of = formatting_func or (lambda row: row[dataset_text_field])
        end = eos_token_id if tokenizer.eos_token_id is None else tokenizer.eos_token_id
        most = int(seq_length * chars_per_token * num_of_sequences)
        options = {"add_special_tokens": add_special_tokens, "truncation": False}

        def rows() -> Iterator[dict[str, list[int]]]:
            for texts in _read(dataset, text_of, most, infinite):
                ids: list[int] = []
                for own in tokenizer(texts, **options)["input_ids"]:
                    ids += [*own, end] if append_concat_token else own
                found = [ids[at : at + seq_length] for at in range(0, len(ids) - seq_length + 1, seq_length)]
                if shuffle:
                    random.shuffle(found)
                yield from ({"input_ids": row, "labels": row} for row in found)

        return IterableDataset.from_generator(rows)


def _read(dataset: Iterable, text_of: Callable, most: int, infinite: bool) -> Iterator[list[str]]:
    """Texts of at least `most` characters together; the last ones, or without end."""
    texts: list[str] = []
    while True:
        for row in dataset:
            texts.append(text_of(row))
            if sum(map(len, texts[-1:])) and sum(map(len, texts)) >= most:
                yield texts
                texts = []
        if not infinite:
            break
    if texts:
        yield texts


# ----------------------------------------------------------------------------------------------------
# Collators of early TRL that scripts still pass to a trainer.


class DataCollatorForCompletionOnlyLM:
    """Trains on answers alone, found by the text that they begin behind: TRL's collator up to 0.19, for SFTTrainer.

    A call gives `input_ids`, `labels` and `attention_mask` as DataCollatorForLanguageModeling does. A token that is the
    pad token is no target, wherever it stands, as in TRL.

    Args:
        response_template: a text, or its token ids, behind which an answer begins.
        instruction_template: a text, or its token ids, with which a question begins, at which an answer ends; None: a
            text has one answer, behind the last response_template.
        tokenizer: gives the ids of templates and the pad token.
        pad_to_multiple_of, return_tensors: as in DataCollatorForLanguageModeling.

    Raises:
        ValueError: mlm, another ignore_index than -100, padding_free, or a template without tokens.
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
        if asked := [name for name, given in refused.items() if given]:
            raise ValueError(
                f"DataCollatorForCompletionOnlyLM({asked[0]}=...) is not in this release of trl_jax: leave it out; "
                "texts without padding are SFTConfig(padding_free=True) with rows of 'prompt' and 'completion'."
            )
        if tokenizer is None:
            raise TypeError("DataCollatorForCompletionOnlyLM misses tokenizer=: it gives the ids of response_template.")
        self.response_template, self.instruction_template = response_template, instruction_template
        self.tokenizer, self.pad_to_multiple_of = tokenizer, pad_to_multiple_of
        response = _ids("response_template", response_template, tokenizer)
        asked = instruction_template
        question = None if asked is None else _ids("instruction_template", asked, tokenizer)
        self.marks = AnswerMarks(response, question, tokenizer.pad_token_id)
        self._inner = DataCollatorForLanguageModeling(
            tokenizer.pad_token_id, pad_to_multiple_of=pad_to_multiple_of, return_tensors=return_tensors
        )

    def __call__(self, examples: list[dict[str, Any]]) -> dict[str, Any]:
        return self._inner([row | {"labels": answer_labels(row["input_ids"], self.marks)} for row in examples])


def _ids(name: str, template: str | Sequence[int], tokenizer: Any) -> tuple[int, ...]:
    ids = tokenizer.encode(template, add_special_tokens=False) if isinstance(template, str) else template
    if not len(ids):
        raise ValueError(f"{name}={brief(template)} has no tokens: pass the text that comes before each answer.")
    return tuple(int(token) for token in ids)


@dataclass
class RewardDataCollatorWithPadding:
    """Rows with `input_ids_chosen`, `input_ids_rejected` and maybe `margin` to padded arrays: RewardTrainer's collator
    of TRL up to 0.19.

    A call gives `input_ids_chosen`, `attention_mask_chosen` and the same of `rejected`, int64 `[P, T]` each with a T of
    its own; float32 `margin` `[P]`; and `return_loss`.

    Args:
        tokenizer: gives the pad token.
        padding: True; rows are padded to the longest.
        pad_to_multiple_of, return_tensors: as in DataCollatorForPreference.

    Raises:
        ValueError: another padding.
    """

    tokenizer: Any
    padding: bool | str = True
    max_length: int | None = None
    pad_to_multiple_of: int | None = None
    return_tensors: str | None = None

    def __post_init__(self):
        if self.padding not in (True, "longest"):
            raise ValueError(f"padding={self.padding!r}: rows are padded to the longest. Leave it out.")

    def __call__(self, examples: list[dict[str, Any]]) -> dict[str, Any]:
        batch: dict[str, Any] = {}
        for side in ("chosen", "rejected"):
            rows = [row[f"input_ids_{side}"] for row in examples]
            batch[f"input_ids_{side}"] = padded(rows, self.tokenizer.pad_token_id, self.pad_to_multiple_of)
            given = [row.get(f"attention_mask_{side}") for row in examples]
            masks = [np.ones(len(ids)) if own is None else own for own, ids in zip(given, rows, strict=True)]
            batch[f"attention_mask_{side}"] = padded(masks, 0, self.pad_to_multiple_of)
        if "margin" in examples[0]:
            batch["margin"] = np.asarray([row["margin"] for row in examples], np.float32)
        return as_kind(self.return_tensors, batch) | {"return_loss": True}


# ----------------------------------------------------------------------------------------------------
# The functions of `trl.extras.dataset_formatting`, which write rows as text for `formatting_func` or `Dataset.map`.


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
