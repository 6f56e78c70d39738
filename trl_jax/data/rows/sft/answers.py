"""Labels of answers alone, found by the tokens that they begin behind: those that DataCollatorForCompletionOnlyLM of
TRL up to 0.19 made of each batch."""

from __future__ import annotations

import logging
from collections.abc import Sequence
from typing import Any, NamedTuple

import numpy as np
from datasets import Dataset, IterableDataset

from trl_jax.data.example import IGNORED
from trl_jax.data.rows.checks import blocks, list_lengths

logger = logging.getLogger(__name__)


class AnswerMarks(NamedTuple):
    """Tokens by which answers are found.

    response: ids that an answer begins behind. instruction: ids that a question begins with, at which an answer ends;
    None: a text has one answer, behind the last mark. pad: the id that is no target, wherever it stands.
    """

    response: tuple[int, ...]
    instruction: tuple[int, ...] | None
    pad: int | None


def answer_labels(ids: Sequence[int], marks: AnswerMarks) -> list[int]:
    """The ids of answers, and -100 elsewhere; -100 throughout where a mark is missing."""
    labels = np.asarray(ids, np.int64).copy()
    if marks.pad is not None:
        labels[labels == marks.pad] = IGNORED
    begins = [start + len(marks.response) for start in _places(labels, marks.response)]
    if marks.instruction is None:
        labels[: begins[-1] if begins else None] = IGNORED
        return labels.tolist()
    ends = _places(labels, marks.instruction)
    if not begins or not ends:
        return [IGNORED] * len(ids)
    ends = [0, *ends] if ends[0] > begins[0] else [0, *ends[1:]]
    for end, begin in zip(ends, begins, strict=False):
        labels[end:begin] = IGNORED
    if len(begins) < len(ends):
        labels[ends[-1] :] = IGNORED
    return labels.tolist()


def _places(ids: np.ndarray, mark: tuple[int, ...]) -> list[int]:
    """Where the ids `[T]` have the mark."""
    if len(ids) < len(mark):
        return []
    windows = np.lib.stride_tricks.sliding_window_view(ids, len(mark))
    return np.flatnonzero((windows == np.asarray(mark)).all(axis=1)).tolist()


def label_answers(
    dataset: Dataset | IterableDataset, marks: AnswerMarks, where: str, options: dict[str, Any]
) -> Dataset | IterableDataset:
    """Give rows with `input_ids` the labels of `answer_labels`; warn of a table's rows that have none.

    Args:
        options: of `Dataset.map`.
    """
    labelled = dataset.map(_labelled_batch, batched=True, fn_kwargs={"marks": marks}, **options)
    if not isinstance(labelled, IterableDataset):
        missing = sum(_without_label(labels, lengths) for labels, lengths in _all_labels(labelled))
        if missing:
            logger.warning(
                f"{missing:,} of {len(labelled):,} rows of {where} have no answer to train on, and count as nothing: "
                f"the response template (tokens {list(marks.response)}) is not in them, or max_length cuts it off. A "
                "template at the beginning of a line may have other tokens within a text than alone: pass its ids."
            )
    return labelled


def _labelled_batch(batch: dict[str, list], marks: AnswerMarks) -> dict[str, list]:
    return {"labels": [answer_labels(ids, marks) for ids in batch["input_ids"]]}


def _all_labels(dataset: Dataset) -> Any:
    return (list_lengths(block, "labels") for _, block in blocks(dataset, ("labels",)))


def _without_label(labels: np.ndarray, lengths: np.ndarray) -> int:
    rows = np.repeat(np.arange(len(lengths)), lengths)
    return int(np.count_nonzero(np.bincount(rows[labels != IGNORED], minlength=len(lengths)) == 0))
