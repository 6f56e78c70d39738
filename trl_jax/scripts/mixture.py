"""Joins several datasets to one."""

import logging
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Any

from trl_jax.core.arguments.values import read_bools
from trl_jax.core.secrets import scrubbed

if TYPE_CHECKING:
    from datasets import DatasetDict

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


def get_dataset(mixture_config: DatasetMixtureConfig) -> "DatasetDict":
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
