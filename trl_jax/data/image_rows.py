"""Convert rows with images to examples one at a time during training. As in TRL, images are not decoded beforehand."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any, NamedTuple, Protocol

import numpy as np

from trl_jax.data import chat, checks, sft
from trl_jax.data.batch import IGNORED, Example
from trl_jax.data.chat_templates import prepare_multimodal_messages
from trl_jax.data.images import ImagePatches, TextImages

_ROW = "the row"  # in errors; the caller adds the row number


class Encoder(Protocol):
    """Tokenizes texts with images; implemented by `hub.vision.processor.VisionProcessor`."""

    tokenizer: Any

    def encode(
        self,
        text: str,
        pictures: Any = (),
        *,
        max_length: int | None = None,
        add_special_tokens: bool = False,
        spans: Any = None,
    ) -> Any: ...

    def place(self, ids: Sequence[int], pictures: Sequence[Any]) -> TextImages: ...

    def placed(self, ids: Sequence[int], images: Sequence[ImagePatches]) -> TextImages: ...


def pictures_in(messages: Any) -> list[Any]:
    """The images of a conversation's parts, in order."""
    parts = [part for message in messages for part in message.get("content") or () if isinstance(part, Mapping)]
    return [part.get("image") for part in parts if part.get("type") == "image"]


def pictures_of(row: Mapping[str, Any]) -> list[Any]:
    """The images in the `image` or `images` column of a row."""
    if row.get("image") is not None:
        return [row["image"]]
    pictures = row.get("images")  # may also be an array of all images
    return [] if pictures is None else list(pictures)


def without_null(messages: Any) -> list[dict[str, Any]]:
    """Remove keys with the value None, with which tables fill missing fields, from messages and their parts."""
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
    """Converts rows with images to examples for supervised fine-tuning.

    Attributes:
        column: the text column.
        completion_only: whether prompts are excluded from the labels; None: if rows have a prompt and a completion.
        chat_template: replaces the tokenizer's chat template; None keeps it.
        assistant_only: whether only tokens that the template marks as assistant content have labels.
        keeps_columns: whether the template gets `chat_template_kwargs` of a row. TRL drops this column, unless
            `remove_unused_columns` is False.
    """

    column: str = "text"
    completion_only: bool | None = None
    chat_template: str | None = None
    assistant_only: bool = False
    keeps_columns: bool = False

    def example(self, row: Mapping[str, Any], encoder: Encoder, max_length: int | None) -> Example:
        """The example of one row.

        Args:
            max_length: the text is truncated at its end.

        Raises:
            ValueError: names the invalid column or image.
        """
        pictures = pictures_of(row)
        if "messages" in row or self.column in row:
            return self._text(row, pictures, encoder, max_length)
        if not {"prompt", "completion"} <= row.keys():
            raise ValueError(f"Unexpected input keys in examples: {list(row)}.")
        if not self.keeps_columns:
            row = {name: cell for name, cell in row.items() if name != "chat_template_kwargs"}
        chosen = prompt_with_answers(row, ("completion",), encoder, max_length, self.chat_template)
        if self.completion_only is None or self.completion_only:
            return chosen
        return chosen._replace(labels=chosen.texts)

    def _text(self, row: Mapping[str, Any], pictures: list[Any], encoder: Encoder, max_length: int | None) -> Example:
        if self.completion_only:
            raise ValueError("The `completion_only_loss` argument is not supported for language modeling datasets.")
        spans = None
        if "messages" not in row:
            if not isinstance(row[self.column], str):
                raise checks.cell_error(_ROW, self.column, row[self.column], "a text")
            text = row[self.column]
        else:
            checks.check_no_media(row["messages"], f"{_ROW}, column 'messages'", images=True)
            messages = prepare_multimodal_messages(without_null(row["messages"]), pictures)
            pictures = pictures_in(messages)
            if self.assistant_only:
                text, spans = chat.rendered_spans(encoder.tokenizer, messages, _ROW, self.chat_template)
                if not spans:
                    raise ValueError("the chat template marks no assistant content. Leave the row out.")
            else:
                text = chat.rendered(encoder.tokenizer, messages, _ROW, **_template(self.chat_template), tokenize=False)
        encoded = encoder.encode(text, pictures, max_length=max_length, spans=spans)
        labels = encoded.ids if spans is None else np.where(encoded.marked, encoded.ids, IGNORED)
        return _example(encoded.ids, labels, encoded.images)


def prompt_with_answers(
    row: Mapping[str, Any],
    answers: Sequence[str],
    encoder: Encoder,
    max_length: int | None,
    chat_template: str | None = None,
) -> Example:
    """One text per answer column, each the row's prompt with its images followed by the answer. Only answer tokens have
    labels.

    Raises:
        ValueError: a column is missing or has the wrong format, or `max_length` truncates an image.
    """
    return with_answers(read_prompt(row, answers, encoder, chat_template), encoder, max_length)


class PromptAndAnswers(NamedTuple):
    """A row as text: the prompt, the text that each answer adds to it, and the prompt's images."""

    prompt: str
    answers: list[str]
    pictures: list[Any]


def read_prompt(
    row: Mapping[str, Any], answers: Sequence[str], encoder: Encoder, chat_template: str | None = None
) -> PromptAndAnswers:
    """Render a row's prompt and answers.

    Raises:
        ValueError: a column is missing or has the wrong format.
    """
    missing = [column for column in ("prompt", *answers) if row.get(column) is None]
    if missing:
        raise ValueError(f"the row has no {missing[0]!r}; its columns are {', '.join(row)}.")
    chat.check_contents(dict(row), ["prompt", *answers], _ROW, "Give all of them as messages, or all as text.")
    prompt, texts, pictures = row["prompt"], [row[column] for column in answers], pictures_of(row)
    if chat.is_messages(prompt):
        for column in ("prompt", *answers):
            checks.check_no_media(row[column], f"{_ROW}, column {column!r}", images=True)
        prompt = prepare_multimodal_messages(without_null(prompt), pictures)
        pictures, options = pictures_in(prompt), _template(chat_template) | {"tokenize": False}
        # As in TRL, rows with images pass `chat_template_kwargs` to the template, but not `tools`.
        options |= {name: value for name, value in chat.template_options(dict(row), _ROW).items() if name != "tools"}
        conversations = [[*prompt, *prepare_multimodal_messages(without_null(text))] for text in texts]
        full_texts = [chat.rendered(encoder.tokenizer, messages, _ROW, **options) for messages in conversations]
        prompt_text = chat.rendered(encoder.tokenizer, prompt, _ROW, **options, **chat.prompt_options(prompt))
        prefix_length = min(sft.common_prefix(list(prompt_text), list(text)) for text in full_texts)
        prompt, texts = prompt_text[:prefix_length], [text[prefix_length:] for text in full_texts]
    return PromptAndAnswers(prompt, texts, pictures)


def with_answers(texts: PromptAndAnswers, encoder: Encoder, max_length: int | None) -> Example:
    """Tokenize the prompt with each answer; only answer tokens have labels.

    Raises:
        ValueError: `max_length` truncates an image, or an image cannot be read.
    """
    prompt = encoder.encode(texts.prompt, texts.pictures)
    examples = []
    for answer in texts.answers:
        answer_ids = encoder.encode(answer).ids
        ids = np.concatenate([prompt.ids, answer_ids])[:max_length]
        labels = np.where(np.arange(len(ids)) < len(prompt.ids), IGNORED, ids)
        examples.append(_example(ids, labels, prompt.images.before(len(answer_ids)).cut(max_length)))
    if max_length is not None and (prompt.images.features[max_length:] != -1).any():
        raise ValueError(
            f"max_length={max_length} cuts an image: the prompt has {len(prompt.ids)} tokens. Raise max_length, or set "
            "it to None."
        )
    return Example(
        tuple(text for example in examples for text in example.texts),
        labels=tuple(labels for example in examples for labels in example.labels),
        images=prompt.images.images,
        features=tuple(features for example in examples for features in example.features),
        positions=tuple(positions for example in examples for positions in example.positions),
    )


def _template(chat_template: str | None) -> dict[str, Any]:
    return {} if chat_template is None else {"chat_template": chat_template}


def _example(ids: np.ndarray, labels: np.ndarray, images: TextImages) -> Example:
    positions = () if images.positions is None else (images.positions,)
    return Example((ids,), labels=(labels,), images=images.images, features=(images.features,), positions=positions)
