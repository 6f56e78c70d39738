"""The reference's log-probabilities of a whole dataset, computed before training, as columns of it."""

from __future__ import annotations

import os
from collections.abc import Callable
from dataclasses import replace
from functools import partial
from typing import Any

import jax
import numpy as np
from datasets import Dataset, IterableDataset
from tqdm.auto import tqdm

from trl_jax.data.example import of_examples
from trl_jax.data.layout.batch import Batch
from trl_jax.data.windows import Windows
from trl_jax.engine.devices.sharding import distributed
from trl_jax.engine.devices.spmd import ShardedStep
from trl_jax.run import data
from trl_jax.run.state import RunState
from trl_jax.run.step.forward import Forward


def precomputed(
    run: RunState, forward: Forward, dataset: Any, columns: tuple[str, ...], *, batch_size: int, name: str
) -> Dataset:
    """The dataset with a float32 column for each text: its log-probability under the run's reference.

    A dataset that has the columns is computed again: nothing in it says of which model they are. Under a model without
    weights, of a plan, they are zeros.

    Args:
        columns: their names, in the order of the texts.
        batch_size: examples of a batch on each device; the numbers do not depend on it.
        name: the dataset's, for the progress bar.

    Raises:
        ValueError: the dataset is a stream.
    """
    if isinstance(dataset, IterableDataset):
        raise ValueError(
            "`precompute_ref_log_probs=True` is not supported with IterableDataset. Please use a map-style Dataset or "
            "set `precompute_ref_log_probs=False`."
        )
    dataset = dataset.remove_columns([column for column in columns if column in dataset.column_names])
    loader = replace(data.loader(run, dataset, training=False), batch_size=batch_size * run.shards)
    found = np.zeros((len(columns), len(dataset)), np.float32)
    if any(isinstance(array, jax.ShapeDtypeStruct) for array in run.arrays.values()):
        return _with_columns(dataset, columns, found)
    hidden = run.args.disable_tqdm or bool(os.environ.get("TQDM_DISABLE"))
    progress = tqdm(total=len(dataset), desc=f"Computing reference log probs for {name} dataset", disable=hidden)
    with run.on_device(), progress:
        compute = _compiled(run, forward)
        for window in Windows(loader, sort=run.model.backend.batch_invariant):
            outputs = [compute(_placed(run, arrays)) for arrays, _ in window.passes]
            batches = zip(window.restored(jax.device_get(outputs)), window.batches, window.rows, strict=True)
            for logps, batch, rows in batches:
                found[:, rows] = of_examples(logps, len(columns), batch.num_examples).reshape(len(columns), -1)
                progress.update(batch.num_examples)
    return _with_columns(dataset, columns, found)


def _with_columns(dataset: Dataset, columns: tuple[str, ...], found: np.ndarray) -> Dataset:
    for column, values in zip(columns, found, strict=True):
        dataset = dataset.add_column(column, values)
    return dataset


def _compiled(run: RunState, forward: Forward) -> Callable[[Batch], jax.Array]:
    """A pass's arrays -> the reference's log-probabilities of its texts, `[X]` or `[shards, X]`."""

    def of_pass(arrays: dict, batch: Batch) -> jax.Array:
        return forward.reference_logps(arrays, jax.tree.map(lambda leaf: leaf[0], batch))

    plan = run.sharding_plan
    if plan is not None:
        of_pass = ShardedStep(plan, run.model.params, run.frozen).scores(of_pass)
    return partial(jax.jit(of_pass), run.arrays)


def _placed(run: RunState, batch: Batch) -> Batch:
    return batch if run.sharding_plan is None else distributed(batch, run.sharding_plan.rows)
