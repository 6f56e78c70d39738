"""TRL's ConstantLengthDataset, of its early releases."""

from __future__ import annotations

import random
from collections.abc import Callable, Iterable, Iterator
from typing import Any

from datasets import IterableDataset


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
