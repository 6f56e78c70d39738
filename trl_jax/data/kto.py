"""Rows of KTO: a prompt and an answer labeled desirable or not, and a mismatched answer for the KL estimate."""

from __future__ import annotations

import logging
from collections.abc import Collection
from typing import Any

from datasets import Dataset, IterableDataset

from trl_jax.core.text import brief
from trl_jax.data import checks, preference, tokenize
from trl_jax.data.batch import Example, Extras
from trl_jax.data.image_rows import Encoder, read_prompt, with_answers
from trl_jax.data.preference import unpair_preference_dataset

logger = logging.getLogger(__name__)

IDS = ("prompt_ids", "completion_ids", "label")
JOINED = ("completion_input_ids", "completion_labels")
KL_ROW = "KL_row"
KL_JOINED = ("KL_completion_input_ids", "KL_completion_labels")
_PAIR = ("chosen", "rejected")
_NEEDED = ("prompt", "completion", "label")


def prepare(
    dataset: Dataset | IterableDataset,
    tokenizer: Any,
    *,
    max_length: int | None,
    block: int | None,
    max_prompt_length: int | None = None,
    num_proc: int | None,
    name: str,
) -> Dataset | IterableDataset:
    """Add the columns that KTO trains on.

    These are TRL's `prompt_ids`, `completion_ids` and `KL_completion_ids`, and the columns that a step uses: the prompt
    with either answer, truncated to `max_length`, and their labels (`JOINED`, `KL_JOINED`). Pairs become two rows, in
    TRL's order. Rows that already have `prompt_ids` and `completion_ids` are not tokenized. Rows that already have the
    joined columns, as prepared by early TRL releases, are only truncated, unless they also have texts. Rows whose
    prompt alone has at least `max_length` tokens are dropped.

    Args:
        block: within each block of this many rows, every answer is also paired with the next row's prompt (the last
            answer with the first prompt) for the KL estimate. None if the loss has no KL term.
        max_prompt_length: if prompt and answer exceed `max_length`, only this many last tokens of the prompt are kept;
            None keeps all.
        num_proc: number of processes for tokenization.
        name: "train", "eval", "test", or the dataset's name in errors, such as "eval_dataset['key']".

    Raises:
        TypeError, ValueError: the dataset, a column or a row is invalid; a stream raises when it reaches the row.
    """
    where = checks.argument(name)
    plain, first = tokenize.peek(dataset, name, ("prompt", "completion", *_PAIR))
    has_ids, has_texts = preference.has_all(first, IDS), preference.has_all(first, _NEEDED)
    limits = {"with_kl": block is not None, "max_length": max_length, "max_prompt_length": max_prompt_length}
    if is_prepared(first, block) and (has_ids or not has_texts):
        plain = tokenize.with_columns(plain, (*JOINED, *(() if block is None else KL_JOINED), "label"), where)
        if max_length is None and max_prompt_length is None:
            return plain
        return plain.map(_truncate_row, fn_kwargs=limits)
    if has_ids:
        plain = tokenize.with_columns(plain, IDS, where)
    else:
        plain, where = _unpaired(plain, first, where, num_proc)
        arguments = {"tokenizer": tokenizer, "where": where}
        options = tokenize.map_options(plain, num_proc, f"Tokenizing {where}")
        plain = plain.map(tokenize_row, with_indices=True, fn_kwargs=arguments, **options)
    plain = preference.without_full_prompts(plain, max_length, max_prompt_length, where, num_proc)
    if block is not None:
        plain = _with_kl_rows(plain, block, where)
    options = tokenize.map_options(plain, num_proc, f"Joining prompts and answers of {where}")
    plain = plain.map(_join_row, with_indices=True, fn_kwargs=limits | {"where": where}, **options)
    preference.warn_of_rows(plain, JOINED[:1], JOINED[1], where)
    return plain


def check_image_columns(columns: Collection[str], where: str) -> None:
    """Raise ValueError for a dataset with images if its rows are pairs or it lacks a column."""
    if pair_columns := [column for column in _PAIR if column in columns]:
        raise ValueError(
            "Vision datasets must be in unpaired format with `completion` and `label` columns. Paired format "
            f"(`chosen`/`rejected`) is not supported for vision datasets; {where} has the column {pair_columns[0]!r}. "
            "Unpair your dataset first: `dataset = unpair_preference_dataset(dataset)`."
        )
    if missing := [column for column in _NEEDED if column not in columns]:
        raise ValueError(
            f"{where} must have the column {missing[0]!r}, got {brief(list(columns), 500)}. Rename columns with "
            "dataset.rename_column."
        )


def with_previous_rows(rows: list[dict[str, Any]]) -> list[dict[str, Any]]:
    """Add to each row with images its predecessor as `KL_row`, whose answer is paired with this row's prompt to
    estimate the KL term. The first row gets the last one."""
    return [{**row, KL_ROW: previous} for row, previous in zip(rows, rows[-1:] + rows[:-1], strict=True)]


def image_example(row: dict[str, Any], encoder: Encoder, max_length: int | None) -> Example:
    """An example of the prompt with its answer and, after `with_previous_rows`, also with the answer of `KL_row`.

    Raises:
        ValueError: a column is missing or has the wrong format, or `max_length` truncates an image.
    """
    row = dict(row)
    kl_row = row.pop(KL_ROW, None)
    if row.get("label") not in (True, False):
        raise checks.cell_error("the row", "label", row.get("label"), "true for a desirable answer, false for others")
    texts = read_prompt(row, ("completion",), encoder)
    if kl_row is not None:
        texts = texts._replace(answers=[*texts.answers, *read_prompt(kl_row, ("completion",), encoder).answers])
    example = with_answers(texts, encoder, max_length)
    return example._replace(extras=Extras({"label": row["label"]}), num_primary_texts=1)


def is_prepared(columns: Any, block: int | None) -> bool:
    """Whether these columns include everything that a step reads; see `prepare` for `block`."""
    return preference.has_all(columns, (*JOINED, *(() if block is None else KL_JOINED), "label"))


def tokenize_row(row: dict[str, Any], index: int, tokenizer: Any, where: str) -> dict[str, list[int]]:
    """Tokenize a row: ids of the prompt, and the ids that the answer adds. `index` and `where` name it in errors."""
    row_name = f"Row {index} of {where}"
    checked_row = preference.read_row(row, ("completion",), row_name)
    texts = preference.tokenize_with_prompt(checked_row, ("completion",), tokenizer, row_name)
    return dict(zip(IDS, preference.split_at_prompt(*texts), strict=False))


def _unpaired(
    dataset: Dataset | IterableDataset, first: dict[str, Any], where: str, num_proc: int | None
) -> tuple[Dataset | IterableDataset, str]:
    """Convert pairs to rows with one answer each; returns also the dataset's name in errors. The order of the rows does
    not depend on `num_proc`."""
    if not preference.has_all(first, _PAIR):
        if not preference.has_all(first, _NEEDED):
            raise ValueError(
                f"{where} must have the columns 'prompt', 'completion' and 'label', or 'chosen' and 'rejected' (with "
                f"an optional 'prompt'), or {', '.join(IDS)}, got {brief(list(first), 500)}. Rename columns with "
                "dataset.rename_column."
            )
        return tokenize.with_columns(dataset, _NEEDED, where), where
    dataset = tokenize.with_columns(dataset, [name for name in ("prompt", *_PAIR) if name in first], where)
    if "prompt" not in first:
        options = tokenize.map_options(dataset, num_proc, f"Extracting prompt from {where}")
        dataset = dataset.map(_with_prompt, with_indices=True, fn_kwargs={"where": where}, **options)
    options = {} if isinstance(dataset, IterableDataset) else {"desc": f"Unpairing {where}"}
    return unpair_preference_dataset(dataset, **options), f"the unpaired {where}"


def _with_prompt(row: dict[str, Any], index: int, where: str) -> dict[str, Any]:
    return preference.read_row(row, _PAIR, f"Row {index} of {where}")


def _with_kl_rows(dataset: Dataset | IterableDataset, block: int, where: str) -> Dataset | IterableDataset:
    state = tokenize.StreamState()
    if isinstance(dataset, Dataset) and len(dataset) % block == 1:
        _warn_alone(where, block, state)
    arguments = {"block": block, "where": where, "state": state}
    return dataset.map(_kl_rows, batched=True, batch_size=block, fn_kwargs=arguments)


def _kl_rows(
    rows: dict[str, list[Any]], block: int, where: str, state: tokenize.StreamState
) -> dict[str, list[list[int]]]:
    """Rotate the answers of a block by one row."""
    *earlier_answers, last_answer = rows["completion_ids"]
    if not earlier_answers:
        _warn_alone(where, block, state)
    return {"KL_completion_ids": [last_answer, *earlier_answers]}


def _warn_alone(where: str, block: int, state: tokenize.StreamState) -> None:
    what = (
        f"The last row of {where} is the only row in its batch of per_device_train_batch_size={block}, so its KL is "
        "estimated from its own answer, as in TRL, and its loss stays at 0.5 if it is desirable and has become more "
        "likely. Remove a row or add one"
    )
    tokenize.warn_once(what, "alone", state)


def _truncate_row(
    row: dict[str, Any], with_kl: bool, max_length: int | None, max_prompt_length: int | None
) -> dict[str, Any]:
    """Truncate the joined texts; as in TRL, the prompt only if a text is too long."""
    columns = {}
    for names in (JOINED, KL_JOINED) if with_kl else (JOINED,):
        columns |= preference.truncate_joined(row, names, slice(max_length), max_prompt_length, fits=max_length or 0)
    return columns


def _join_row(
    row: dict[str, Any],
    index: int,
    with_kl: bool,
    max_length: int | None,
    max_prompt_length: int | None,
    where: str,
) -> dict[str, list[int]]:
    """Join the prompt with each answer, truncate, and build labels from the answer's ids."""
    row_name, columns = f"Row {index} of {where}", {}
    if max_prompt_length is not None:
        prompt = row["prompt_ids"]
        fits = max_length is not None and len(prompt) + len(row["completion_ids"]) <= max_length
        columns["prompt_ids"] = prompt if fits else prompt[-max_prompt_length:]
        row = {**row, **columns}
    if row["label"] not in (True, False):
        raise checks.cell_error(row_name, "label", row["label"], "true for a desirable answer, false for any other")
    answers = {"completion_ids": JOINED} | ({"KL_completion_ids": KL_JOINED} if with_kl else {})
    for answer, names in answers.items():
        columns |= zip(names, preference.join_with_prompt(row, answer, slice(max_length), row_name), strict=True)
    return columns


def warn_of_order(dataset: Dataset | IterableDataset, batch_size: int) -> None:
    """Warn if a dataset of pairs is so large that each micro-batch has only chosen or only rejected answers."""
    first = dataset.column_names or tokenize.first_row(dataset, "train_dataset")
    if not preference.has_all(first, _PAIR) or isinstance(dataset, Dataset) and len(dataset) < batch_size:
        return
    logger.warning(
        "train_dataset has pairs. As in TRL, each block of 1,000 pairs becomes all chosen answers followed by all "
        "rejected ones, and rows are trained on in that order: a micro-batch holds only one kind, and "
        "rewards/margins is not logged. To mix them, pass unpair_preference_dataset(dataset).shuffle(seed=42)."
    )
