"""The reference's log-probabilities of a whole dataset, computed before training, as columns of it."""

from __future__ import annotations

import os
from collections.abc import Callable, Iterator
from functools import partial
from typing import Any

import jax
import numpy as np
from datasets import Dataset, IterableDataset
from tqdm.auto import tqdm

from trl_jax.data.eval_chunks import EvalChunk, EvalChunks
from trl_jax.data.example import of_examples
from trl_jax.data.layout.batch import Batch
from trl_jax.engine.devices.spmd import ShardedStep
from trl_jax.mesh.arrays import distributed
from trl_jax.run import data
from trl_jax.run.model.logps_cache import LogpsCache, folder_of
from trl_jax.run.state import RunState
from trl_jax.run.step.forward import Forward


def precomputed(
    run: RunState,
    dataset: Any,
    columns: tuple[str, ...],
    *,
    batch_size: int,
    name: str,
    facts: dict[str, Any],
) -> Dataset:
    """The dataset with a float32 column for each text: its log-probability under the run's reference.

    What an earlier run computed by the same reference of the same rows is read from the disk. The columns of a dataset
    that has them are replaced: nothing in it says of which model they are. Under a model without weights, of a plan,
    they are zeros.

    Args:
        columns: their names, in the order of the texts.
        batch_size: examples of a batch on each device; by another one the numbers differ in rounding alone.
        name: the dataset's, for the progress bar.
        facts: by name, what the numbers depend on besides the reference, the rows and what every run has.

    Raises:
        ValueError: the dataset is a stream.
    """
    if isinstance(dataset, IterableDataset):
        raise ValueError(
            "`precompute_ref_log_probs=True` is not supported with IterableDataset. Please use a map-style Dataset or "
            "set `precompute_ref_log_probs=False`."
        )
    dataset = dataset.remove_columns([column for column in columns if column in dataset.column_names])
    if any(isinstance(array, jax.ShapeDtypeStruct) for array in run.arrays.values()):
        return _with_columns(dataset, columns, np.zeros((len(columns), len(dataset)), np.float32))
    batch_size *= run.shards
    cache = LogpsCache(folder_of(run, dataset, batch_size, facts), len(columns), len(dataset))
    if not cache.known.all():
        hidden = run.args.disable_tqdm or bool(os.environ.get("TQDM_DISABLE"))
        words = f"Computing reference log probs for {name} dataset"
        with tqdm(total=len(dataset), initial=int(cache.known.sum()), desc=words, disable=hidden) as progress:
            _compute(run, dataset, cache, batch_size, progress)
    return _with_columns(dataset, columns, cache.values)


def _compute(run: RunState, dataset: Dataset, cache: LogpsCache, batch_size: int, progress: tqdm) -> None:
    """Put those that are missing into the cache; where it raises, those that were computed are kept.

    A chunk with a missing row is computed whole, in the shapes that it has when nothing is known: so what is gone on
    with is, bit for bit, what was never broken off.
    """
    virtual = run.reference.backend.virtual
    compute, loader = _compiled(run), data.loader(run, dataset, training=False, virtual=virtual)
    chunks = EvalChunks(loader.laid_out(batch_size=batch_size), sort=run.model.backend.batch_invariant)
    try:
        with run.on_device():
            for chunk in chunks:
                if all(cache.known[rows].all() for rows in chunk.rows):
                    continue
                for rows, logps in _by_batch(run, compute, chunk, len(cache.values)):
                    if not cache.known[rows].all():
                        progress.update(int(np.count_nonzero(~cache.known[rows])))
                        cache.put(rows[0], logps)
    finally:
        cache.flush()


def _by_batch(
    run: RunState, compute: Callable[[Batch], jax.Array], chunk: EvalChunk, columns: int
) -> Iterator[tuple[list[int], np.ndarray]]:
    """The rows of each batch, one behind the other, and the log-probabilities of their texts, `[columns, rows]`."""
    outputs = [compute(_placed(run, arrays)) for arrays, _ in chunk.passes]
    batches = zip(chunk.restored(jax.device_get(outputs)), chunk.batches, chunk.rows, strict=True)
    for logps, batch, rows in batches:
        yield rows, of_examples(logps, columns, batch.num_examples).reshape(columns, -1)


def _with_columns(dataset: Dataset, columns: tuple[str, ...], found: np.ndarray) -> Dataset:
    for column, values in zip(columns, found, strict=True):
        dataset = dataset.add_column(column, values)
    return dataset


def _compiled(run: RunState) -> Callable[[Batch], jax.Array]:
    """A pass's arrays -> the reference's log-probabilities of its texts, `[X]` or `[shards, X]`."""
    forward = Forward(run)

    def of_pass(arrays: dict, batch: Batch) -> jax.Array:
        return forward.of_reference(arrays, jax.tree.map(lambda leaf: leaf[0], batch))["logps"]

    plan = run.sharding_plan
    if plan is not None:
        of_pass = ShardedStep(plan, run.model.params, run.frozen).scores(of_pass)
    return partial(jax.jit(of_pass), run.arrays)


def _placed(run: RunState, batch: Batch) -> Batch:
    return batch if run.sharding_plan is None else distributed(batch, run.sharding_plan.rows)
