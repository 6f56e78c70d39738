"""Rows of online training: check and tokenize prompts, and decode completions."""

from __future__ import annotations

import logging
import warnings
from collections.abc import Callable, Mapping, Sequence
from itertools import groupby
from typing import Any

import numpy as np
import pyarrow as pa
import pyarrow.compute as pc
from datasets import Dataset, IterableDataset

from trl_jax.core.text import brief
from trl_jax.data import checks
from trl_jax.data.chat import check_unicode, rendered
from trl_jax.data.chat_templates import prepare_multimodal_messages
from trl_jax.data.checks import argument, blocks, cell_error, has_transform, is_list, numbers_of
from trl_jax.data.image_rows import Encoder, pictures_in, pictures_of, without_null
from trl_jax.data.images import TextImages, as_array, is_array
from trl_jax.data.tokenize import check_has

logger = logging.getLogger(__name__)

_VALID_PROMPT = 'a string, or messages such as [{"role": "user", "content": "..."}]'
_ADVICE = "A completion needs at least one token before it: leave the row out, or start prompts with the BOS token."


def check_prompts(
    dataset: Dataset | IterableDataset, name: str, tokenizer: Any, *, images: bool = False
) -> Dataset | IterableDataset:
    """Check that every row has a valid `prompt`, and return the dataset. Other columns are for reward functions.

    A table is checked completely, a stream only at its first row; `checked_stream` checks the others as they arrive. In
    a table with a transform no rows are read, because a random transform would then return different rows later;
    `check_row` checks them.

    Args:
        images: whether rows may have images.

    Raises:
        TypeError: not a dataset.
        KeyError: there is no column `prompt`.
        ValueError: a row has images that are not allowed, or its prompt is empty or neither text nor messages with
            content.
    """
    if not isinstance(dataset, Dataset | IterableDataset):
        raise TypeError(f"{name} must be a Dataset or IterableDataset of datasets, got a {type(dataset).__name__}.")
    if has_transform(dataset):
        return dataset
    columns = dataset.column_names
    if columns is not None and "prompt" not in columns:
        raise KeyError(
            f"{argument(name)} must have the column 'prompt', got {brief(list(columns), 500)}. Rename the column with "
            "the prompts: dataset.rename_column(old_name, 'prompt')."
        )
    if not images:
        checks.check_no_images(columns or (), argument(name))
    if isinstance(dataset, IterableDataset):
        next(iter(checked_stream(dataset, name, tokenizer, images=images)), None)
    else:
        _check_table(dataset, name, _adds_bos(tokenizer), images)
    return dataset


def checked_stream(
    dataset: IterableDataset, name: str, tokenizer: Any, *, images: bool, shuffled: bool = False
) -> IterableDataset:
    """A stream that checks each row when it is read; arguments and errors as for `check_prompts`. The row numbers of a
    stream that is `shuffled` count the rows read."""
    place = f"{argument(name)}, shuffled," if shuffled else argument(name)
    arguments = {"place": place, "adds_bos": _adds_bos(tokenizer), "images": images}
    return dataset.map(_check_prompt, with_indices=True, fn_kwargs=arguments, features=dataset.features)


def check_row(row: Mapping[str, Any], number: int, name: str, tokenizer: Any, *, images: bool) -> None:
    """Check a row that a transform returned; errors as for `check_prompts`."""
    _check_prompt(row, number, argument(name), _adds_bos(tokenizer), images)


def _adds_bos(tokenizer: Any) -> bool:
    """Whether the tokenizer starts each text with a special token, so that an empty text is not empty."""
    return bool(_ids([""], tokenizer)[0])


def _check_table(dataset: Dataset, name: str, adds_bos: bool, images: bool) -> None:
    """Raise ValueError for the first invalid prompt. Only suspicious rows are converted to Python values."""
    if {"image", "images"}.intersection(dataset.column_names) and len(dataset):
        _check_messages(dataset[:1]["prompt"][0])
    plain = dataset.select_columns("prompt").with_format(None)
    for first, block in blocks(dataset, ("prompt",)):
        suspicious = np.flatnonzero(_is_suspicious(block.column("prompt").combine_chunks(), adds_bos))
        prompts = plain[first : first + len(block)]["prompt"] if suspicious.size else []
        for row in suspicious.tolist():
            _check_prompt({"prompt": prompts[row]}, first + row, argument(name), adds_bos, images)


def _is_suspicious(prompts: pa.Array, adds_bos: bool) -> np.ndarray:
    """The prompts that `_check_prompt` might reject, bool `[rows]`."""
    kind = prompts.type
    if pa.types.is_string(kind) or pa.types.is_large_string(kind):
        bad = prompts.is_null() if adds_bos else pc.equal(pc.fill_null(prompts, ""), "")
        return numbers_of(bad)
    all_rows = np.ones(len(prompts), bool)
    if not is_list(kind) or not pa.types.is_struct(kind.value_type):
        return all_rows
    names = {kind.value_type.field(index).name for index in range(kind.value_type.num_fields)}
    if not {"role", "content"} <= names:
        return all_rows
    messages, rows = prompts.flatten(), numbers_of(pc.list_parent_indices(prompts))
    roles, contents = (pc.struct_field(messages, column) for column in ("role", "content"))
    if len(messages) != len(rows) or not (pa.types.is_string(contents.type) or pa.types.is_large_string(contents.type)):
        return all_rows  # contents are lists of parts, or JSON, in which null is text
    bad = numbers_of(pc.or_(roles.is_null(), contents.is_null()))
    if "tool_calls" in names and is_list((calls := pc.struct_field(messages, "tool_calls")).type):
        has_calls = pc.greater(pc.fill_null(pc.list_value_length(calls), 0), 0)
        bad = bad & numbers_of(pc.or_(roles.is_null(), pc.invert(has_calls)))
    suspicious = numbers_of(pc.equal(pc.fill_null(pc.list_value_length(prompts), 0), 0)).copy()
    suspicious[rows[bad]] = True
    return suspicious


def _check_prompt(row: Mapping[str, Any], number: int, place: str, adds_bos: bool, images: bool) -> dict[str, Any]:
    """Raise ValueError for a row with an invalid prompt.

    Args:
        place: the dataset, as errors name it.
        adds_bos: whether the tokenizer starts every text with a special token, so that an empty prompt is valid.
    """
    where = f"Row {number} of {place}"
    check_has(row, number, ("prompt",), place)
    if not images:
        checks.check_no_images(row, place)
    prompt = row["prompt"]
    if "image" in row or "images" in row:
        _check_messages(prompt)
    if prompt == "" and not adds_bos:
        raise ValueError(f"{where} has an empty prompt. {_ADVICE}")
    if not isinstance(prompt, str):
        if not is_conversation(prompt):
            raise cell_error(where, "prompt", prompt, _VALID_PROMPT)
        for message in prompt:
            _check_message(message, where)
    check_unicode(prompt, "prompt", where)
    checks.check_no_media(prompt, f"{where}, column 'prompt'", images=images)
    return {}


def _check_messages(prompt: Any) -> None:
    """Raise ValueError, in TRL's words, for a prompt with images that is not a conversation."""
    if not is_conversation(prompt):
        raise ValueError(
            "Multimodal training requires conversational prompts. It looks like the dataset contains "
            "non-conversational inputs, likely because a chat template was applied before passing the dataset "
            "to the trainer. Please provide the raw conversational prompts and let the trainer apply the chat "
            "template internally."
        )


def _check_message(message: Any, where: str) -> None:
    """Raise ValueError unless a message has a role, and content or tool calls."""
    if not isinstance(message, Mapping) or not isinstance(message.get("role"), str):
        raise cell_error(where, "prompt", message, "messages, each a dict with role and content")
    if message.get("content") is None and not message.get("tool_calls"):
        raise cell_error(where, "prompt", message, "a message with content ('' if it is empty)")


def is_conversation(prompt: Any) -> bool:
    """Whether a prompt is a list of messages with roles."""
    return isinstance(prompt, Sequence) and bool(prompt) and isinstance(prompt[0], Mapping) and "role" in prompt[0]


def prompt_ids(
    prompts: Sequence[Any],
    tokenizer: Any,
    *,
    template_options: Mapping[str, Any] | None = None,
    max_prompt_length: int | None = None,
) -> list[list[int]]:
    """Token ids of prompts: texts with the tokenizer's special tokens, conversations with the generation prompt.

    Args:
        template_options: extra arguments for the chat template.
        max_prompt_length: keep only this many last tokens; None keeps all.
    """
    kinds = {is_conversation(prompt) for prompt in prompts}
    if len(kinds) > 1:
        different = next(prompt for prompt in prompts if is_conversation(prompt) != is_conversation(prompts[0]))
        raise ValueError(
            f"Prompts must be all strings or all messages, got {brief(prompts[0])} and {brief(different)}. Convert one "
            "kind to the other."
        )
    if kinds == {True}:
        _warn_of_answers(prompts)
        options = {"add_generation_prompt": True, "tokenize": True, "return_dict": True, **(template_options or {})}
        ids = []
        for prompt, equal_prompts in groupby(prompts):  # equal prompts of a group are adjacent
            tokens = rendered(tokenizer, list(prompt), f"The prompt {brief(prompt, 300)}", **options)["input_ids"]
            ids += [tokens] * len(list(equal_prompts))
    else:
        ids = _ids(prompts, tokenizer)
    if not all(map(len, ids)):
        empty = next(prompt for prompt, tokens in zip(prompts, ids, strict=True) if not tokens)
        raise ValueError(f"The prompt {brief(empty)} is empty. {_ADVICE}")
    last_tokens = slice(None if max_prompt_length is None else -max_prompt_length, None)
    return [list(tokens[last_tokens]) for tokens in ids]


def _warn_of_answers(prompts: Sequence[Any]) -> None:
    if any(prompt[-1]["role"] == "assistant" for prompt in prompts):
        warnings.warn(
            "A prompt ends with an assistant message. As in TRL, that message is not continued: the completion is a "
            "new message after it. End prompts with a user message.",
            stacklevel=3,
        )


# Prompts with images


def prompts_with_images(rows: Sequence[Mapping[str, Any]]) -> list:
    """The prompts of rows, with the images of their image columns inserted into the messages."""
    pictures = [pictures_of(row) for row in rows]
    if not any(pictures):
        return [without_null(row["prompt"]) for row in rows]
    pairs = zip(rows, pictures, strict=True)
    return [prepare_multimodal_messages(without_null(row["prompt"]), images) for row, images in pairs]


def encoded_prompts(
    prompts: Sequence[Any],
    encoder: Encoder,
    *,
    template_options: Mapping[str, Any] | None = None,
    max_prompt_length: int | None = None,
) -> tuple[list[list[int]], list[TextImages]]:
    """Token ids of conversations with the generation prompt, and their images; arguments as for `prompt_ids`.

    Raises:
        ValueError: a prompt with images exceeds `max_prompt_length`.
    """
    _warn_of_answers(prompts)
    ids, images = [], []
    options = {"add_generation_prompt": True, **(template_options or {})}
    for _, [prompt, *equal_prompts] in groupby(prompts, _comparable):  # equal prompts of a group are adjacent
        messages, where = prepare_multimodal_messages(prompt), f"The prompt {brief(prompt, 300)}"
        encoded = encoded_messages(messages, encoder, where, **options)
        too_long = max_prompt_length is not None and len(encoded.ids) > max_prompt_length
        if too_long and not encoded.images.images:
            last_ids = encoded.ids[-max_prompt_length:]
            encoded = encoded._replace(ids=last_ids, images=encoder.placed(last_ids, ()))
        elif too_long:
            raise ValueError(
                f"{where} has {len(encoded.ids)} tokens, and prompts with images cannot be cut to "
                f"max_prompt_length={max_prompt_length}. Raise it, or leave it out."
            )
        count = 1 + len(equal_prompts)
        ids += [encoded.ids.tolist()] * count
        images += [encoded.images] * count
    return ids, images


def _comparable(value: Any) -> Any:
    """The prompt with images that are arrays (or torch tensors) as bytes: `==` on arrays is no single truth value."""
    if isinstance(value, Mapping):
        return {key: _comparable(item) for key, item in value.items()}
    if isinstance(value, list | tuple):
        return list(map(_comparable, value))
    if is_array(value):
        return value.shape, as_array(value).tobytes()
    return value


def encoded_messages(messages: list[dict[str, Any]], encoder: Encoder, where: str, **options: Any) -> Any:
    """Tokenize a conversation whose contents are lists of parts, with its images.

    Args:
        options: arguments for the chat template.
    """
    text, bos = rendered(encoder.tokenizer, messages, where, tokenize=False, **options), encoder.tokenizer.bos_token
    special = bos is None or not text.startswith(bos)  # as transformers' processors tokenize a rendered text
    return encoder.encode(text, pictures_in(messages), add_special_tokens=special)


def placed_images(prompts: Sequence[Any], prompt_ids: Sequence[Sequence[int]], encoder: Encoder) -> list[TextImages]:
    """The images of prompts that a script has tokenized.

    Raises:
        ValueError: the number of image tokens in a prompt differs from the number that its images need.
    """
    images: list[TextImages] = []
    for _, [(prompt, ids), *equal_prompts] in groupby(zip(prompts, map(list, prompt_ids), strict=True), _comparable):
        images += [encoder.place(ids, pictures_in(prepare_multimodal_messages(prompt)))] * (1 + len(equal_prompts))
    return images


def _ids(prompts: Sequence[str], tokenizer: Any) -> list[list[int]]:
    return tokenizer(text=list(prompts))["input_ids"]


def completion_texts(
    prompts: Sequence[Any],
    ids: Sequence[Sequence[int]],
    tokenizer: Any,
    prompt_ids: Sequence[Sequence[int]] | None = None,
) -> list[Any]:
    """Completions as reward functions see them: text without special tokens, or a list of one assistant message if the
    prompts are conversations.

    Args:
        prompt_ids: token ids of the prompts, needed to parse messages with the tokenizer's `response_template`, if it
            has one; None: messages are not parsed.
    """
    if prompt_ids is not None and is_conversation(prompts[0]) and vars(tokenizer).get("response_template") is not None:
        pairs = zip(ids, prompt_ids, strict=True)
        return [[parsed_message(list(completion), list(prompt), tokenizer)] for completion, prompt in pairs]
    texts = tokenizer.batch_decode([list(completion) for completion in ids], skip_special_tokens=True)
    if not is_conversation(prompts[0]):
        return texts
    return [[{"role": "assistant", "content": text}] for text in texts]


def parsed_message(
    ids: list[int], prompt_tokens: list[int], tokenizer: Any, tools: list[Callable] | None = None
) -> dict[str, Any]:
    """Parse a message into content, reasoning and tool calls with the tokenizer's `response_template`; a malformed
    message becomes plain text.

    Args:
        prompt_tokens: the tokens before the message.
        tools: functions whose annotations determine the argument types of calls.
    """
    try:
        message = tokenizer.parse_response(ids, prefix=prompt_tokens, tools=tools)
        if message is None:
            raise ValueError("no message")
        content = message.get("content")
        message["content"] = (
            content.removesuffix(tokenizer.eos_token or "") if isinstance(content, str) else content or ""
        )
        for call in message.get("tool_calls") or ():
            _fill_arguments(call)
        return message
    except (TypeError, ValueError, RecursionError):  # RecursionError: deeply nested JSON
        return {"role": "assistant", "content": tokenizer.decode(ids, skip_special_tokens=True)}


def _fill_arguments(call: Any) -> None:
    """Set missing arguments of a tool call to {}. Raises ValueError if it has no name."""
    function = call.get("function", call) if isinstance(call, dict) else None
    if not isinstance(function, dict) or not isinstance(function.get("name"), str):
        raise ValueError("a call of a tool without a name")
    if function.get("arguments") is None:
        function["arguments"] = {}


# Tokenized prompts, which RLOOTrainer accepted up to TRL 0.21


def as_prompts(dataset: Any, name: str, tokenizer: Any) -> Any:
    """Decode `input_ids` into a `prompt` column if there is none; other datasets are returned unchanged.

    Raises:
        ValueError: the decoded text does not tokenize to the same ids.
    """
    columns = dataset.column_names if isinstance(dataset, Dataset | IterableDataset) else None
    if has_transform(dataset) or columns is None or "prompt" in columns or "input_ids" not in columns:
        return dataset
    logger.warning(
        "%s has prompts as input_ids, as RLOOTrainer took them up to TRL 0.21: they are decoded to texts. Pass a "
        "column 'prompt' with texts or messages instead.",
        argument(name),
    )
    arguments = {"tokenizer": tokenizer, "name": name}
    dropped = [column for column in ("input_ids", "attention_mask") if column in columns]
    return dataset.map(_with_prompt, with_indices=True, fn_kwargs=arguments, remove_columns=dropped)


def _with_prompt(row: dict[str, Any], number: int, tokenizer: Any, name: str) -> dict[str, str]:
    ids = row["input_ids"]
    if isinstance(ids, Mapping):  # what apply_chat_template returns since transformers 5
        ids = ids["input_ids"]
    ids = _without_pads(list(ids), tokenizer.pad_token_id)
    added_ids = tokenizer("")["input_ids"]  # what the tokenizer adds to every text
    bos = added_ids[:1] if added_ids and ids[:1] == added_ids[:1] == [tokenizer.bos_token_id] else []
    text = tokenizer.decode(ids[len(bos) :], skip_special_tokens=False, clean_up_tokenization_spaces=False)
    if tokenizer(text)["input_ids"] != ids:
        raise ValueError(
            f"{argument(name)}: the input_ids of row {number} decode to {brief(text)}, which tokenizes differently. "
            "Pass a column 'prompt' with texts or messages instead."
        )
    return {"prompt": text}


def _without_pads(ids: list[int], pad: int | None) -> list[int]:
    """The ids without leading and trailing pad tokens."""
    real = [index for index, token in enumerate(ids) if token != pad]
    return ids[real[0] : real[-1] + 1] if real else []
