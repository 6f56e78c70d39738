"""The predictions of an evaluation, in the form that `compute_metrics` gets."""

from __future__ import annotations

import inspect
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import jax
import numpy as np
from datasets import Dataset
from transformers.trainer_utils import EvalPrediction, denumpify_detensorize

_FILLER = -100  # transformers' filler where arrays of several batches differ in length


@dataclass
class Predicted:
    """For each batch its predictions, its labels (`()` for none), the losses of its rows and, if wanted, its token ids.

    together: whether batches are joined for the script (eval_do_concat_batches). dataset: that was evaluated.
    """

    predictions: list[Any]
    labels: list[Any]
    losses: list[np.ndarray]
    inputs: list[np.ndarray] | None
    together: bool
    dataset: Any

    @property
    def joined(self) -> Any:
        """The predictions of all batches as one array, or as a list where they are not joined."""
        return _joined(self.predictions) if self.together else self.predictions

    @property
    def joined_labels(self) -> Any:
        """The labels likewise; `()` where there are none."""
        if not np.size(self.labels[0]):
            return ()
        return _joined(self.labels) if self.together else self.labels

    def metrics(self, compute: Callable[..., dict], include: list[str], by_batch: bool) -> dict[str, float]:
        """The metrics of the script's `compute`, ready for JSON.

        Args:
            include: `include_for_metrics`.
            by_batch: call it for each batch; the result of the last call counts.
        """
        if not by_batch:
            return _plain(compute(self._shown(slice(None), include, join=self.together)))
        metrics: dict[str, Any] = {}
        for i in range(len(self.predictions)):
            last = i == len(self.predictions) - 1
            metrics = compute(self._shown(slice(i, i + 1), include, join=True), compute_result=last)
        return _plain(metrics)

    def _shown(self, which: slice, include: list[str], *, join: bool) -> EvalPrediction:
        def part(values):
            return _joined(values[which]) if join else values[which]

        labels = part(self.labels) if np.size(self.labels[0]) else ()
        return EvalPrediction(
            predictions=part(self.predictions),
            label_ids=labels,
            inputs=part(self.inputs) if "inputs" in include else None,
            losses=part(self.losses) if "loss" in include else None,
        )


def check_compute_metrics(compute_metrics: Any, by_batch: bool) -> None:
    """Raise ValueError where `batch_eval_metrics` asks for an argument that the function does not take."""
    if by_batch and compute_metrics is not None:
        if "compute_result" not in inspect.signature(compute_metrics).parameters:
            raise ValueError(
                "batch_eval_metrics=True calls compute_metrics(predictions, compute_result=...) batch by batch, and it "
                "takes no compute_result. Add the argument, or leave batch_eval_metrics out."
            )


def token_ids_of(dataset: Any, places: list[int], columns: tuple[str, ...]) -> np.ndarray:
    """Token ids `[X, T]` of a batch's texts, padded with -100: those of the first column, then those of the next.

    Args:
        places: of the batch's rows in the dataset.
    """
    if not isinstance(dataset, Dataset):
        raise ValueError("include_for_metrics=['inputs'] needs rows that can be read twice: pass a Dataset, no stream.")
    rows = dataset[places]
    return _joined([np.asarray(ids)[None] for column in columns for ids in rows[column]])


def _joined(batches: list[Any]) -> Any:
    """Join arrays, or tuples of arrays, along the first axis, filled up to the longest along the second."""
    if isinstance(batches[0], tuple | list):
        return tuple(_joined(list(parts)) for parts in zip(*batches, strict=True))
    arrays = [np.asarray(batch) for batch in batches]
    if arrays[0].ndim < 2:
        return np.concatenate(arrays)
    longest = max(array.shape[1] for array in arrays)

    def filled(array):
        missing = [(0, 0), (0, longest - array.shape[1]), *[(0, 0)] * (array.ndim - 2)]
        return np.pad(array, missing, constant_values=_FILLER)

    return np.concatenate([filled(array) for array in arrays])


def _plain(metrics: dict[str, Any]) -> dict[str, float]:
    on_host = {name: np.asarray(v) if isinstance(v, jax.Array) else v for name, v in metrics.items()}
    return denumpify_detensorize(on_host)  # logs and states are written as JSON
