"""Load the datasets that flags and YAML files name: `dataset_name` and mixtures."""

from __future__ import annotations

import logging
from collections.abc import Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import TYPE_CHECKING, Any

from trl_jax.config.rules import must_be, read_bools
from trl_jax.core.secrets import scrubbed
from trl_jax.core.text import api_boundary, printable

if TYPE_CHECKING:
    from datasets import Dataset, DatasetDict, IterableDataset


logger = logging.getLogger(__name__)

READERS = {".jsonl": "json", ".json": "json", ".parquet": "parquet", ".csv": "csv"}
# Written by Dataset.save_to_disk and DatasetDict.save_to_disk.
SAVED = ("state.json", "dataset_dict.json")


# One dataset


def load_splits(
    name: str, config: str | None = None, streaming: bool = False
) -> Mapping[str, Dataset | IterableDataset]:
    """Load a dataset by Hub id, folder or file: split -> rows. A single file or saved dataset is the split "train".

    Raises:
        FileNotFoundError: the path does not exist, or the folder has no file that can be read.
        ValueError: the file cannot be read, or `config` is given for local data.
    """
    path = Path(name).expanduser()
    if path.is_file():
        return _load_file(path, config, streaming)
    if path.is_dir() and any((path / marker).is_file() for marker in SAVED):
        return _load_saved(path, config, streaming)
    if path.is_dir() and not any(_suffix(file) in READERS for file in path.rglob("*")):
        raise FileNotFoundError(f"dataset folder {path} has no {_suffixes()} file and was not saved with save_to_disk.")
    if not path.exists() and _looks_like_path(name):
        raise FileNotFoundError(f"dataset {name!r}: no such file or folder, and not a Hub id.")

    from datasets import load_dataset

    return load_dataset(str(path) if path.is_dir() else name, name=config, streaming=streaming)


def _load_file(path: Path, config: str | None, streaming: bool) -> Mapping[str, Dataset | IterableDataset]:
    from datasets import load_dataset
    from datasets.exceptions import DatasetGenerationError

    _refuse_config(path, config)
    if _suffix(path) not in READERS:
        raise ValueError(f"The suffix of a dataset file must be {_suffixes()}, or one of these with .gz, got {path}.")
    if path.stat().st_size == 0:
        raise ValueError(f"dataset file {path} is empty.")
    try:
        return load_dataset(READERS[_suffix(path)], data_files={"train": str(path)}, streaming=streaming)
    except (StopIteration, ValueError, DatasetGenerationError) as error:
        cause = error.__cause__ or error  # the message of DatasetGenerationError says nothing
        text = f"{type(cause).__name__}: {printable(str(cause)[:300])}"
        raise ValueError(f"dataset file {path} cannot be read as {_suffix(path)} ({text}).") from error


def _load_saved(path: Path, config: str | None, streaming: bool) -> Mapping[str, Dataset | IterableDataset]:
    from datasets import Dataset, load_from_disk

    _refuse_config(path, config)
    saved = load_from_disk(str(path))
    splits = {"train": saved} if isinstance(saved, Dataset) else dict(saved)
    return {split: rows.to_iterable_dataset() for split, rows in splits.items()} if streaming else splits


def _refuse_config(path: Path, config: str | None) -> None:
    if config is not None:
        raise ValueError(f"dataset_config={config!r}: {path} has no configurations. Leave dataset_config out.")


def _suffix(path: Path) -> str:
    """The suffix without .gz: .jsonl for rows.jsonl and rows.jsonl.gz."""
    return Path(path.stem).suffix if path.suffix == ".gz" else path.suffix


def _looks_like_path(name: str) -> bool:
    # A Hub id is "name" or "owner/name".
    return name.startswith((".", "/", "~")) or name.count("/") > 1 or _suffix(Path(name)) in READERS


def _suffixes() -> str:
    return ", ".join(READERS)


# Mixtures


@dataclass
class DatasetConfig:
    """One dataset of a mixture, as arguments of `datasets.load_dataset`: TRL's fields, defaults and order.

    fraction: relative share of the mixture; set for all datasets or for none.
    """

    path: str
    name: str | None = None
    data_dir: str | None = None
    data_files: str | list[str] | dict[str, str] | None = None
    split: str = "train"
    columns: list[str] | None = None
    fraction: float | None = None


@dataclass
class DatasetMixtureConfig:
    """The mixture that `datasets:` in a YAML file lists: TRL's fields, defaults and order."""

    _argument_group_name = "mixture"

    datasets: list[DatasetConfig] = field(
        default_factory=list, metadata={"help": "Datasets to train on, one mapping each. Only in a YAML file."}
    )
    streaming: bool = field(default=False, metadata={"help": "Stream the rows of the mixture."})
    test_split_size: float | None = field(
        default=None, metadata={"help": "Share (below 1) or number of rows to evaluate on."}
    )

    def __post_init__(self):
        read_bools(self)
        if not isinstance(self.datasets, list | tuple):
            raise ValueError(must_be("datasets", "a list of mappings, each with its `path`", self.datasets))
        self.datasets = [DatasetConfig(**config) if isinstance(config, dict) else config for config in self.datasets]


@api_boundary
def get_dataset(mixture_config: DatasetMixtureConfig) -> DatasetDict:
    """Concatenate the datasets into the split "train", and split off "test" if `test_split_size` is set.

    With fractions, each dataset contributes its first rows, as many as these shares allow without repeating rows.

    Raises:
        ValueError: there are no datasets, only some have a fraction, or fractions are combined with streaming.
    """
    import datasets

    if not mixture_config.datasets:
        raise ValueError(
            "No datasets were loaded from the mixture configuration: list one or more under `datasets:`, each with its "
            "`path`."
        )
    parts = [_load(config, mixture_config.streaming) for config in mixture_config.datasets]
    fractions = [config.fraction for config in mixture_config.datasets]
    if any(fraction is not None for fraction in fractions):
        parts = _take_fractions(parts, fractions, mixture_config.streaming)
    mixture = datasets.concatenate_datasets(parts)
    if mixture_config.test_split_size is not None:
        return mixture.train_test_split(test_size=mixture_config.test_split_size)
    return datasets.DatasetDict({"train": mixture})


def _load(config: DatasetConfig, streaming: bool) -> Any:
    import datasets

    logger.info("Loading %s for the mixture (config %s).", scrubbed(config.path), config.name)
    source = {"data_dir": config.data_dir, "data_files": config.data_files, "split": config.split}
    rows = datasets.load_dataset(path=config.path, name=config.name, **source, streaming=streaming)
    return rows if config.columns is None else rows.select_columns(config.columns)


def _take_fractions(parts: list[Any], fractions: list[float | None], streaming: bool) -> list[Any]:
    if any(fraction is None for fraction in fractions):
        raise ValueError(
            f"`fraction` must be set for either all datasets in the mixture or none of them, got {fractions}."
        )
    if streaming:
        raise ValueError(
            "Using a dataset `fraction` is not supported with streaming datasets: remove it, or turn streaming off."
        )
    weights = [fraction / sum(fractions) for fraction in fractions]
    total = min(len(part) / weight for part, weight in zip(parts, weights, strict=True) if weight > 0)
    return [part.select(range(round(weight * total))) for part, weight in zip(parts, weights, strict=True)]
