"""Datasets of the command line: `dataset_name` and mixtures."""

from __future__ import annotations

import logging
from collections.abc import Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import TYPE_CHECKING, Any

from trl_jax.config.rules import read_bools
from trl_jax.core.secrets import scrubbed
from trl_jax.core.text import printable

if TYPE_CHECKING:
    from datasets import Dataset, DatasetDict, IterableDataset


# ----------------------------------------------------------------------------------------------------
# Loads datasets by name: a Hub id, a local folder, or one file.


READERS = {".jsonl": "json", ".json": "json", ".parquet": "parquet", ".csv": "csv"}
# Files of Dataset.save_to_disk and DatasetDict.save_to_disk.
SAVED = ("state.json", "dataset_dict.json")


def load_splits(
    name: str, config: str | None = None, streaming: bool = False
) -> Mapping[str, Dataset | IterableDataset]:
    """Load split -> rows. A single file, or a single saved dataset, is the split "train".

    Raises:
        FileNotFoundError: a path leads nowhere or to an empty folder.
        ValueError: a file type or a configuration that cannot be read.
    """
    path = Path(name).expanduser()
    if path.is_file():
        return _load_file(path, config, streaming)
    if path.is_dir() and any((path / marker).is_file() for marker in SAVED):
        return _load_saved(path, config, streaming)
    if path.is_dir() and not any(_suffix(file) in READERS for file in path.rglob("*")):
        raise FileNotFoundError(f"dataset folder {path} holds no {_readable()} file and was not saved by datasets.")
    if not path.exists() and _looks_like_path(name):
        raise FileNotFoundError(f"dataset {name!r}: there is no such file or folder, and it is not a Hub id.")

    from datasets import load_dataset

    return load_dataset(str(path) if path.is_dir() else name, name=config, streaming=streaming)


def _load_file(path: Path, config: str | None, streaming: bool) -> Mapping[str, Dataset | IterableDataset]:
    from datasets import load_dataset
    from datasets.exceptions import DatasetGenerationError

    _no_config(path, config)
    if _suffix(path) not in READERS:
        raise ValueError(f"dataset file {path} ends in {path.suffix!r}: wanted {_readable()}, or one of them .gz.")
    if path.stat().st_size == 0:
        raise ValueError(f"dataset file {path} is empty: wanted rows to train on.")
    try:
        return load_dataset(READERS[_suffix(path)], data_files={"train": str(path)}, streaming=streaming)
    except (StopIteration, ValueError, DatasetGenerationError) as error:
        found = error.__cause__ or error  # datasets' own text says only that there was an error
        text = f"{type(found).__name__}: {printable(str(found)[:300])}"
        raise ValueError(f"dataset file {path} holds no rows that can be read as {_suffix(path)} ({text}).") from error


def _load_saved(path: Path, config: str | None, streaming: bool) -> Mapping[str, Dataset | IterableDataset]:
    from datasets import Dataset, load_from_disk

    _no_config(path, config)
    saved = load_from_disk(str(path))
    splits = {"train": saved} if isinstance(saved, Dataset) else dict(saved)
    return {split: rows.to_iterable_dataset() for split, rows in splits.items()} if streaming else splits


def _no_config(path: Path, config: str | None) -> None:
    if config is not None:
        raise ValueError(f"dataset_config={config!r}: {path} has no configurations. Leave dataset_config out.")


def _suffix(path: Path) -> str:
    """The suffix of the file's type: .jsonl for rows.jsonl and for rows.jsonl.gz."""
    return Path(path.stem).suffix if path.suffix == ".gz" else path.suffix


def _looks_like_path(name: str) -> bool:
    # A Hub id is "name" or "owner/name".
    return name.startswith((".", "/", "~")) or name.count("/") > 1 or _suffix(Path(name)) in READERS


def _readable() -> str:
    return ", ".join(READERS)


# ----------------------------------------------------------------------------------------------------
# Joins several datasets to one.


logger = logging.getLogger(__name__)


@dataclass
class DatasetConfig:
    """One dataset of a mixture, in the arguments of `datasets.load_dataset`: TRL's fields, defaults and order.

    fraction: its share of the mixture, in any unit; given for all datasets or for none.
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
    """The datasets of a mixture, as a YAML file's `datasets:` lists them: TRL's fields, defaults and order."""

    _argument_group_name = "mixture"

    datasets: list[DatasetConfig] = field(
        default_factory=list, metadata={"help": "Datasets to train on, a mapping each; in a YAML file only."}
    )
    streaming: bool = field(default=False, metadata={"help": "Read the mixture's rows as they are needed."})
    test_split_size: float | None = field(
        default=None, metadata={"help": "Share (below 1) or number of the mixture's rows to evaluate on."}
    )

    def __post_init__(self):
        read_bools(self)
        self.datasets = [DatasetConfig(**each) if isinstance(each, dict) else each for each in self.datasets]


def get_dataset(mixture_config: DatasetMixtureConfig) -> DatasetDict:
    """Join the datasets to the split "train", and split "test" off where `test_split_size` is set.

    With fractions, only the first rows of each are taken: as many as give these shares without repeating a row.

    Raises:
        ValueError: no datasets, fractions of some only, or of streamed rows.
    """
    import datasets

    if not mixture_config.datasets:
        raise ValueError("The mixture names no dataset: list one or more under `datasets:`, each with its `path`.")
    parts = [_load(each, mixture_config.streaming) for each in mixture_config.datasets]
    fractions = [each.fraction for each in mixture_config.datasets]
    if any(fraction is not None for fraction in fractions):
        parts = _shares(parts, fractions, mixture_config.streaming)
    whole = datasets.concatenate_datasets(parts)
    if mixture_config.test_split_size is not None:
        return whole.train_test_split(test_size=mixture_config.test_split_size)
    return datasets.DatasetDict({"train": whole})


def _load(config: DatasetConfig, streaming: bool) -> Any:
    import datasets

    logger.info("Loading %s for the mixture (config %s).", scrubbed(config.path), config.name)
    rows = datasets.load_dataset(
        path=config.path,
        name=config.name,
        data_dir=config.data_dir,
        data_files=config.data_files,
        split=config.split,
        streaming=streaming,
    )
    return rows if config.columns is None else rows.select_columns(config.columns)


def _shares(parts: list[Any], fractions: list[float | None], streaming: bool) -> list[Any]:
    if any(fraction is None for fraction in fractions):
        raise ValueError(f"fraction is set for some datasets only ({fractions}). Set it for all of them or for none.")
    if streaming:
        raise ValueError("fraction needs datasets with a length: leave it out, or streaming.")
    weights = [fraction / sum(fractions) for fraction in fractions]
    total = min(len(part) / weight for part, weight in zip(parts, weights, strict=True) if weight > 0)
    return [part.select(range(round(weight * total))) for part, weight in zip(parts, weights, strict=True)]
