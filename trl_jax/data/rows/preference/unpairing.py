"""Pairs as rows of one answer each, labelled as desirable or not."""

from __future__ import annotations

from typing import Any

from datasets import Dataset, DatasetDict, IterableDataset


def unpair_preference_dataset(dataset: Any, **map_kwargs: Any) -> Any:
    """Split each pair into two rows with `completion` and `label`; chosen answers of a block come before rejected ones.

    Args:
        dataset: Dataset, DatasetDict or IterableDataset of pairs.
        map_kwargs: for the dataset's `map`.
    """
    return dataset.map(_unpaired, batched=True, remove_columns=get_dataset_column_names(dataset), **map_kwargs)


def _unpaired(batch: dict[str, list[Any]]) -> dict[str, list[Any]]:
    pairs = len(batch["chosen"])
    unpaired = {"completion": batch["chosen"] + batch["rejected"], "label": [True] * pairs + [False] * pairs}
    others = {name: values * 2 for name, values in batch.items() if name not in ("chosen", "rejected")}
    return unpaired | others


def get_dataset_column_names(dataset: Dataset | IterableDataset | DatasetDict) -> list[str]:
    """Names of a dataset's columns; for a stream without that information, those of its first row."""
    if isinstance(dataset, dict):
        dataset = next(iter(dataset.values()))
    return list(next(iter(dataset))) if dataset.column_names is None else dataset.column_names
