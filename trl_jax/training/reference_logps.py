"""Log-probabilities under the reference, precomputed and cached on disk."""

from __future__ import annotations

import contextlib
import io
import json
import logging
import os
import re
import time
from collections.abc import Callable, Iterator
from functools import partial
from importlib.metadata import version
from pathlib import Path
from typing import Any

import datasets
import jax
import numpy as np
import xxhash
from datasets import Dataset, IterableDataset
from tqdm.auto import tqdm

from trl_jax.config.base import BaseConfig
from trl_jax.core.files import replacing
from trl_jax.data.batch import Batch, of_examples
from trl_jax.data.loader import EvalChunk, EvalChunks, fingerprint
from trl_jax.mesh.mesh import ShardingPlan, distributed, pieces
from trl_jax.mesh.processes import from_first, is_first
from trl_jax.tasks.task import Task
from trl_jax.training import data
from trl_jax.training.devices import ShardedStep
from trl_jax.training.forward import Forward
from trl_jax.training.reference import ReferenceModel
from trl_jax.training.state import Setup

logger = logging.getLogger(__name__)

# The reference's log-probabilities of a whole dataset, computed before training and added as columns.


def precomputed(
    setup: Setup,
    dataset: Any,
    columns: tuple[str, ...],
    *,
    batch_size: int,
    name: str,
    cache_key: dict[str, Any],
) -> Dataset:
    """The dataset with a float32 column for each text: its log-probability under the run's reference.

    Results of an earlier run with the same reference and rows are read from disk. Existing columns are replaced,
    because they may come from another model. For a model without weights (planning), the columns are zeros.

    Args:
        columns: names of the columns, in the order of the texts.
        batch_size: examples in a batch on each device; another size changes the results only by rounding.
        name: the dataset's name, for the progress bar.
        cache_key: by name, what the results depend on besides the reference, the rows and what is common to all runs.

    Raises:
        ValueError: the dataset is a stream.
    """
    if isinstance(dataset, IterableDataset):
        raise ValueError(
            "`precompute_ref_log_probs=True` is not supported with IterableDataset. Please use a map-style Dataset or "
            "set `precompute_ref_log_probs=False`."
        )
    dataset = dataset.remove_columns([column for column in columns if column in dataset.column_names])
    if any(isinstance(array, jax.ShapeDtypeStruct) for array in setup.arrays.values()):
        return _with_columns(dataset, columns, np.zeros((len(columns), len(dataset)), np.float32))
    batch_size *= setup.shards
    folder = None
    if datasets.is_caching_enabled():
        cache_key = cache_key | _facts(setup.args, setup.task, setup.reference, dataset, batch_size)
        folder = folder_of(dataset, cache_key, setup.reference.split(setup.arrays)[1])
    cache = LogpsCache(folder, len(columns), len(dataset))
    if not cache.known.all():
        hidden = setup.args.disable_tqdm or bool(os.environ.get("TQDM_DISABLE"))
        words = f"Computing reference log probs for {name} dataset"
        with tqdm(total=len(dataset), initial=int(cache.known.sum()), desc=words, disable=hidden) as progress:
            _compute(setup, dataset, cache, batch_size, progress)
    return _with_columns(dataset, columns, cache.values)


def _compute(setup: Setup, dataset: Dataset, cache: LogpsCache, batch_size: int, progress: tqdm) -> None:
    """Compute what is missing in the cache. If this raises, finished results are kept.

    A chunk with a missing row is recomputed as a whole, in the same shapes as without a cache, so that the results are
    bitwise those of an uninterrupted run.
    """
    virtual = setup.reference.backend.virtual
    compute, loader = (
        _placing(_compiled(setup), setup.sharding_plan),
        data.evaluation_loader(setup, dataset, virtual=virtual),
    )
    chunks = EvalChunks(loader.with_layout(batch_size=batch_size), sort=setup.model.backend.traits.batch_invariant)
    try:
        with setup.on_device():
            for chunk in chunks:
                if all(cache.known[rows].all() for rows in chunk.rows):
                    continue
                for rows, logps in _by_batch(compute, chunk, len(cache.values)):
                    if not cache.known[rows].all():
                        progress.update(int(np.count_nonzero(~cache.known[rows])))
                        cache.put(rows[0], logps)
    finally:
        cache.flush()


def _by_batch(
    compute: Callable[[Batch], jax.Array], chunk: EvalChunk, columns: int
) -> Iterator[tuple[list[int], np.ndarray]]:
    """Yield the rows of each batch in order, with the log-probabilities of their texts, `[columns, rows]`."""
    outputs = [compute(arrays) for arrays, _ in chunk.passes]
    batches = zip(chunk.restored(jax.device_get(outputs)), chunk.batches, chunk.rows, strict=True)
    for logps, batch, rows in batches:
        yield rows, of_examples(logps, columns, batch.num_examples).reshape(columns, -1)


def _with_columns(dataset: Dataset, columns: tuple[str, ...], logps: np.ndarray) -> Dataset:
    for column, values in zip(columns, logps, strict=True):
        dataset = dataset.add_column(column, values)
    return dataset


def _compiled(setup: Setup) -> Callable[[Batch], jax.Array]:
    """A function: arrays of a pass -> the reference's log-probabilities of its texts, `[X]` or `[shards, X]`."""
    forward = Forward(setup)

    def logps(arrays: dict, batch: Batch) -> jax.Array:
        return forward.reference_stats(arrays, data.first_pass(batch))["logps"]

    plan = setup.sharding_plan
    if plan is not None:
        logps = ShardedStep(plan, setup.model.params, setup.frozen).scores(logps)
    return partial(jax.jit(logps), setup.arrays)


def _placing(compute: Callable[[Batch], jax.Array], plan: ShardingPlan | None) -> Callable[[Batch], jax.Array]:
    return compute if plan is None else lambda batch: compute(distributed(batch, plan.rows))


# An on-disk cache of a reference's log-probabilities, in parts, with a digest of everything they depend on as its key.


SECONDS = 60  # between writing two parts: what a killed run loses
_NO_PART = ("_name_or_path", "use_cache")  # entries of a config that do not affect the results
_FORMAT = 3  # increased when this package computes other results for the same model and rows
_PIECE = 1 << 28  # bytes of weights that are copied to the host at a time
_ADDRESS = re.compile(r" at 0x[0-9a-f]+")


class LogpsCache:
    """The log-probabilities of a dataset's texts: those found on disk, and those that were put.

    Each part on disk is a NumPy array `[columns, rows]` of consecutive rows. Its file name contains the first row and a
    digest of its content. Only the first process reads and writes.

    Attributes:
        values: float32 `[columns, rows]`.
        known: bool `[rows]`, whether a row's values are known.
    """

    def __init__(self, folder: Path | None, columns: int, rows: int):
        """
        Args:
            folder: of the parts; None disables reading and writing.
        """
        self._folder = folder if is_first() else None
        self.values, self.known = np.zeros((columns, rows), np.float32), np.zeros(rows, bool)
        self._start = self._stop = 0  # rows that are not written yet
        self._written = time.monotonic()
        self._read()
        self.values = np.frombuffer(from_first(self.values.tobytes()), np.float32).reshape(columns, rows).copy()
        self.known = np.frombuffer(from_first(self.known.tobytes()), bool).copy()

    def put(self, start: int, values: np.ndarray) -> None:
        """Add the values `[columns, rows]` of the rows from `start`; write a part every SECONDS seconds."""
        if start != self._stop:
            self.flush()
            self._start = start
        self._stop = start + values.shape[1]
        self.values[:, start : self._stop], self.known[start : self._stop] = values, True
        if time.monotonic() - self._written >= SECONDS:
            self.flush()

    def flush(self) -> None:
        """Write the pending rows. If the disk fails, log a warning and continue without writing."""
        part, start = self.values[:, self._start : self._stop], self._start
        self._start, self._written = self._stop, time.monotonic()
        if self._folder is None or not part.size:
            return
        try:
            _write(self._folder, start, part)
        except OSError as error:
            logger.warning("The reference's log-probabilities are not kept for the next run: %s.", error)
            self._folder = None

    def _read(self) -> None:
        damaged = []
        for path in [] if self._folder is None else sorted(self._folder.glob("*.npy")):
            try:
                start, part = _part(path)
                self.values[:, start : start + part.shape[1]] = part
                self.known[start : start + part.shape[1]] = True
            except (OSError, ValueError):
                damaged.append(path)
        for path in damaged:
            with contextlib.suppress(OSError):  # the next run then warns again
                path.unlink()
        if damaged:
            logger.warning(
                "%d of the files of log-probabilities in %s cannot be read or are damaged (%s): their values are "
                "computed again.",
                len(damaged),
                self._folder,
                damaged[0].name,
            )


def _write(folder: Path, start: int, part: np.ndarray) -> None:
    buffer = io.BytesIO()
    np.save(buffer, part, allow_pickle=False)
    content = buffer.getvalue()
    folder.mkdir(parents=True, exist_ok=True)
    with replacing(folder / f"{start}-{xxhash.xxh3_128_hexdigest(content)}.npy") as unfinished:
        unfinished.write_bytes(content)


def _part(path: Path) -> tuple[int, np.ndarray]:
    """The first row of a part, and its values.

    Raises:
        ValueError: the content does not match the digest in the name.
    """
    content = path.read_bytes()
    start, _, digest = path.stem.partition("-")
    if xxhash.xxh3_128_hexdigest(content) != digest:
        raise ValueError(f"{path} is damaged.")
    return int(start), np.load(io.BytesIO(content), allow_pickle=False)


def folder_of(dataset: Dataset, cache_key: dict[str, Any], arrays: dict[str, Any]) -> Path:
    """The cache folder of a reference's log-probabilities: next to the dataset's cache files, or in the cache of all
    datasets if the dataset is in memory.

    Args:
        cache_key: by name, what the results depend on besides the weights.
        arrays: the reference's weights.
    """
    files = dataset.cache_files
    parent = Path(files[0]["filename"]).parent if files else Path(datasets.config.HF_DATASETS_CACHE)
    return parent / f"reference-logps-{_key(cache_key, arrays)}"


def _facts(
    args: BaseConfig, task: Task, reference: ReferenceModel, dataset: Dataset, batch_size: int
) -> dict[str, Any]:
    """What the log-probabilities of any reference depend on, besides its weights. The batch size is included only for
    models whose position embeddings depend on it."""
    settings = {key: value for key, value in reference.config.to_dict().items() if key not in _NO_PART}
    return {
        "computed by": [_FORMAT, version("jax")],
        "rows": fingerprint(dataset, task.columns),
        "batch size": None if reference.backend.traits.batch_invariant else batch_size,
        "max_length": None if reference.backend.traits.window is None else args.max_length,
        "dtype": [args.compute_dtype, args.tf32, args.device.type, reference.dtype],
        "model": [reference.backend.name, _ADDRESS.sub("", repr(reference.backend.graph)), settings],
    }


def _key(metadata: dict[str, Any], arrays: dict[str, Any]) -> str:
    digest = xxhash.xxh3_128(json.dumps(metadata, sort_keys=True, default=str).encode())
    for path in sorted(arrays):
        digest.update(f"{path} {arrays[path].dtype} {arrays[path].shape}".encode())
        for piece in pieces(arrays[path], _PIECE):
            digest.update(np.ascontiguousarray(piece).reshape(-1).view(np.uint8))
    return digest.hexdigest()
