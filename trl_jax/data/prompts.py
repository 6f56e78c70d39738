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

_WANTED = 'a string, or messages such as [{"role": "user", "content": "..."}]'
_EMPTY = "A completion needs at least one token before it: leave the row out, or start prompts with the BOS token."


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
        _check_table(dataset, name, _begins(tokenizer), images)
    return dataset


def checked_stream(
    dataset: IterableDataset, name: str, tokenizer: Any, *, images: bool, shuffled: bool = False
) -> IterableDataset:
    """A stream that checks each row when it is read; arguments and errors as for `check_prompts`. The row numbers of a
    stream that is `shuffled` count the rows read."""
    place = f"{argument(name)}, shuffled," if shuffled else argument(name)
    facts = {"place": place, "begins": _begins(tokenizer), "images": images}
    return dataset.map(_checked, with_indices=True, fn_kwargs=facts, features=dataset.features)


def check_row(row: Mapping[str, Any], number: int, name: str, tokenizer: Any, *, images: bool) -> None:
    """Check a row that a transform returned; errors as for `check_prompts`."""
    _checked(row, number, argument(name), _begins(tokenizer), images)


def _begins(tokenizer: Any) -> bool:
    """Whether the tokenizer starts each text with a special token, so that an empty text is not empty."""
    return bool(_ids([""], tokenizer)[0])


def _check_table(dataset: Dataset, name: str, begins: bool, images: bool) -> None:
    """Raise ValueError for the first invalid prompt. Only suspicious rows are converted to Python values."""
    if {"image", "images"}.intersection(dataset.column_names) and len(dataset):
        _check_messages(dataset[:1]["prompt"][0])
    plain = dataset.select_columns("prompt").with_format(None)
    for first, block in blocks(dataset, ("prompt",)):
        doubtful = np.flatnonzero(_doubtful(block.column("prompt").combine_chunks(), begins))
        prompts = plain[first : first + len(block)]["prompt"] if doubtful.size else []
        for row in doubtful.tolist():
            _checked({"prompt": prompts[row]}, first + row, argument(name), begins, images)


def _doubtful(prompts: pa.Array, begins: bool) -> np.ndarray:
    """The prompts that `_checked` might reject, bool `[rows]`."""
    kind = prompts.type
    if pa.types.is_string(kind) or pa.types.is_large_string(kind):
        bad = prompts.is_null() if begins else pc.equal(pc.fill_null(prompts, ""), "")
        return numbers_of(bad)
    every = np.ones(len(prompts), bool)
    if not is_list(kind) or not pa.types.is_struct(kind.value_type):
        return every
    names = {kind.value_type.field(number).name for number in range(kind.value_type.num_fields)}
    if not {"role", "content"} <= names:
        return every
    messages, rows = prompts.flatten(), numbers_of(pc.list_parent_indices(prompts))
    role, content = (pc.struct_field(messages, column) for column in ("role", "content"))
    if len(messages) != len(rows) or not (pa.types.is_string(content.type) or pa.types.is_large_string(content.type)):
        return every  # contents are lists of parts, or JSON, in which null is text
    bad = numbers_of(pc.or_(role.is_null(), content.is_null()))
    if "tool_calls" in names and is_list((calls := pc.struct_field(messages, "tool_calls")).type):
        called = pc.greater(pc.fill_null(pc.list_value_length(calls), 0), 0)
        bad = bad & numbers_of(pc.or_(role.is_null(), pc.invert(called)))
    found = numbers_of(pc.equal(pc.fill_null(pc.list_value_length(prompts), 0), 0)).copy()
    found[rows[bad]] = True
    return found


def _checked(row: Mapping[str, Any], number: int, place: str, begins: bool, images: bool) -> dict[str, Any]:
    """Raise ValueError for a row with an invalid prompt.

    Args:
        place: the dataset, as errors name it.
        begins: whether the tokenizer starts every text with a special token, so that an empty prompt is valid.
    """
    where = f"Row {number} of {place}"
    check_has(row, number, ("prompt",), place)
    if not images:
        checks.check_no_images(row, place)
    prompt = row["prompt"]
    if "image" in row or "images" in row:
        _check_messages(prompt)
    if prompt == "" and not begins:
        raise ValueError(f"{where} has an empty prompt. {_EMPTY}")
    if not isinstance(prompt, str):
        if not is_conversation(prompt):
            raise cell_error(where, "prompt", prompt, _WANTED)
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
        other = next(prompt for prompt in prompts if is_conversation(prompt) != is_conversation(prompts[0]))
        raise ValueError(
            f"Prompts must be all strings or all messages, got {brief(prompts[0])} and {brief(other)}. Convert one "
            "kind to the other."
        )
    if kinds == {True}:
        _warn_of_answers(prompts)
        options = {"add_generation_prompt": True, "tokenize": True, "return_dict": True, **(template_options or {})}
        ids = []
        for prompt, alike in groupby(prompts):  # equal prompts of a group are adjacent
            own = rendered(tokenizer, list(prompt), f"The prompt {brief(prompt, 300)}", **options)["input_ids"]
            ids += [own] * len(list(alike))
    else:
        ids = _ids(prompts, tokenizer)
    if not all(map(len, ids)):
        empty = next(prompt for prompt, own in zip(prompts, ids, strict=True) if not own)
        raise ValueError(f"The prompt {brief(empty)} is empty. {_EMPTY}")
    return [list(own) if max_prompt_length is None else list(own[-max_prompt_length:]) for own in ids]


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
    return [
        prepare_multimodal_messages(without_null(row["prompt"]), own) for row, own in zip(rows, pictures, strict=True)
    ]


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
    for _, [prompt, *others] in groupby(prompts, _comparable):  # equal prompts of a group are adjacent
        messages, where = prepare_multimodal_messages(prompt), f"The prompt {brief(prompt, 300)}"
        found = encoded_messages(messages, encoder, where, **options)
        too_long = max_prompt_length is not None and len(found.ids) > max_prompt_length
        if too_long and not found.images.images:
            own = found.ids[-max_prompt_length:]
            found = found._replace(ids=own, images=encoder.placed(own, ()))
        elif too_long:
            raise ValueError(
                f"{where} has {len(found.ids)} tokens, and prompts with images cannot be cut to "
                f"max_prompt_length={max_prompt_length}. Raise it, or leave it out."
            )
        count = 1 + len(others)
        ids += [found.ids.tolist()] * count
        images += [found.images] * count
    return ids, images


def _comparable(value: Any) -> Any:
    """The prompt with images that are arrays (or torch tensors) as bytes: `==` on arrays is no single truth value."""
    if isinstance(value, Mapping):
        return {key: _comparable(own) for key, own in value.items()}
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
    for _, [(prompt, ids), *others] in groupby(zip(prompts, map(list, prompt_ids), strict=True), _comparable):
        images += [encoder.place(ids, pictures_in(prepare_multimodal_messages(prompt)))] * (1 + len(others))
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
        both = zip(ids, prompt_ids, strict=True)
        return [[parsed_message(list(own), list(before), tokenizer)] for own, before in both]
    texts = tokenizer.batch_decode([list(own) for own in ids], skip_special_tokens=True)
    if not is_conversation(prompts[0]):
        return texts
    return [[{"role": "assistant", "content": text}] for text in texts]


def parsed_message(
    ids: list[int], before: list[int], tokenizer: Any, tools: list[Callable] | None = None
) -> dict[str, Any]:
    """Parse a message into content, reasoning and tool calls with the tokenizer's `response_template`; a malformed
    message becomes plain text.

    Args:
        before: the tokens before the message.
        tools: functions whose annotations determine the argument types of calls.
    """
    try:
        message = tokenizer.parse_response(ids, prefix=before, tools=tools)
        if message is None:
            raise ValueError("no message")
        content = message.get("content")
        message["content"] = (
            content.removesuffix(tokenizer.eos_token or "") if isinstance(content, str) else content or ""
        )
        for call in message.get("tool_calls") or ():
            _settle_call(call)
        return message
    except (TypeError, ValueError, RecursionError):  # RecursionError: deeply nested JSON
        return {"role": "assistant", "content": tokenizer.decode(ids, skip_special_tokens=True)}


def _settle_call(call: Any) -> None:
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
    facts = {"tokenizer": tokenizer, "name": name}
    dropped = [column for column in ("input_ids", "attention_mask") if column in columns]
    return dataset.map(_with_prompt, with_indices=True, fn_kwargs=facts, remove_columns=dropped)


def _with_prompt(row: dict[str, Any], number: int, tokenizer: Any, name: str) -> dict[str, str]:
    given = row["input_ids"]
    if isinstance(given, Mapping):  # what apply_chat_template returns since transformers 5
        given = given["input_ids"]
    ids = _without_pads(list(given), tokenizer.pad_token_id)
    found = tokenizer("")["input_ids"]  # what the tokenizer adds to every text
    begins = found[:1] if found and ids[:1] == found[:1] == [tokenizer.bos_token_id] else []
    text = tokenizer.decode(ids[len(begins) :], skip_special_tokens=False, clean_up_tokenization_spaces=False)
    if tokenizer(text)["input_ids"] != ids:
        raise ValueError(
            f"{argument(name)}: the input_ids of row {number} decode to {brief(text)}, which tokenizes differently. "
            "Pass a column 'prompt' with texts or messages instead."
        )
    return {"prompt": text}


def _without_pads(ids: list[int], pad: int | None) -> list[int]:
    """The ids without leading and trailing pad tokens."""
    real = [place for place, token in enumerate(ids) if token != pad]
    return ids[real[0] : real[-1] + 1] if real else []
