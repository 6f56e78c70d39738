"""Loads datasets by name: a Hub id, a local folder, or one file."""

from __future__ import annotations

from collections.abc import Mapping
from pathlib import Path
from typing import TYPE_CHECKING

from trl_jax.core.printable import printable

if TYPE_CHECKING:
    from datasets import Dataset, IterableDataset

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
        raise FileNotFoundError(
            f"dataset folder {path} holds no {_readable()} file and was not saved by datasets."
        )
    if not path.exists() and _looks_like_path(name):
        raise FileNotFoundError(f"dataset {name!r}: there is no such file or folder, and it is not a Hub id.")

    from datasets import load_dataset

    return load_dataset(str(path) if path.is_dir() else name, name=config, streaming=streaming)


def _load_file(path: Path, config: str | None, streaming: bool) -> Mapping[str, Dataset | IterableDataset]:
    from datasets import load_dataset
    from datasets.exceptions import DatasetGenerationError

    _no_config(path, config)
    if _suffix(path) not in READERS:
        raise ValueError(
            f"dataset file {path} ends in {path.suffix!r}: wanted {_readable()}, or one of them .gz."
        )
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
        raise ValueError(
            f"dataset_config={config!r}: {path} has no configurations. Leave dataset_config out."
        )


def _suffix(path: Path) -> str:
    """The suffix of the file's type: .jsonl for rows.jsonl and for rows.jsonl.gz."""
    return Path(path.stem).suffix if path.suffix == ".gz" else path.suffix


def _looks_like_path(name: str) -> bool:
    # A Hub id is "name" or "owner/name".
    return name.startswith((".", "/", "~")) or name.count("/") > 1 or _suffix(Path(name)) in READERS


def _readable() -> str:
    return ", ".join(READERS)
