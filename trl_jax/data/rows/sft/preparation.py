"""Prepare datasets of supervised fine-tuning: rows of every form that TRL accepts become token ids and labels."""

from __future__ import annotations

import logging
from collections.abc import Callable
from typing import Any

import numpy as np
import pyarrow as pa
from datasets import Dataset, IterableDataset, concatenate_datasets

from trl_jax.core.printable import brief
from trl_jax.data.example import IGNORED
from trl_jax.data.packing import pack_dataset
from trl_jax.data.rows import checks, streaming
from trl_jax.data.rows.sft import row_format as formats
from trl_jax.data.rows.sft.answers import AnswerMarks, label_answers
from trl_jax.data.rows.sft.rows import tokenise_batch
from trl_jax.data.rows.templates.training import has_generation_markers, stop_token_is_trained, training_template

logger = logging.getLogger(__name__)

COLUMNS = ("input_ids", "labels")
_NO_LABEL = "have no token to train on: their labels are all -100"
_WAY_OUT = "Where prompts fill max_length, raise it, or pass truncation_mode='keep_end'."


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
) -> Dataset | IterableDataset:
    """Add `input_ids` and `labels` to the dataset's own columns; of packed rows only they and `seq_lengths` are left.

    Rows are cut to `max_length`, and those that have no label left are dropped; or they are packed. Rows that are
    packed already (they have `seq_lengths`) stay as they are.

    Args:
        num_proc: processes that tokenise.
        name: "train", "eval", "test", or the dataset's name in errors, such as "eval_dataset['key']".
        packing_parts: parts of a table that are packed apart; None: the whole. TRL packs apart what each of its
            processes has tokenised.
        completion_only_loss: None: where the rows have prompts and completions.
        chat_template: in the place of the tokenizer's. None: its own, or with `assistant_only_loss` one that marks what
            the assistant says.
        seed: of `shuffle_dataset`.
        skip_prepare_dataset: the rows have their columns already; nothing is cut, packed or shuffled.
        answer_marks: labels are those of the answers that these tokens mark, whatever they were; not for packed rows.

    Raises:
        TypeError, ValueError, RuntimeError: the dataset, an option or a row cannot be trained on; a stream raises when
            it reaches the row.
    """
    where = checks.argument(name)
    plain, first = streaming.opened(checks.as_read(dataset, name) if skip_prepare_dataset else dataset, name)
    if skip_prepare_dataset:
        plain = _unprepared(plain, first, name, num_proc)
        return plain if answer_marks is None else _answers_of(plain, answer_marks, num_proc, where)
    formats.check_lengths(packing, packing_strategy, max_length, truncation_mode)
    row_format, completions = formats.settle(
        first,
        where,
        column=dataset_text_field,
        formatting_func=formatting_func,
        completion_only_loss=completion_only_loss,
        assistant_only_loss=assistant_only_loss,
    )
    for column in row_format.needed if row_format.conversational else ():
        checks.check_no_media(first[column], f"Row 0 of {where}, column {column!r}")
    if assistant_only_loss and row_format.conversational:
        chat_template = chat_template or _marked_template(tokenizer)
        _warn_of_stop_token(tokenizer, chat_template)
    masking = formats.Masking(completions, assistant_only_loss, chat_template)
    packs = packing and not (row_format.kind == "ids" and "seq_lengths" in first)
    limits = {"max_length": None if packs else max_length, "keep_end": truncation_mode == "keep_end"}
    limits |= {"row_format": row_format, "masking": masking, "where": where}
    plain = _tokenised(plain, num_proc, tokenizer=tokenizer, **limits)
    plain = _labelled(plain, where, drops=max_length is not None and not packs)
    if answer_marks is not None:
        plain = _answers_of(plain, answer_marks, num_proc, where)
    if packs:
        plain = plain.select_columns(list(COLUMNS))
        plain = plain.shuffle(seed=seed) if shuffle_dataset else plain
        plain = _packed(plain, max_length, packing_strategy, packing_parts, where)
    return plain.shuffle(seed=seed) if shuffle_dataset else plain


def _packed(
    dataset: Dataset | IterableDataset, max_length: int, strategy: str, parts: int | None, where: str
) -> Dataset | IterableDataset:
    options = _map_options(dataset, None, f"Packing {where}")
    if isinstance(dataset, IterableDataset) or not parts:
        return pack_dataset(dataset, max_length, strategy, options)
    count = min(parts, len(dataset))
    pieces = [dataset.shard(count, index, contiguous=True) for index in range(count)]
    return concatenate_datasets([pack_dataset(piece, max_length, strategy, options) for piece in pieces])


def _answers_of(
    dataset: Dataset | IterableDataset, marks: AnswerMarks, num_proc: int | None, where: str
) -> Dataset | IterableDataset:
    return label_answers(dataset, marks, where, _map_options(dataset, num_proc, f"Labelling answers of {where}"))


def _marked_template(tokenizer: Any) -> str | None:
    """None where the tokenizer's own template marks what the assistant says; it is an error of each row to have
    none."""
    own = tokenizer.chat_template
    return None if own is None or has_generation_markers(own) else training_template(own)


def _warn_of_stop_token(tokenizer: Any, chat_template: str | None) -> None:
    if tokenizer.chat_template is not None and not stop_token_is_trained(tokenizer, chat_template):
        logger.warning(
            "The chat template does not include the assistant turn's end-of-turn token in the loss mask; the model may "
            "not learn to stop. Put that token before `{% endgeneration %}`, or set `assistant_only_loss=False`."
        )


def _unprepared(
    dataset: Dataset | IterableDataset, first: dict[str, Any], name: str, num_proc: int | None
) -> Dataset | IterableDataset:
    """A dataset of ids as it is, with the ids as labels where there are none."""
    where = checks.argument(name)
    if "input_ids" not in first:
        raise ValueError(
            f"skip_prepare_dataset=True: {where} needs the column 'input_ids', found {brief(list(first), 500)}. "
            "Tokenise the rows, or drop `skip_prepare_dataset`."
        )
    formats.check_masks(first, name)
    row_format, masking = formats.RowFormat("ids"), formats.Masking(False, False, None)
    facts = {"tokenizer": None, "row_format": row_format, "masking": masking, "max_length": None, "keep_end": False}
    return _tokenised(dataset, num_proc, where=where, **facts)


def _tokenised(
    dataset: Dataset | IterableDataset, num_proc: int | None, *, where: str, **facts: Any
) -> Dataset | IterableDataset:
    """Map `tokenise_batch` over the dataset; a stream is read one row at a time."""
    options = {"batch_size": 1} if isinstance(dataset, IterableDataset) else {}
    options |= _map_options(dataset, num_proc, f"Tokenizing {where}")
    return dataset.map(tokenise_batch, with_indices=True, batched=True, fn_kwargs=facts | {"where": where}, **options)


def _map_options(dataset: Dataset | IterableDataset, num_proc: int | None, words: str) -> dict[str, Any]:
    """Options of `map` that a stream does not have."""
    if isinstance(dataset, IterableDataset):
        return {}
    return {"num_proc": num_proc, "desc": words.replace("_", " ", 1)}


def _labelled(dataset: Dataset | IterableDataset, where: str, drops: bool) -> Dataset | IterableDataset:
    """Leave out the rows whose labels are all -100, if `drops`, and warn of them.

    Raises:
        ValueError: there are no other rows.
    """
    if isinstance(dataset, IterableDataset):
        facts = {"where": where, "state": streaming.StreamState()}
        return dataset.filter(_has_label, with_indices=True, fn_kwargs=facts) if drops else dataset
    kept = np.concatenate([_have_labels(block) for _, block in checks.blocks(dataset, ("labels",))])
    missing, total = np.count_nonzero(~kept), len(kept)
    if missing == total:
        raise ValueError(f"All {total:,} rows of {where} {_NO_LABEL}. {_WAY_OUT}")
    if not missing:
        return dataset
    what = f"{missing:,} of {total:,} rows of {where} {_NO_LABEL} (first: row {np.argmin(kept)})"
    logger.warning(f"{what}: they are dropped. {_WAY_OUT}" if drops else f"{what}. {_WAY_OUT}")
    return dataset.select(np.flatnonzero(kept)) if drops else dataset


def _have_labels(block: pa.Table) -> np.ndarray:
    """Whether each row has a label that is not -100: `[rows]`."""
    labels, lengths = checks.list_lengths(block, "labels")
    rows = np.repeat(np.arange(len(lengths)), lengths)
    return np.bincount(rows[labels != IGNORED], minlength=len(lengths)) > 0


def _has_label(row: dict[str, Any], index: int, where: str, state: streaming.StreamState) -> bool:
    if any(label != IGNORED for label in row["labels"]):
        state.removed = 0
        return True
    streaming.warn_once(f"Row {index} of {where} has no token to train on: it is dropped", "unlabelled", state)
    state.removed += 1
    if state.removed == streaming.MAX_REMOVED:
        raise ValueError(f"{state.removed:,} rows of {where} in succession, up to row {index}, {_NO_LABEL}. {_WAY_OUT}")
    return False
