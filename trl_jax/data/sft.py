"""Rows of supervised fine-tuning: token ids and labels from every dataset format that TRL accepts."""

from __future__ import annotations

import copy
import logging
from collections.abc import Callable, Mapping, Sequence
from functools import cache
from itertools import pairwise, takewhile
from typing import Any, Literal, NamedTuple

import numpy as np
import pyarrow as pa
from datasets import Dataset, IterableDataset, concatenate_datasets

from trl_jax.core.text import brief, printable
from trl_jax.data import chat, checks, reward, tokenize
from trl_jax.data.batch import IGNORED, rows_of
from trl_jax.data.chat_templates import has_generation_markers, stop_token_is_trained, training_template
from trl_jax.data.checks import blocks, list_lengths
from trl_jax.data.packing import pack_dataset
from trl_jax.data.tokenize import check_has

logger = logging.getLogger(__name__)

COLUMNS = ("input_ids", "labels")
_NO_LABEL = "have no token to train on: their labels are all -100"
_WAY_OUT = "If prompts fill max_length, raise it or pass truncation_mode='keep_end'."


def prepare(
    dataset: Dataset | IterableDataset,
    tokenizer: Any,
    *,
    max_length: int | None,
    num_proc: int | None,
    name: str,
    dataset_text_field: str = "text",
    truncation_mode: str = "keep_start",
    completion_only_loss: bool | None = None,
    assistant_only_loss: bool = False,
    packing: bool = False,
    packing_strategy: str = "bfd",
    packing_parts: int | None = None,
    formatting_func: Callable[[dict[str, Any]], str] | None = None,
    chat_template: str | None = None,
    shuffle_dataset: bool = False,
    seed: int = 0,
    skip_prepare_dataset: bool = False,
    answer_marks: AnswerMarks | None = None,
    collate: ScriptCollator | None = None,
) -> Dataset | IterableDataset:
    """Add `input_ids` and `labels` to a dataset; with packing, only these and `seq_lengths` are kept.

    Rows are packed, or truncated to `max_length` and dropped if no label is left. Rows that are already packed (they
    have `seq_lengths`) are not changed.

    Args:
        num_proc: number of processes for tokenization.
        name: "train", "eval", "test", or the dataset's name in errors, such as "eval_dataset['key']".
        packing_parts: number of parts of a table that are packed separately, as TRL packs the rows of each of its
            tokenizing processes separately; None packs the whole table.
        completion_only_loss: None enables it for rows with prompts and completions.
        chat_template: replaces the tokenizer's chat template. None keeps it or, with `assistant_only_loss`, uses one
            that marks assistant content.
        seed: seed for `shuffle_dataset`.
        skip_prepare_dataset: the rows are already tokenized; nothing is truncated, packed or shuffled.
        answer_marks: only the answers that these tokens mark have labels; not for packed rows.
        collate: a script's own collator, which determines ids and labels; not for packed rows.

    Raises:
        TypeError, ValueError, RuntimeError: the dataset, an option or a row is invalid; a stream raises when it reaches
            the row.
    """
    where = checks.argument(name)
    plain, first = tokenize.peek(checks.materialize(dataset, name) if skip_prepare_dataset else dataset, name)
    if skip_prepare_dataset and collate is not None:
        return collated(plain, collate, where)
    if skip_prepare_dataset:
        plain = _unprepared(plain, first, name, num_proc)
        return plain if answer_marks is None else _label_answers(plain, answer_marks, num_proc, where)
    check_lengths(packing, packing_strategy, max_length, truncation_mode)
    row_format, completion_only = format_of_rows(
        first, where, column=dataset_text_field, formatting_func=formatting_func,
        completion_only_loss=completion_only_loss, assistant_only_loss=assistant_only_loss,
    )  # fmt: skip
    for column in row_format.needed if row_format.conversational else ():
        checks.check_no_media(first[column], f"Row 0 of {where}, column {column!r}")
    if assistant_only_loss and row_format.conversational:
        chat_template = chat_template or marked_template(tokenizer)
        warn_of_stop_token(tokenizer, chat_template)
    packs = packing and not (row_format.kind == "ids" and "seq_lengths" in first)
    plain = _tokenized(
        plain,
        num_proc,
        where,
        tokenizer=tokenizer,
        row_format=row_format,
        masking=Masking(completion_only, assistant_only_loss, chat_template),
        max_length=None if packs else max_length,
        keep_end=truncation_mode == "keep_end",
    )
    plain = _without_unlabeled(plain, where, drops=max_length is not None and not packs)
    if answer_marks is not None:
        plain = _label_answers(plain, answer_marks, num_proc, where)
    if collate is not None:
        plain = collated(plain, collate, where)
    if packs:
        plain = plain.select_columns(list(COLUMNS))
        plain = plain.shuffle(seed=seed) if shuffle_dataset else plain
        plain = _packed(plain, max_length, packing_strategy, packing_parts, where)
    return plain.shuffle(seed=seed) if shuffle_dataset else plain


def _packed(
    dataset: Dataset | IterableDataset, max_length: int, strategy: str, parts: int | None, where: str
) -> Dataset | IterableDataset:
    options = tokenize.map_options(dataset, None, f"Packing {where}")
    if isinstance(dataset, IterableDataset) or not parts:
        return pack_dataset(dataset, max_length, strategy, options)
    count = min(parts, len(dataset))
    pieces = [dataset.shard(count, index, contiguous=True) for index in range(count)]
    return concatenate_datasets([pack_dataset(piece, max_length, strategy, options) for piece in pieces])


def _label_answers(
    dataset: Dataset | IterableDataset, marks: AnswerMarks, num_proc: int | None, where: str
) -> Dataset | IterableDataset:
    return label_answers(dataset, marks, where, tokenize.map_options(dataset, num_proc, f"Labeling answers of {where}"))


def marked_template(tokenizer: Any) -> str | None:
    """None if the tokenizer's own template marks assistant content, else a training template.

    Also None if there is no template; rows raise an error for that later.
    """
    template = tokenizer.chat_template
    if template is None or has_generation_markers(template):
        return None
    return _training_template(template["default"] if isinstance(template, dict) else template)


@cache
def _training_template(chat_template: str) -> str:
    return training_template(chat_template)  # computed once per process: rows with images call this during training


def warn_of_stop_token(tokenizer: Any, chat_template: str | None) -> None:
    """Warn if the template leaves the end-of-turn token out of the assistant content."""
    if tokenizer.chat_template is not None and not stop_token_is_trained(tokenizer, chat_template):
        logger.warning(
            "The chat template does not include the assistant turn's end-of-turn token in the loss mask; the model may "
            "not learn to stop. Put that token before `{% endgeneration %}`, or set `assistant_only_loss=False`."
        )


def _unprepared(
    dataset: Dataset | IterableDataset, first: dict[str, Any], name: str, num_proc: int | None
) -> Dataset | IterableDataset:
    """A dataset with token ids, with the ids as labels if it has none."""
    where = checks.argument(name)
    if "input_ids" not in first:
        raise ValueError(
            f"skip_prepare_dataset=True: {where} must have the column 'input_ids', got {brief(list(first), 500)}. "
            "Tokenize the rows, or drop `skip_prepare_dataset`."
        )
    check_masks(first, name)
    row_format, masking = RowFormat("ids"), Masking(False, False, None)
    limits = {"max_length": None, "keep_end": False}
    return _tokenized(dataset, num_proc, where, tokenizer=None, row_format=row_format, masking=masking, **limits)


def _tokenized(
    dataset: Dataset | IterableDataset, num_proc: int | None, where: str, **arguments: Any
) -> Dataset | IterableDataset:
    """Map `tokenize_batch`, with these arguments, over the dataset; a stream is mapped one row at a time."""
    options = tokenize.map_options(dataset, num_proc, f"Tokenizing {where}")
    if isinstance(dataset, IterableDataset):
        options["batch_size"] = 1
    arguments["where"] = where
    return dataset.map(tokenize_batch, with_indices=True, batched=True, fn_kwargs=arguments, **options)


def _without_unlabeled(dataset: Dataset | IterableDataset, where: str, drops: bool) -> Dataset | IterableDataset:
    """Warn about rows whose labels are all -100, and drop them if `drops`.

    Raises:
        ValueError: this is the case for all rows of a table.
    """
    if isinstance(dataset, IterableDataset):
        arguments = {"where": where, "state": tokenize.StreamState()}
        return dataset.filter(_has_label, with_indices=True, fn_kwargs=arguments) if drops else dataset
    has_label = np.concatenate([_have_labels(block) for _, block in blocks(dataset, ("labels",))])
    missing, total = np.count_nonzero(~has_label), len(has_label)
    if missing == total:
        raise ValueError(f"All {total:,} rows of {where} {_NO_LABEL}. {_WAY_OUT}")
    if not missing:
        return dataset
    rows = f"{missing:,} of {total:,} rows of {where} that {_NO_LABEL} (first: row {np.argmin(has_label)})"
    logger.warning(f"{'Dropped' if drops else 'Found'} {rows}. {_WAY_OUT}")
    return dataset.select(np.flatnonzero(has_label)) if drops else dataset


def _have_labels(block: pa.Table) -> np.ndarray:
    """Whether each row has a label that is not -100: `[rows]`."""
    labels, lengths = list_lengths(block, "labels")
    rows = np.repeat(np.arange(len(lengths)), lengths)
    return np.bincount(rows[labels != IGNORED], minlength=len(lengths)) > 0


def _has_label(row: dict[str, Any], index: int, where: str, state: tokenize.StreamState) -> bool:
    if any(label != IGNORED for label in row["labels"]):
        state.removed = 0
        return True
    tokenize.warn_once(f"Row {index} of {where} has no token to train on and is dropped", "unlabeled", state)
    state.removed += 1
    if state.removed == tokenize.MAX_REMOVED:
        raise ValueError(f"{state.removed:,} rows of {where} in succession, up to row {index}, {_NO_LABEL}. {_WAY_OUT}")
    return False


# Tokenizing rows: texts, conversations, prompts with completions, token ids

_MIXED = "Write the prompt and the completion either both as text or both as messages."


class _Conversation(NamedTuple):
    """A conversation, its chat template arguments, and the row's name in errors."""

    messages: list[dict[str, Any]]
    options: dict[str, Any]
    where: str


def tokenize_batch(
    batch: Any,
    indices: list[int],
    tokenizer: Any,
    row_format: RowFormat,
    masking: Masking,
    max_length: int | None,
    keep_end: bool,
    where: str,
) -> dict[str, Any]:
    """Build `input_ids` and `labels`, truncated to `max_length`, for a batch of `Dataset.map`.

    Only these are returned, so the user's own columns are kept. `indices` and `where` name the rows in errors.

    Raises:
        ValueError: a row does not have the format of the first one.
        RuntimeError: with `assistant_only_loss`, a row has no assistant content.
    """
    check_has(batch, indices[0], row_format.needed, where)
    if row_format.kind == "ids":
        ids, labels = _read_ids(batch, indices[0], row_format, max_length, where)
    else:
        read, rows = _READERS[row_format.kind], rows_of({column: batch[column] for column in batch})
        ids, labels = read(rows, [f"Row {i} of {where}" for i in indices], tokenizer, row_format, masking)
    window = tokenize.kept_tokens(max_length, keep_end)
    return {"input_ids": [row[window] for row in ids], "labels": [row[window] for row in labels]}


def _read_ids(batch: Any, first: int, row_format: RowFormat, max_length: int | None, where: str) -> tuple[list, list]:
    """The ids of tokenized rows, and their labels, or labels built from their masks."""
    has_labels = not row_format.masks and "labels" in batch
    block = _table(batch, ("input_ids", *(("labels",) if has_labels else row_format.masks)), first, where)
    lists = checks.id_lists(block, "input_ids", first, where)
    lengths = lists.value_lengths().to_numpy(zero_copy_only=False)
    if has_labels:
        labels = _read_labels(block, lengths, first, where)
    else:
        labels = lists.flatten().to_numpy(zero_copy_only=False).astype(np.int64)
    for column in row_format.masks:
        labels[~reward.mask_to_bool(block, first, column, lengths, "of 'input_ids'", where)] = IGNORED
    if "seq_lengths" in batch:
        _check_documents(batch["seq_lengths"], lengths, max_length, first, where)
    values, ends = labels.tolist(), np.cumsum(lengths).tolist()
    return batch["input_ids"], [values[start:end] for start, end in pairwise([0, *ends])]


def _read_labels(block: pa.Table, lengths: np.ndarray, first: int, where: str) -> np.ndarray:
    """The concatenated labels of a block, `[tokens]`, checked against the lengths of the ids, `[rows]`."""
    lists = checks.id_lists(block, "labels", first, where)
    label_lengths = lists.value_lengths().to_numpy(zero_copy_only=False)
    if (label_lengths != lengths).any():
        row = int(np.argmax(label_lengths != lengths))
        raise ValueError(
            f"Row {first + row} of {where}, column 'labels': must have {lengths[row]:,} values, one per token of "
            f"'input_ids' (its id, or -100 if it is not a target), got {label_lengths[row]:,}."
        )
    return lists.flatten().to_numpy(zero_copy_only=False)


def _check_documents(
    documents: list[list[int]], lengths: np.ndarray, max_length: int | None, first: int, where: str
) -> None:
    """Raise ValueError for a packed row whose document lengths do not add up to its tokens, or that is too long."""
    for row, (tokens, document_lengths) in enumerate(zip(lengths.tolist(), documents, strict=True), start=first):
        if not isinstance(document_lengths, list) or sum(document_lengths) != tokens or min(document_lengths) < 1:
            valid = f"the number of tokens of each document in the row, {tokens:,} in total"
            raise checks.cell_error(f"Row {row} of {where}", "seq_lengths", document_lengths, valid)
        if max_length is not None and tokens > max_length:
            raise ValueError(
                f"Row {row} of {where} is already packed (it has 'seq_lengths') and has {tokens:,} tokens, more than "
                f"max_length={max_length}. Pack the rows to that length, or pass max_length={tokens}."
            )


def _table(batch: Any, columns: tuple[str, ...], first: int, where: str) -> pa.Table:
    try:
        return pa.table({column: pa.array(batch[column]) for column in columns})
    except (pa.ArrowInvalid, pa.ArrowTypeError, OverflowError) as error:
        raise ValueError(f"Rows from {first} of {where}, columns {list(columns)}: {printable(str(error))}") from error


def _read_texts(rows: list[dict], row_names: list[str], tokenizer: Any, row_format: RowFormat, _: Masking) -> tuple:
    texts = []
    for row, where in zip(rows, row_names, strict=True):
        if row_format.formatting_func:
            text, column = _formatted(row, row_format.formatting_func), "formatting_func(row)"
        else:
            text, column = row[row_format.column], row_format.column
        if not isinstance(text, str):
            raise checks.cell_error(where, column, text, "a string")
        chat.check_unicode(text, column, where)
        texts.append(chat.with_eos(text, tokenizer, where))
    ids = tokenizer(text=texts)["input_ids"]
    return ids, ids


def _formatted(row: dict[str, Any], formatting_func: Callable[[dict[str, Any]], Any]) -> Any:
    """The text that `formatting_func` returns for a row.

    If the function returns a list or fails, it may be written for earlier TRL releases, which passed a batch (a dict of
    columns) and expected one text per row.
    """
    try:
        text = formatting_func(row)
    except (IndexError, KeyError, TypeError):
        text = _formatted_as_batch(row, formatting_func)
        if not isinstance(text, str):
            raise
    return _formatted_as_batch(row, formatting_func) if isinstance(text, list) else text


def _formatted_as_batch(row: dict[str, Any], formatting_func: Callable[[dict[str, Any]], Any]) -> Any:
    """Call the function with a batch of one row; returns its only text, or whatever else it returns."""
    _warn_of_batches()
    texts = formatting_func({column: [cell] for column, cell in row.items()})
    return texts[0] if isinstance(texts, list) and len(texts) == 1 else texts


@cache
def _warn_of_batches() -> None:
    logger.warning(
        "formatting_func returns a list or fails on a single row, like the batched functions of earlier TRL releases, "
        "so it is called with batches of one row. Write it to take one row and return its text."
    )


def _read_messages(
    rows: list[dict], row_names: list[str], tokenizer: Any, row_format: RowFormat, masking: Masking
) -> tuple:
    conversations = []
    for row, where in zip(rows, row_names, strict=True):
        messages = row[row_format.kind]
        if row_format.kind == "conversations":
            messages = _as_messages(messages, where)
        if not chat.is_messages(messages):
            valid = "a non-empty list of messages, each with a 'role'"
            raise checks.cell_error(where, row_format.kind, messages, valid)
        chat.check_unicode(messages, row_format.kind, where)
        checks.check_no_media(messages, f"{where}, column {row_format.kind!r}")
        conversations.append(_Conversation(messages, _template_options(row, tokenizer, masking, where), where))
    ids, assistant_masks = _tokenize(conversations, tokenizer, masking.assistant)
    return ids, _labels(ids, assistant_masks)


def _as_messages(conversation: Any, where: str) -> list[dict[str, Any]]:
    """Convert a ShareGPT conversation to messages: `from` and `value` become `role` and `content`."""
    names = {"from": "role", "value": "content"}
    if not isinstance(conversation, list) or not all(isinstance(message, dict) for message in conversation):
        raise checks.cell_error(where, "conversations", conversation, "a list of messages with 'from' and 'value'")
    return [{names.get(key, key): value for key, value in message.items()} for message in conversation]


def _read_completions(
    rows: list[dict], row_names: list[str], tokenizer: Any, row_format: RowFormat, masking: Masking
) -> tuple:
    for row, where in zip(rows, row_names, strict=True):
        chat.check_contents(row, ["prompt", "completion"], where, _MIXED)
        for column in ("prompt", "completion"):
            chat.check_unicode(row[column], column, where)
            checks.check_no_media(row[column], f"{where}, column {column!r}")
        if chat.is_messages(row["prompt"]) != row_format.conversational:
            form, first = ("text", "a conversation") if row_format.conversational else ("a conversation", "text")
            raise ValueError(f"{where} is {form}, but the first row is {first}. All rows must have the same form.")
    if row_format.conversational:
        return _conversational_completions(rows, row_names, tokenizer, masking)
    return _text_completions(rows, row_names, tokenizer, masking)


def _text_completions(rows: list[dict], row_names: list[str], tokenizer: Any, masking: Masking) -> tuple[list, list]:
    """Text rows: the prompt followed by the completion and EOS."""
    pairs = zip(rows, row_names, strict=True)
    texts = [row["prompt"] + chat.with_eos(row["completion"], tokenizer, where) for row, where in pairs]
    ids = tokenizer(text=texts)["input_ids"]
    if not masking.completion:
        return ids, ids
    prompts = tokenizer(text=[row["prompt"] for row in rows])["input_ids"]
    return ids, _labels(ids, list(map(_completion_mask, prompts, ids)))


def _conversational_completions(
    rows: list[dict], row_names: list[str], tokenizer: Any, masking: Masking
) -> tuple[list, list]:
    """Conversational rows: the prompt's messages followed by the completion's."""
    options = [_template_options(row, tokenizer, masking, where) for row, where in zip(rows, row_names, strict=True)]
    messages = [row["prompt"] + row["completion"] for row in rows]
    conversations = list(map(_Conversation, messages, options, row_names))
    ids, assistant_masks = _tokenize(conversations, tokenizer, masking.assistant)
    completion_masks = None
    if masking.completion:
        prompts = list(map(_Conversation, [row["prompt"] for row in rows], options, row_names))
        prompt_ids, _ = _tokenize(prompts, tokenizer, add_generation_prompt=True)
        completion_masks = list(map(_completion_mask, prompt_ids, ids))
    return ids, _labels(ids, assistant_masks, completion_masks)


def _template_options(row: dict[str, Any], tokenizer: Any, masking: Masking, where: str) -> dict[str, Any]:
    options = chat.template_options(row, where)
    if masking.chat_template is not None:
        return {"chat_template": masking.chat_template, **options}
    chat.check_template(tokenizer, options, where)
    return options


def _tokenize(
    conversations: list[_Conversation], tokenizer: Any, assistant: bool = False, **options: Any
) -> tuple[list[list[int]], list[list[int]] | None]:
    """The ids of each conversation and, if `assistant`, the masks of assistant content, else None.

    Without masks, conversations are rendered one by one but tokenized together, which is faster.
    """
    if not assistant and all(chat.ABOUT_TOKENS.isdisjoint(conversation.options) for conversation in conversations):
        texts = [_render(conversation, tokenizer, tokenize=False, **options) for conversation in conversations]
        if isinstance(tokenizer, chat.ProcessorTokenizer):
            return tokenizer.ids_of(texts), None
        return tokenizer(text=texts, add_special_tokens=False)["input_ids"], None
    options |= {"tokenize": True, "return_dict": True, "return_assistant_tokens_mask": assistant}
    encoded = [_render(conversation, tokenizer, **options) for conversation in conversations]
    ids = [row["input_ids"] for row in encoded]
    if not assistant:
        return ids, None
    pairs = zip(encoded, conversations, strict=True)
    return ids, [_assistant_mask(row, conversation.where) for row, conversation in pairs]


def _render(conversation: _Conversation, tokenizer: Any, **options: Any) -> Any:
    return chat.rendered(tokenizer, conversation.messages, conversation.where, **options, **conversation.options)


def _assistant_mask(rendered: dict[str, list[int]], where: str) -> list[int]:
    if 1 not in rendered["assistant_masks"]:
        raise RuntimeError(
            "You're using `assistant_only_loss=True`, but at least one example has no assistant tokens. This usually "
            "means the tokenizer's chat template doesn't generate assistant masks: it may be missing the "
            f"`{{% generation %}}` keyword. {where} is such an example: fix the template, or leave out rows without "
            "assistant content."
        )
    return rendered["assistant_masks"]


def _completion_mask(prompt: list[int], ids: list[int]) -> list[int]:
    """0 for the common prefix of the prompt and the whole text, then 1."""
    length = common_prefix(prompt, ids)
    return [0] * length + [1] * (len(ids) - length)


def common_prefix(prompt: list[int], ids: list[int]) -> int:
    """Length of the common prefix of a prompt and of the prompt with its answer; warns if shorter than the prompt."""
    length = sum(1 for _ in takewhile(lambda pair: pair[0] == pair[1], zip(prompt, ids, strict=False)))
    if length < len(prompt):
        warn_of_prefix()
    return length


@cache
def warn_of_prefix() -> None:
    """Warn once per process (cached)."""
    logger.warning(
        "The tokenized prompt is not a prefix of the tokenized prompt+completion: the chat template renders the prompt "
        "differently without the completion, or tokens merge at the boundary. The completion is taken to start where "
        "the two differ, so the end of the prompt in training is not the one that the model sees in generation. End "
        "the prompt at a token boundary, or use a template that renders it the same way. Further rows are not reported."
    )


def _labels(ids: list[list[int]], *masks: list[list[int]] | None) -> list[list[int]]:
    """The ids of each row where all masks are 1, -100 elsewhere; None is no mask."""
    masks = [mask for mask in masks if mask is not None]
    if not masks:
        return ids
    return [
        [token if all(bits) else IGNORED for token, *bits in zip(*row, strict=True)]
        for row in zip(ids, *masks, strict=True)
    ]


_READERS = {
    "text": _read_texts,
    "messages": _read_messages,
    "conversations": _read_messages,
    "completion": _read_completions,
}


# Labels for answers only, like DataCollatorForCompletionOnlyLM of TRL up to 0.19


class AnswerMarks(NamedTuple):
    """Token sequences that mark answers.

    response: ids that precede an answer.
    instruction: ids that start a question and so end the preceding answer; None if each text has a single answer, after
        the last `response`.
    pad: id that is never a target; None if there is none.
    """

    response: tuple[int, ...]
    instruction: tuple[int, ...] | None
    pad: int | None


def answer_labels(ids: Sequence[int], marks: AnswerMarks) -> list[int]:
    """The ids of answers, -100 elsewhere; -100 everywhere if a mark is missing."""
    labels = np.asarray(ids, np.int64).copy()
    if marks.pad is not None:
        labels[labels == marks.pad] = IGNORED
    answer_starts = [start + len(marks.response) for start in _occurrences(labels, marks.response)]
    if marks.instruction is None:
        labels[: answer_starts[-1] if answer_starts else None] = IGNORED
        return labels.tolist()
    question_starts = _occurrences(labels, marks.instruction)
    if not answer_starts or not question_starts:
        return [IGNORED] * len(ids)
    question_starts = [0, *question_starts] if question_starts[0] > answer_starts[0] else [0, *question_starts[1:]]
    for start_of_question, start in zip(question_starts, answer_starts, strict=False):
        labels[start_of_question:start] = IGNORED
    if len(answer_starts) < len(question_starts):
        labels[question_starts[-1] :] = IGNORED
    return labels.tolist()


def _occurrences(ids: np.ndarray, mark: tuple[int, ...]) -> list[int]:
    """The positions at which `mark` occurs in the ids `[T]`."""
    if len(ids) < len(mark):
        return []
    windows = np.lib.stride_tricks.sliding_window_view(ids, len(mark))
    return np.flatnonzero((windows == np.asarray(mark)).all(axis=1)).tolist()


def label_answers(
    dataset: Dataset | IterableDataset, marks: AnswerMarks, where: str, options: dict[str, Any]
) -> Dataset | IterableDataset:
    """Replace the labels of rows with `input_ids` by `answer_labels`; warn about rows of a table that have none.

    Args:
        options: arguments of `Dataset.map`.
    """
    labeled = dataset.map(_labeled_batch, batched=True, fn_kwargs={"marks": marks}, **options)
    if not isinstance(labeled, IterableDataset):
        missing = sum(np.count_nonzero(~_have_labels(block)) for _, block in blocks(labeled, ("labels",)))
        if missing:
            logger.warning(
                f"{missing:,} of {len(labeled):,} rows of {where} have no answer to train on and do not contribute to "
                f"the loss: they lack the response template (tokens {list(marks.response)}), or max_length cuts it "
                "off. A template may be tokenized differently inside a text than on its own: pass its ids."
            )
    return labeled


def _labeled_batch(batch: dict[str, list], marks: AnswerMarks) -> dict[str, list]:
    return {"labels": [answer_labels(ids, marks) for ids in batch["input_ids"]]}


# A script's own data collator. Steps have other layouts than its batches, so it is called once for each row.

_INPUTS = ("input_ids", "labels", "attention_mask")


class ScriptCollator(NamedTuple):
    """A script's own collate function.

    function: rows -> a batch with `input_ids`, `labels` and `attention_mask`.
    batch_size: rows of the batch that is compared with its rows on their own.
    columns: those that rows have when it gets them; None: all.
    """

    function: Callable[[list[dict[str, Any]]], Any]
    batch_size: int
    columns: tuple[str, ...] | None


def collated(dataset: Dataset | IterableDataset, collate: ScriptCollator, where: str) -> Dataset | IterableDataset:
    """Replace the columns by the `input_ids` and `labels` that a script's collator gives each row.

    Raises:
        TypeError, ValueError: a batch has other inputs, is not padded on the right, or depends on more than its rows:
            on the other rows of the batch, or on the number of calls.
    """
    if collate.columns is not None:
        names = dataset.column_names or list(next(iter(dataset), {}))
        if not (columns := [name for name in collate.columns if name in names]):
            raise ValueError(
                f"No columns of {where} match what a collator gets with remove_unused_columns=True: it has "
                f"{brief(names, 500)}. Set remove_unused_columns=False."
            )
        dataset = dataset.select_columns(columns)
    first = (
        list(dataset.take(collate.batch_size))
        if isinstance(dataset, IterableDataset)
        else list(dataset.select(range(min(collate.batch_size, len(dataset)))))
    )
    single_rows = [_rows_of_batch(collate.function([copy.deepcopy(row)]), 1, where)[0] for row in first]
    repeated = _rows_of_batch(collate.function([copy.deepcopy(first[0])]), 1, where)[0]
    batch_rows = _rows_of_batch(collate.function(copy.deepcopy(first)), len(first), where)
    if repeated != single_rows[0] or batch_rows != single_rows:
        raise ValueError(
            f"data_collator returned different ids or labels for a row of {where} "
            + ("when called again" if repeated != single_rows[0] else "in a batch and on its own")
            + ". trl_jax calls it once for each row, before training. Let the labels of padding be -100, and do what "
            "is random, or depends on other rows, in train_dataset.map."
        )
    names = dataset.column_names or list(first[0])
    # No cache: datasets identifies an imported function by its name, even if its code has changed.
    is_stream = isinstance(dataset, IterableDataset)
    options = {} if is_stream else {"desc": f"Collating {where}", "load_from_cache_file": False}
    return dataset.map(
        lambda row, index: _rows_of_batch(collate.function([dict(row)]), 1, f"row {index} of {where}")[0],
        with_indices=True, remove_columns=names, **options,
    )  # fmt: skip


def _rows_of_batch(batch: Any, count: int, where: str) -> list[dict[str, list[int]]]:
    """The rows of a collator's batch, without padding."""
    if not isinstance(batch, Mapping) or not set(_INPUTS) <= set(batch):
        returned = sorted(batch) if isinstance(batch, Mapping) else type(batch).__qualname__
        raise TypeError(f"data_collator returned {returned} for {where}; expected a dict with {', '.join(_INPUTS)}.")
    if unexpected := sorted(set(batch) - {*_INPUTS, "token_type_ids"}):
        raise ValueError(
            f"data_collator returned {', '.join(unexpected)} for {where}, which no step reads: a step gets input_ids "
            "and labels, and makes attention_mask and position_ids itself. Leave it out of the batch."
        )
    arrays = {name: np.asarray(batch[name]) for name in _INPUTS}
    if any(values.ndim != 2 or values.shape != (count, *arrays["labels"].shape[1:]) for values in arrays.values()):
        shapes = {name: values.shape for name, values in arrays.items()}
        raise ValueError(f"data_collator returned {shapes} for {count} rows ({where}); expected {count} rows each.")
    real = arrays["attention_mask"] != 0
    return [_without_padding(*row, where) for row in zip(arrays["input_ids"], arrays["labels"], real, strict=True)]


def _without_padding(ids: np.ndarray, labels: np.ndarray, real: np.ndarray, where: str) -> dict[str, list[int]]:
    length = int(real.sum())
    if not real[:length].all():
        raise ValueError(
            f"data_collator returned an attention_mask for {where} with a 0 before a 1. Pad on the right and, if the "
            "pad token is the EOS token, do not mask EOS tokens within a row."
        )
    end = max(length, int(np.flatnonzero(labels != IGNORED)[-1]) + 1 if (labels != IGNORED).any() else 0)
    if end > length + 1:  # one more: an EOS token that is also the pad token
        raise ValueError(f"data_collator gives padding of {where} labels other than -100. Set them to -100.")
    return {"input_ids": ids[:end].tolist(), "labels": labels[:end].tolist()}


# The format of a dataset, determined by its first row, and checks of the options

STRATEGIES = ("bfd", "bfd_split", "wrapped")
_MASKS = ("completion_mask", "assistant_masks")


class RowFormat(NamedTuple):
    """The format of a dataset's rows, determined by the first row.

    kind: what is tokenized: nothing ("ids"), a text column or the result of `formatting_func` ("text"), `messages`,
        ShareGPT `conversations`, or `prompt` and `completion` ("completion").
    conversational: whether rows have messages for a chat template.
    column: the text column.
    formatting_func: computes the text of a row.
    masks: mask columns of tokenized rows that labels are built from; empty if the rows have labels.
    """

    kind: Literal["ids", "text", "messages", "conversations", "completion"]
    conversational: bool = False
    column: str = ""
    formatting_func: Callable[[dict[str, Any]], str] | None = None
    masks: tuple[str, ...] = ()

    @property
    def needed(self) -> tuple[str, ...]:
        """The columns that every row must have."""
        columns = {"ids": ("input_ids", *self.masks), "completion": ("prompt", "completion"), "text": (self.column,)}
        return () if self.formatting_func else columns.get(self.kind, (self.kind,))


class Masking(NamedTuple):
    """Which tokens are excluded from the labels.

    completion: exclude prompts.
    assistant: exclude everything but assistant content.
    chat_template: replaces the tokenizer's own; None keeps it.
    """

    completion: bool
    assistant: bool
    chat_template: str | None


def format_of_rows(
    first: dict[str, Any],
    where: str,
    *,
    column: str,
    formatting_func: Callable[[dict[str, Any]], str] | None,
    completion_only_loss: bool | None,
    assistant_only_loss: bool,
) -> tuple[RowFormat, bool]:
    """Determine the row format from the first row, and whether prompts are excluded from the labels.

    Args:
        where: the dataset's name in messages.
        column: the text column.
        completion_only_loss: None enables it for rows with a prompt and a completion.

    Raises:
        ValueError: there is nothing to train on, or an option does not apply to such rows.
    """
    completion_only = completion_only_loss
    if completion_only is None:
        completion_only = {"prompt", "completion"} <= first.keys()
    if completion_only and formatting_func:
        raise ValueError(
            "A formatting function was provided while `completion_only_loss=True`, which is incompatible: its text is "
            "not split into a prompt and a completion. Apply the formatting function to the dataset beforehand so that "
            "it has the columns 'prompt' and 'completion', or disable `completion_only_loss`."
        )
    if "input_ids" in first:
        row_format = _format_of_ids(first, completion_only, formatting_func)
    else:
        row_format = _format_of_texts(first, where, column, formatting_func)
    if assistant_only_loss and row_format.kind != "ids" and not row_format.conversational:
        raise ValueError(
            "You set `assistant_only_loss=True`, but the dataset is not conversational. This option is only supported "
            f"for conversational datasets: {where} has the columns {brief(list(first), 500)}."
        )
    _check_completions(row_format, first, where, completion_only_loss)
    if "labels" in first and row_format.kind != "ids":
        logger.warning(
            f"{where}: the column 'labels' is ignored because there is no 'input_ids' column. It is replaced by labels "
            "built from the tokens."
        )
    return row_format, completion_only


def _format_of_ids(first: dict[str, Any], completion_only: bool, formatting_func: Any) -> RowFormat:
    if formatting_func:
        logger.warning(
            "You passed a dataset that is already processed (contains an `input_ids` field) together with a formatting "
            "function. Therefore `formatting_func` will be ignored. Remove one of the two."
        )
    if "labels" in first:
        return RowFormat("ids")
    masks = _MASKS if completion_only else ("assistant_masks",)
    return RowFormat("ids", masks=tuple(column for column in masks if column in first))


def _format_of_texts(first: dict[str, Any], where: str, column: str, formatting_func: Any) -> RowFormat:
    if formatting_func:
        return RowFormat("text", column=column, formatting_func=formatting_func)
    if "prompt" in first:
        if "completion" in first:
            return RowFormat("completion", conversational=chat.is_messages(first["prompt"]))
    elif _is_sharegpt(first.get("conversations")):
        return RowFormat("conversations", conversational=True)
    elif chat.is_messages(first.get("messages")):
        return RowFormat("messages", conversational=True)
    elif column in first:
        return RowFormat("text", column=column)
    if "prompt" in first and (texts := [name for name in ("messages", column) if name in first]):
        raise ValueError(
            f"{where} has the columns 'prompt' and {texts[0]!r}, but no 'completion', which 'prompt' goes with, as in "
            f"TRL. To train on {texts[0]!r}, call dataset.remove_columns('prompt') first."
        )
    raise ValueError(
        f"{where} must have one of: {column!r} (dataset_text_field) with a text; 'messages' with a list of messages, "
        "each with a 'role' and a 'content'; 'prompt' and 'completion'; 'conversations' whose messages have 'from' and "
        f"'value'; or 'input_ids'. It has the columns {brief(list(first), 500)}. Rename columns with "
        "dataset.rename_column, or pass dataset_text_field or a formatting_func."
    )


def _is_sharegpt(value: Any) -> bool:
    first = value[0] if isinstance(value, list) and value else None
    return isinstance(first, dict) and {"from", "value"} <= first.keys()


def _check_completions(
    row_format: RowFormat, first: dict[str, Any], where: str, completion_only_loss: bool | None
) -> None:
    """Raise ValueError if `completion_only_loss` is set but rows do not separate completions from prompts."""
    separate = row_format.kind == "completion"
    separate |= row_format.kind == "ids" and bool({"labels", "completion_mask"} & first.keys())
    if completion_only_loss and not separate:
        raise ValueError(
            f"completion_only_loss=True requires rows with 'prompt' and 'completion', or with 'input_ids' and "
            f"'completion_mask' or 'labels', but {where} has the columns {brief(list(first), 500)}, so every token "
            "would be trained on. Split the rows, use assistant_only_loss=True for conversations, or drop the option."
        )


def check_lengths(packing: bool, strategy: str, max_length: int | None, truncation_mode: str) -> None:
    """Raise ValueError for invalid or incompatible options of packing and truncation."""
    if packing and max_length is None:
        raise ValueError("When packing is enabled, `max_length` can't be `None`. Pass the length of a packed row.")
    if packing and strategy not in STRATEGIES:
        raise ValueError(f"packing_strategy must be one of {', '.join(STRATEGIES)}, got {strategy!r}.")
    if truncation_mode not in ("keep_start", "keep_end"):
        raise ValueError(f"Unsupported truncation mode: {truncation_mode}, expected 'keep_start' or 'keep_end'")


def check_masks(first: dict[str, Any], name: str) -> None:
    """Raise ValueError, if preparation is skipped, for rows with masks but no labels."""
    if "labels" not in first and set(_MASKS) & first.keys():
        raise ValueError(
            f"The {name} dataset has mask columns but no 'labels', and `skip_prepare_dataset=True` skips label "
            "building, so it would train on the full sequence. Add a 'labels' column (-100 for non-loss tokens) or "
            "drop `skip_prepare_dataset`."
        )
