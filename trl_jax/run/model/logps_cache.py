"""Log-probabilities of a reference on the disk, in parts, found again by a digest of all that they depend on."""

from __future__ import annotations

import contextlib
import io
import json
import logging
import re
import time
from importlib.metadata import version
from pathlib import Path
from typing import Any

import datasets
import numpy as np
import xxhash
from datasets import Dataset

from trl_jax.core.files.whole_file import replacing
from trl_jax.data.fingerprint import fingerprint
from trl_jax.engine.devices.processes import from_first, is_first
from trl_jax.mesh.arrays import pieces
from trl_jax.run.state import RunState

logger = logging.getLogger(__name__)

SECONDS = 60  # between two parts: what a run that is killed loses
_NO_PART = ("_name_or_path", "use_cache")  # of a config in the numbers
_FORMAT = 3  # raised when this package computes other numbers of the same model and rows
_PIECE = 1 << 28  # bytes of weights that come to the host at a time
_ADDRESS = re.compile(r" at 0x[0-9a-f]+")


class LogpsCache:
    """The log-probabilities of a dataset's texts, those that are known already and those that are put.

    Each part on the disk is an array of NumPy's, `[columns, rows]` of consecutive rows, and has the first row and the
    digest of its bytes in its name. The first process reads and writes.

    Attributes:
        values: float32 `[columns, rows]`.
        known: which of them are there, `[rows]`.
    """

    def __init__(self, folder: Path | None, columns: int, rows: int):
        """
        Args:
            folder: where the parts are; None keeps nothing.
        """
        self._folder = folder if is_first() else None
        self.values, self.known = np.zeros((columns, rows), np.float32), np.zeros(rows, bool)
        self._start = self._stop = 0  # rows that are not written yet
        self._written = time.monotonic()
        self._read()
        self.values = np.frombuffer(from_first(self.values.tobytes()), np.float32).reshape(columns, rows).copy()
        self.known = np.frombuffer(from_first(self.known.tobytes()), bool).copy()

    def put(self, start: int, values: np.ndarray) -> None:
        """Add those of the rows from `start`, `[columns, rows]`, and write a part when it is time."""
        if start != self._stop:
            self.flush()
            self._start = start
        self._stop = start + values.shape[1]
        self.values[:, start : self._stop], self.known[start : self._stop] = values, True
        if time.monotonic() - self._written >= SECONDS:
            self.flush()

    def flush(self) -> None:
        """Write what is not written yet. A disk that takes nothing costs a warning, and the run goes on."""
        part, start = self.values[:, self._start : self._stop], self._start
        self._start, self._written = self._stop, time.monotonic()
        if self._folder is None or not part.size:
            return
        try:
            _write(self._folder, start, part)
        except OSError as error:
            logger.warning(f"The reference's log-probabilities are not kept for the next run: {error}.")
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
            with contextlib.suppress(OSError):  # then the next run says so again
                path.unlink()
        if damaged:
            logger.warning(
                f"{len(damaged)} of the files of log-probabilities in {self._folder} cannot be read or are damaged "
                f"({damaged[0].name}): what they had is computed again."
            )


def _write(folder: Path, start: int, part: np.ndarray) -> None:
    buffer = io.BytesIO()
    np.save(buffer, part, allow_pickle=False)
    content = buffer.getvalue()
    folder.mkdir(parents=True, exist_ok=True)
    with replacing(folder / f"{start}-{xxhash.xxh3_128_hexdigest(content)}.npy") as beside:
        beside.write_bytes(content)


def _part(path: Path) -> tuple[int, np.ndarray]:
    """The first row of a part, and its values.

    Raises:
        ValueError: it is not what was written under this name.
    """
    content = path.read_bytes()
    start, _, digest = path.stem.partition("-")
    if xxhash.xxh3_128_hexdigest(content) != digest:
        raise ValueError(f"{path} is damaged.")
    return int(start), np.load(io.BytesIO(content), allow_pickle=False)


def folder_of(run: RunState, dataset: Dataset, batch_size: int, facts: dict[str, Any]) -> Path | None:
    """Where the log-probabilities of the run's reference belong: beside the cache files of the dataset, or among those
    of all datasets for one in memory. None where `datasets.disable_caching()` was called.

    Args:
        batch_size: examples of a batch, on which ropes of some models depend.
        facts: what else the numbers depend on.
    """
    if not datasets.is_caching_enabled():
        return None
    files = dataset.cache_files
    parent = Path(files[0]["filename"]).parent if files else Path(datasets.config.HF_DATASETS_CACHE)
    return parent / f"reference-logps-{_key(run, dataset, batch_size, facts)}"


def _key(run: RunState, dataset: Dataset, batch_size: int, facts: dict[str, Any]) -> str:
    """The digest of the reference's weights, of what is computed with them, and of the prepared rows."""
    args, reference = run.args, run.reference
    settings = {key: value for key, value in reference.config.to_dict().items() if key not in _NO_PART}
    whole = {
        **facts,
        "computed by": [_FORMAT, version("jax")],
        "rows": fingerprint(dataset, run.task.columns),
        "batch size": None if reference.backend.batch_invariant else batch_size,
        "max_length": None if reference.backend.window is None else args.max_length,
        "dtype": [args.compute_dtype, args.tf32, args.device.type, reference.dtype],
        "model": [reference.backend.name, _ADDRESS.sub("", repr(reference.backend.graph)), settings],
    }
    digest = xxhash.xxh3_128(json.dumps(whole, sort_keys=True, default=str).encode())
    _, arrays = reference.split(run.arrays)
    for path in sorted(arrays):
        digest.update(f"{path} {arrays[path].dtype} {arrays[path].shape}".encode())
        for piece in pieces(arrays[path], _PIECE):
            digest.update(np.ascontiguousarray(piece).reshape(-1).view(np.uint8))
    return digest.hexdigest()
