"""Rows with images to examples, one at a time, while the model trains: images are not decoded ahead, as in TRL."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any, Protocol

import numpy as np
from datasets import Dataset, IterableDataset

from trl_jax.data import chat, checks, sft
from trl_jax.data.batch import IGNORED, Example
from trl_jax.data.chat_templates import prepare_multimodal_messages

IMAGE_COLUMNS = ("image", "images")
_ROW = "the row"  # in errors; whoever reads the dataset adds its number


class Encoder(Protocol):
    """Texts with images to token ids, as `hub.vision.processor.VisionProcessor` does."""

    tokenizer: Any

    def encode(self, text: str, pictures: Any = (), *, max_length: int | None = None) -> Any: ...


def first_row(dataset: Dataset | IterableDataset) -> dict[str, Any]:
    """The first row of a dataset; empty if there is none."""
    rows = dataset.take(1) if isinstance(dataset, IterableDataset) else dataset.select(range(min(1, len(dataset))))
    return next(iter(rows), {})


def has_images(row: Mapping[str, Any]) -> bool:
    """Whether rows like this first one have images: a column of them, or image parts in a conversation."""
    if any(column in row for column in IMAGE_COLUMNS):
        return True
    return any(_pictures_in(value) for value in row.values() if chat.is_messages(value))


def _pictures_in(messages: Any) -> list[Any]:
    """The images of a conversation's parts, in order."""
    parts = [part for message in messages for part in message.get("content") or () if isinstance(part, Mapping)]
    return [part.get("image") for part in parts if part.get("type") == "image"]


def pictures_of(row: Mapping[str, Any]) -> list[Any]:
    """The pictures in the columns of a row."""
    if row.get("image") is not None:
        return [row["image"]]
    return list(row.get("images") or ())


def without_null(messages: Any) -> list[dict[str, Any]]:
    """Messages whose parts have no keys that a table filled with None."""
    cleaned = []
    for message in messages:
        content = message.get("content")
        if isinstance(content, list | tuple | np.ndarray):
            content = [
                {key: value for key, value in part.items() if value is not None} if isinstance(part, Mapping) else part
                for part in content
            ]
        cleaned.append({key: value for key, value in message.items() if value is not None} | {"content": content})
    return cleaned


@dataclass(frozen=True)
class SftImageRows:
    """How rows with images become examples of supervised fine-tuning.

    Attributes:
        column: the text column.
        completion_only: whether prompts are excluded from the labels; None: in rows with a prompt and a completion.
        chat_template: replaces the tokenizer's own; None keeps it.
    """

    column: str = "text"
    completion_only: bool | None = None
    chat_template: str | None = None

    def example(self, row: Mapping[str, Any], encoder: Encoder, max_length: int | None) -> Example:
        """The example of one row.

        Args:
            max_length: cuts the text at its end.

        Raises:
            ValueError: names the column or the image that is wrong.
        """
        pictures = pictures_of(row)
        if "messages" in row or self.column in row:
            return self._text(row, pictures, encoder, max_length)
        if not {"prompt", "completion"} <= row.keys():
            raise ValueError(f"Unexpected input keys in examples: {list(row)}.")
        prompt, completion = row["prompt"], row["completion"]
        if chat.is_messages(prompt):
            prompt = prepare_multimodal_messages(without_null(prompt), pictures)
            completion = prepare_multimodal_messages(without_null(completion))
            pictures = _pictures_in(prompt)
            opening = chat.opening(prompt)
            whole = chat.rendered(encoder.tokenizer, [*prompt, *completion], _ROW, **self._template, tokenize=False)
            prompt = chat.rendered(encoder.tokenizer, prompt, _ROW, **self._template, tokenize=False, **opening)
            shared = sft.common_prefix(list(prompt), list(whole))
            prompt, completion = whole[:shared], whole[shared:]
        before, after = encoder.encode(prompt, pictures), encoder.encode(completion)
        ids = np.concatenate([before.ids, after.ids])[:max_length]
        features = np.concatenate([before.features, after.features])[:max_length]
        labels = ids.copy()
        if self.completion_only is None or self.completion_only:
            labels[: len(before.ids)] = IGNORED
        positions = before.positions
        if positions is not None:
            last = positions.max(initial=-1) + 1
            positions = np.concatenate([positions, after.positions + last])[:max_length]
        return _made(ids, labels, before.images, features, positions)

    @property
    def _template(self) -> dict[str, Any]:
        return {} if self.chat_template is None else {"chat_template": self.chat_template}

    def _text(self, row: Mapping[str, Any], pictures: list[Any], encoder: Encoder, max_length: int | None) -> Example:
        if self.completion_only:
            raise ValueError("The `completion_only_loss` argument is not supported for language modeling datasets.")
        if "messages" not in row:
            if not isinstance(row[self.column], str):
                raise checks.cell_error(_ROW, self.column, row[self.column], "a text")
            text = row[self.column]
        else:
            messages = prepare_multimodal_messages(without_null(row["messages"]), pictures)
            pictures = _pictures_in(messages)
            text = chat.rendered(encoder.tokenizer, messages, _ROW, **self._template, tokenize=False)
        encoded = encoder.encode(text, pictures, max_length=max_length)
        return _made(encoded.ids, encoded.ids, encoded.images, encoded.features, encoded.positions)


def _made(
    ids: np.ndarray, labels: np.ndarray, images: tuple, features: np.ndarray, positions: np.ndarray | None
) -> Example:
    places = () if positions is None else (positions,)
    return Example((ids,), labels=(labels,), images=images, features=(features,), positions=places)
