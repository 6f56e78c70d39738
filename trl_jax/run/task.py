"""What a trainer has to explain, and nothing else."""

from __future__ import annotations

import abc
from typing import Any

import jax
import numpy as np
from datasets import Dataset, IterableDataset

from trl_jax.engine.evaluation import Evaluated


class Task(abc.ABC):
    """How a row becomes tokens, and how a batch becomes a loss."""

    @abc.abstractmethod
    def loss(
        self, params: dict, batch: Any, key: jax.Array | None, *, remat: bool | str = False
    ) -> tuple[jax.Array, dict[str, jax.Array]]:
        """Loss and metrics (sums and counts) of one micro-batch; `key` is for dropout, None without it.

        `remat`: the backward pass computes layers again instead of keeping what they gave.
        """

    @abc.abstractmethod
    def score(self, params: dict, batch: Any, *, dtype: str) -> jax.Array:
        """Scores of one pass, computed in `dtype`."""

    @abc.abstractmethod
    def evaluation_loss(self, scores: jax.Array, batch: Any) -> dict[str, jax.Array]:
        """Metrics of one batch's scores, `loss` (a mean) among them."""

    @abc.abstractmethod
    def prepare_dataset(self, dataset: Any, name: str, *, bounded: bool = True) -> Dataset | IterableDataset:
        """Rows as the loader takes them; where they are `bounded`, without those longer than max_length. Preparing
        twice is preparing once."""

    @abc.abstractmethod
    def loader(self, dataset: Any, *, training: bool) -> Any:
        """Step batches over a prepared dataset."""

    @abc.abstractmethod
    def windows(self, loader: Any) -> Any:
        """What an evaluation of a loader's batches computes, as `engine.evaluation` takes it."""

    @abc.abstractmethod
    def training_metrics(self, steps: list[dict[str, np.ndarray]]) -> dict[str, float]:
        """What is logged of the steps since the last log, beside loss, grad_norm and learning_rate."""

    @abc.abstractmethod
    def evaluation_metrics(self, evaluated: Evaluated) -> dict[str, float]:
        """What is logged of an evaluation, beside its loss."""

    def more_metrics(self, evaluated: Evaluated, rows: tuple[Any, list[list[int]]], prefix: str) -> dict[str, float]:
        """What the arguments ask for beyond TRL's; `rows` are (dataset, the places of each batch's rows in it)."""
        return {}

    @abc.abstractmethod
    def real_scores(self, scores: np.ndarray, num_pairs: int) -> np.ndarray:
        """The rows of one batch's scores that belong to real pairs."""
