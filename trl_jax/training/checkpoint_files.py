"""Checkpoint folders: written under a temporary name, verified, and renamed when complete."""

from __future__ import annotations

import contextlib
import copy
import errno
import fcntl
import json
import logging
import mmap
import os
import random
import re
import secrets
import shutil
import socket
import stat
from collections import deque
from collections.abc import Callable, Iterator, Sequence
from concurrent.futures import Future, ThreadPoolExecutor
from dataclasses import asdict, dataclass, field, fields
from fnmatch import fnmatch
from functools import cache, partial
from importlib.metadata import version
from pathlib import Path
from typing import Any

import jax
import numpy as np
import xxhash
from safetensors import SafetensorError, safe_open
from transformers.trainer_callback import ExportableState, TrainerState
from transformers.trainer_utils import PREFIX_CHECKPOINT_DIR, SaveStrategy

from trl_jax.core import text
from trl_jax.core.files import Pieces, in_order, write_tensors
from trl_jax.core.secrets import learn, masked
from trl_jax.core.text import brief
from trl_jax.core.torch_random import GeneratorState, TorchGenerator, default_generator
from trl_jax.mesh.mesh import owned, pieces, placed
from trl_jax.mesh.processes import from_first
from trl_jax.training.events import Events

logger = logging.getLogger(__name__)

# Writing checkpoint folders, and deleting old ones once a newer one is verified.


STATE_FILE = "trainer_state.json"


def save_checkpoint(
    output_dir: str,
    write: Callable[[Path], None],
    events: Events,
    manifest: dict[str, Any],
    needed: int = 0,
    saver: AsyncSaver | None = None,
) -> Path:
    """Write `checkpoint-<step>` below `output_dir`, then delete those beyond `save_total_limit`.

    Args:
        write: fills a folder, which is renamed to its final name once everything in it is flushed to disk.
        manifest: entries of the manifest in addition to the step; "run" is the run's id.
        needed: number of bytes about to be written; 0 if unknown.
        saver: does all this in the background; `write` must then not read anything that later steps change. None: do it
            before returning.

    Raises:
        OSError: writing failed; nothing else was touched.
    """
    state, run_dir = events.state, Path(output_dir)
    folder = run_dir / f"{PREFIX_CHECKPOINT_DIR}-{state.global_step}"
    best = run_dir / f"{PREFIX_CHECKPOINT_DIR}-{state.best_global_step}"
    if best == folder or run_of(best) == manifest.get("run", ""):  # it may have become the best after it was written
        state.best_model_checkpoint = str(best)
    _remember_callbacks(events)
    text, entries = state_text(state), {"step": state.global_step} | manifest
    limit, keep = events.args.save_total_limit, [folder]
    if state.best_model_checkpoint is not None:
        keep.append(Path(state.best_model_checkpoint))

    def fill(unfinished: Path) -> None:
        write(unfinished)
        (unfinished / STATE_FILE).write_text(text, encoding="utf-8")
        write_manifest(unfinished, entries)

    def write_and_clean_up() -> None:
        _write_whole(folder, fill, needed, replaces=limit is not None)
        _forget_oldest(run_dir, limit, folder, keep)

    if saver is None:
        write_and_clean_up()
    else:
        saver.begin(write_and_clean_up)
    return folder


def state_text(state: TrainerState) -> str:
    """The text of trainer_state.json, with secrets from callbacks, logs and names masked."""
    values = asdict(state)
    learn(values)
    logs = [
        {name: value if isinstance(value, int | float) else masked(value, name) for name, value in log.items()}
        for log in values["log_history"]
    ]  # numbers are metrics and are not masked, whatever their name
    try:
        return json.dumps(masked(values) | {"log_history": logs}, indent=2) + "\n"
    except (TypeError, ValueError) as error:
        raise TypeError(
            f"{STATE_FILE} cannot be written: {error}. The state() of a callback, and what it puts into the trainer's "
            "state or its log_history, must be JSON."
        ) from error


def _write_whole(folder: Path, fill: Callable[[Path], None], needed: int, *, replaces: bool) -> None:
    """Write a folder atomically. With `replaces`, it also replaces a folder of another run."""
    unfinished = _temporary(folder, "unfinished")
    try:
        discard(unfinished)
        _check_space(folder.parent, folder, needed)
        unfinished.mkdir(parents=True)
        fill(unfinished)
        _publish(unfinished, folder, replaces=replaces)
    except (OSError, SafetensorError) as error:
        shutil.rmtree(unfinished, ignore_errors=True)
        raise _not_written_error(error, folder, needed) from error


def await_checkpoint(output_dir: str, state: Any, run: str) -> Path:
    """The checkpoint that another process has just written; updates the best one as `save_checkpoint` does."""
    run_dir = Path(output_dir)
    best = run_dir / f"{PREFIX_CHECKPOINT_DIR}-{state.best_global_step}"
    if run_of(best) == run:
        state.best_model_checkpoint = str(best)
    return run_dir / f"{PREFIX_CHECKPOINT_DIR}-{state.global_step}"


def _temporary(folder: Path, word: str) -> Path:
    return folder.with_name(f".{folder.name}.{word}")


def _publish(unfinished: Path, folder: Path, *, replaces: bool = False) -> None:
    replaced = _temporary(folder, "replaced")
    if os.path.lexists(folder):
        if run_of(folder) == run_of(unfinished) or (replaces and run_of(folder) is not None):
            discard(replaced)
            folder.rename(replaced)
        else:
            set_aside(folder)
    unfinished.rename(folder)
    sync(folder.parent)
    discard(replaced)


def _check_space(run_dir: Path, folder: Path, needed: int) -> None:
    nearest = next(path for path in (run_dir, *run_dir.absolute().parents) if path.exists())
    if shutil.disk_usage(nearest).free < needed:
        raise OSError(errno.ENOSPC, "No space left on device", str(folder))


def _not_written_error(error: Exception, folder: Path, needed: int) -> OSError:
    """The error of a failed write. For a full disk, it includes the sizes, which safetensors' error lacks."""
    number = error.errno if isinstance(error, OSError) else None
    if number == errno.ENOSPC or "os error 28" in str(error):
        number, nearest = errno.ENOSPC, next(path for path in folder.absolute().parents if path.exists())
        why = f"No space left on device: it takes {needed:,} bytes and {shutil.disk_usage(nearest).free:,} are free"
    else:
        why = str(error) if isinstance(error, SafetensorError) else error.strerror or str(error)
    earlier = "earlier ones are untouched" if checkpoints(folder.parent) else f"{folder.parent} has no earlier one"
    return OSError(
        number or errno.EIO,
        f"{why}. The checkpoint was not written; {earlier}. Free space or fix the permissions, then resume",
        str(folder),
    )


def _forget_oldest(run_dir: Path, limit: int | None, newest: Path, protected: list[Path]) -> None:
    """Delete this run's checkpoints down to `limit`, lowest step first, except those in `protected`.

    Raises:
        BrokenCheckpoint: `newest` fails verification; nothing is deleted.
    """
    if limit is None or limit <= 0:
        return
    saved, protected = checkpoints_of(run_of(newest), run_dir), [path.absolute() for path in protected]
    excess = len(saved) - limit
    if excess > 0:
        verify(newest)
        for checkpoint in [path for path in saved if path.absolute() not in protected][:excess]:
            remove(checkpoint)


def remove(checkpoint: Path) -> None:
    """Rename a checkpoint before deleting it, so that a half-deleted folder is not mistaken for a checkpoint."""
    gone = _temporary(checkpoint, "gone")
    discard(gone)
    checkpoint.rename(gone)
    discard(gone)


def forget_all_but_best(output_dir: str, best: str) -> None:
    """Delete all other checkpoints of the same run: with `save_total_limit=1`, one remains at the end."""
    for checkpoint in checkpoints_of(run_of(Path(best)), Path(output_dir)):
        if checkpoint.absolute() != Path(best).absolute():
            remove(checkpoint)


def sweep(run_dir: Path) -> None:
    """Clean up after killed runs: delete unfinished folders, but publish those that only lacked their final name."""
    for unfinished in _left(run_dir, "unfinished"):
        try:
            verify(unfinished)
        except BrokenCheckpoint:
            discard(unfinished)
        else:
            _publish(unfinished, _named(unfinished))
    for replaced in _left(run_dir, "replaced"):
        if os.path.lexists(_named(replaced)):
            discard(replaced)
        else:
            replaced.rename(_named(replaced))
    for gone in _left(run_dir, "gone"):
        discard(gone)


def _left(run_dir: Path, word: str) -> list[Path]:
    """The temporary folders of a kind ("unfinished", "replaced" or "gone"). Readers ignore their hidden names."""
    return list(entries(run_dir, lambda name: fnmatch(name, f".{PREFIX_CHECKPOINT_DIR}-*.{word}")))


def _named(temporary: Path) -> Path:
    """The final name for a name made by `_temporary`."""
    return temporary.with_name(temporary.name.removeprefix(".").rpartition(".")[0])


def _remember_callbacks(events: Events) -> None:
    saved = events.state.stateful_callbacks = {}
    for callback in [*events.handler.callbacks, events.control]:
        if isinstance(callback, ExportableState):
            name = type(callback).__name__
            if name in saved:  # several callbacks of a class become a list, as in transformers
                earlier = saved[name] if isinstance(saved[name], list) else [saved[name]]
                saved[name] = [*earlier, callback.state()]
            else:
                saved[name] = callback.state()


# Run ids: they tell the checkpoints of a run from those of other runs in the same output_dir.


RECORD = ".trl_jax.run"
_NAME = re.compile(PREFIX_CHECKPOINT_DIR + r"-(\d+)(-run-\w+(-\d+)?)?")


def new_id() -> str:
    """32 random hexadecimal digits, the same in all processes."""
    return from_first(secrets.token_bytes(16)).hex()


def checkpoints(run_dir: Path) -> list[Path]:
    """The folders named checkpoint-<step>, including those set aside, lowest step first."""
    folders = [path for path in entries(run_dir, lambda name: _NAME.fullmatch(name) is not None) if is_folder(path)]
    matches = {path: _NAME.fullmatch(path.name) for path in folders}
    return sorted(folders, key=lambda path: (int(matches[path][1]), matches[path][2] is None, path))


def run_of(checkpoint: Path) -> str | None:
    """The id of the run that wrote a checkpoint: "" if its manifest has none, None without a readable manifest."""
    if not is_folder(checkpoint):
        return None
    try:
        return str(read_manifest(checkpoint).get("run", ""))
    except (BrokenCheckpoint, OSError):
        return None


def checkpoints_of(run: str | None, run_dir: Path) -> list[Path]:
    """The checkpoints of one run, lowest step first; none if `run` is None (unknown)."""
    return [] if run is None else [path for path in checkpoints(run_dir) if run_of(path) == run]


def recorded(run_dir: Path) -> str | None:
    """The id of the run that was started or resumed last; None without a record."""
    path = run_dir / RECORD
    return path.read_text(encoding="utf-8", errors="replace").strip() if is_file(path) else None


def record(run_dir: Path, run: str, *, fresh: bool, replaces: bool = False) -> None:
    """Record this run as the last one in `run_dir`. Warn if a fresh run finds checkpoints of other runs, which are
    renamed if their names are needed, or overwritten with `replaces`."""
    owners = {path: run_of(path) for path in checkpoints(run_dir)}
    others = [path.name for path, owner in owners.items() if owner != run and (fresh or owner is not None)]
    if not others:
        (run_dir / RECORD).unlink(missing_ok=True)
    elif recorded(run_dir) != run:
        _write(run_dir / RECORD, run)
        if fresh:
            logger.warning(
                "output_dir=%r holds checkpoints of other runs: %s. This run keeps them, %s if it needs their names. "
                "From now on, resume_from_checkpoint=True only considers checkpoints of this run. To resume from "
                "another one, pass its path.",
                str(run_dir), ", ".join(others), "but replaces them" if replaces else "renamed",
            )  # fmt: skip


def _write(path: Path, content: str) -> None:
    new = path.with_name(f"{path.name}.new")
    new.unlink(missing_ok=True)
    new.write_text(f"{content}\n", encoding="utf-8")
    sync(new)
    new.rename(path)


def set_aside(checkpoint: Path) -> None:
    """Rename another run's checkpoint to checkpoint-<step>-run-<id>, with the first eight digits of the id."""
    name = f"{checkpoint.name}-run-{(run_of(checkpoint) or 'unknown')[:8]}"
    taken, number = set(os.listdir(checkpoint.parent)), 1
    aside = name
    while aside in taken:
        number += 1
        aside = f"{name}-{number}"
    checkpoint.rename(checkpoint.with_name(aside))
    logger.warning("%s belongs to another run. It was renamed to %s.", checkpoint, aside)


def checkpoint_of(run: str | None, run_dir: Path, name: str) -> Path | None:
    """The run's checkpoint of this name, set aside or not; None if there is none."""
    for path in checkpoints(run_dir):
        if (path.name == name or path.name.startswith(f"{name}-run-")) and run_of(path) == run:
            return path
    return None


# A lock that lets only one run at a time write to an output_dir.


LOCK = ".trl_jax.lock"


class RunLock:
    """The lock of an output_dir, held by this run until `release`, or until the process ends for any reason.

    Raises:
        RuntimeError: another run holds the lock; the message says which.
    """

    def __init__(self, output_dir: str):
        self._path = Path(output_dir) / LOCK
        self._handle = self._taken()

    def renew(self) -> None:
        """If the locked folder has been removed or renamed, lock the folder that has its name now.

        Raises:
            RuntimeError: another run holds that lock.
        """
        if not _is_at(self._path, self._handle):
            handle = self._taken()
            os.close(self._handle)
            self._handle = handle

    def release(self) -> None:
        """Release the lock and remove its file."""
        if _is_at(self._path, self._handle):  # otherwise the folder was recreated: the file may be another run's
            self._path.unlink()  # before unlocking: a process that has just opened the file notices, and retries
        os.close(self._handle)

    def _taken(self) -> int:
        self._path.parent.mkdir(parents=True, exist_ok=True)
        try:
            handle = locked(self._path)
        except BlockingIOError as error:
            raise RuntimeError(
                f"output_dir={str(self._path.parent)!r} is being written by another run ({error.strerror}). Wait for "
                "it to end, or choose another output_dir."
            ) from error
        os.truncate(handle, 0)
        os.write(handle, json.dumps({"pid": os.getpid(), "host": socket.gethostname()}).encode())
        return handle


@contextlib.contextmanager
def only_run(output_dir: str) -> Iterator[RunLock]:
    """Lock `output_dir` for this run; raises RuntimeError if another run has locked it."""
    lock = RunLock(output_dir)
    try:
        yield lock
    finally:
        lock.release()


def locked(path: Path) -> int:
    """Open a file, creating it if necessary, and lock it exclusively until the returned descriptor is closed.

    Raises:
        BlockingIOError: another process holds the lock; `strerror` is the first kilobyte of the file.
        FileExistsError: the path is a link, a folder or a device; it is left untouched.
    """
    while True:
        handle = _opened(path)
        try:
            fcntl.flock(handle, fcntl.LOCK_EX | fcntl.LOCK_NB)
        except BlockingIOError as error:
            holder = os.read(handle, 1000).decode(errors="replace")
            os.close(handle)
            raise BlockingIOError(error.errno, holder, str(path)) from error
        if _is_at(path, handle):
            return handle
        os.close(handle)  # its holder removed the file between the two calls


def _opened(path: Path) -> int:
    if os.path.lexists(path) and not is_file(path):
        raise FileExistsError(
            errno.EEXIST, "is not a regular file, so it cannot be used as the run's lock. Remove it", str(path)
        )
    return os.open(path, os.O_RDWR | os.O_CREAT | os.O_NOFOLLOW, 0o644)


def _is_at(path: Path, handle: int) -> bool:
    """Whether the open file still has this name."""
    try:
        return os.path.samestat(os.fstat(handle), path.lstat())
    except FileNotFoundError:
        return False


# The progress of a run, saved and restored such that a resumed run continues identically.


# In a subfolder, because readers of a model load every *.safetensors next to its config as weights.
TENSORS, FACTS = "training_state/arrays.safetensors", "training_state/facts.json"
PIECE = 256 * 2**20


@dataclass
class LoopProgress:
    """How far the loop of one train() is, between two steps. Saved in checkpoints; a train() that does not resume
    starts a new one. What outlives train() is a `state.Progress`.

    Attributes:
        epoch: counted from 0.
        epoch_over: whether the closing events of this epoch have been fired.
        examples: number of examples trained on in this epoch: the position in the data, whatever the batch size.
        micro_batches: the same in micro-batches.
        rows_digest: digest of these examples if rows are streamed; None for a table, whose rows are known beforehand.
        stop_training, stop_epoch: whether callbacks requested it.
        loss_sum: sum of the losses of all reported steps.
        learning_rate: of the last step.
        evaluated_last: whether an evaluation followed the last step.
        evaluation_due: whether an evaluation was interrupted; a resumed run starts with it.
        save_due: whether a checkpoint was requested after that evaluation.
        unreported: the metrics of the steps since the last report.
    """

    epoch: int = 0
    epoch_over: bool = False
    examples: int = 0
    micro_batches: int = 0
    rows_digest: int | None = None
    stop_training: bool = False
    stop_epoch: bool = False
    loss_sum: float = 0.0
    learning_rate: float = 0.0
    evaluated_last: bool = False
    evaluation_due: bool = False
    save_due: bool = False
    unreported: list[dict[str, Any]] = field(default_factory=list)


def named_leaves(tree: Any, prefix: str) -> dict[str, Any]:
    """ "<prefix>/<path in the tree>" -> leaf."""
    leaves, _ = jax.tree_util.tree_flatten_with_path(tree)
    return {f"{prefix}/{jax.tree_util.keystr(path, simple=True, separator='/')}": leaf for path, leaf in leaves}


def progress_json(progress: LoopProgress, extra: dict[str, Any]) -> str:
    """JSON of the progress without its arrays, the state of the global random generators, and `extra` entries."""
    values = {name: value for name, value in asdict(progress).items() if name != "unreported"}
    return json.dumps({"progress": values, "random": _random_state(), **extra}, indent=2) + "\n"


def write_progress(
    folder: Path, steps: list[dict[str, Any]], trees: dict[str, Any], json_text: str, *, writes: bool = True
) -> None:
    """Write two files without pickle: one with arrays, and one with `json_text`.

    At most PIECE bytes of device arrays, or one row of a larger array, are on the host at a time.

    Args:
        steps: the metrics of the steps that have not been logged.
        trees: name -> pytree of arrays (optimizer state, weights that the model files store rounded).
        json_text: from `progress_json`.
        writes: False in processes that only take part in gathering the arrays.
    """
    arrays = {name: leaf for prefix, tree in trees.items() for name, leaf in named_leaves(tree, prefix).items()}
    arrays |= _metrics_of(steps)
    read = {name: Pieces(array.shape, array.dtype, partial(pieces, array, PIECE)) for name, array in arrays.items()}
    if not writes:
        for name in in_order(read):
            deque(read[name].read(), maxlen=0)
        return
    (folder / TENSORS).parent.mkdir()
    write_tensors(folder / TENSORS, read)
    (folder / FACTS).write_text(json_text, encoding="utf-8")


def _metrics_of(steps: list[dict[str, Any]]) -> dict[str, np.ndarray]:
    """The metrics of all steps, stacked by name; or one entry per step, if the steps have different metrics."""
    if len({tuple((name, np.shape(value)) for name, value in sorted(step.items())) for step in steps}) > 1:
        metrics = ((f"metrics_of/{at}/{name}", value) for at, step in enumerate(steps) for name, value in step.items())
        return {name: np.asarray(value) for name, value in metrics}
    return {f"metrics/{name}": np.stack([step[name] for step in steps]) for name in (steps[0] if steps else {})}


class SavedProgress:
    """The files of `write_progress`.

    Raises:
        BrokenCheckpoint: a file is missing or damaged.
    """

    def __init__(self, folder: Path):
        self.folder = folder
        for name in (FACTS, TENSORS):
            if not (folder / name).is_file():
                raise BrokenCheckpoint(
                    f"{folder} holds no {name}, so training cannot go on from it. Pass the folder as model= to "
                    "start from its weights."
                )
        try:
            self.facts = json.loads((folder / FACTS).read_text(encoding="utf-8"))
            self.tensors = safe_open(folder / TENSORS, framework="numpy")
            self._names = list(self.tensors.keys())
            values = {name: self.facts["progress"][name] for name in _FIELDS}
            self.progress = LoopProgress(**values, unreported=self._unreported())
        except (ValueError, KeyError, TypeError, RecursionError, SafetensorError) as error:
            raise BrokenCheckpoint(f"{folder}: {FACTS} or {TENSORS} is damaged: {brief(error, 300)}.") from error
        self._check_numbers()
        self._check_random_state()

    def _check_numbers(self) -> None:
        for name in ("epoch", "examples", "micro_batches"):
            value = getattr(self.progress, name)
            if type(value) is not int or value < 0:
                raise BrokenCheckpoint(
                    f"{self.folder / FACTS}: {name} must be a whole number of at least 0, got {brief(value)}. "
                    "Resume from another checkpoint."
                )

    def _check_random_state(self) -> None:
        try:
            self._set_random_state(random.Random().setstate, np.random.RandomState().set_state, TorchGenerator(0))
        except (ValueError, KeyError, IndexError, TypeError, OverflowError) as error:
            text = brief(error, 300)
            raise BrokenCheckpoint(f"{self.folder / FACTS}: random is no state of the generators: {text}.") from error

    def _unreported(self) -> list[dict[str, np.ndarray]]:
        stacks = {name: self.tensors.get_tensor(f"metrics/{name}") for name in self.names("metrics")}
        count = len(next(iter(stacks.values()), ()))
        steps: dict[int, dict[str, np.ndarray]] = {
            step: {name: stack[step] for name, stack in stacks.items()} for step in range(count)
        }
        for name in self.names("metrics_of"):
            at, _, metric = name.partition("/")
            steps.setdefault(int(at), {})[metric] = self.tensors.get_tensor(f"metrics_of/{name}")
        return [steps[at] for at in sorted(steps)]

    def names(self, prefix: str) -> list[str]:
        return [name.removeprefix(f"{prefix}/") for name in self._names if name.startswith(f"{prefix}/")]

    def tree(self, prefix: str, like: Any, places: Any = None) -> Any:
        """The arrays saved under `prefix`, as a pytree like `like`.

        Args:
            places: a pytree of shardings; None uses JAX's default device.

        Raises:
            ValueError: the saved arrays belong to another optimizer or model.
        """
        expected = named_leaves(like, prefix)
        stored = {f"{prefix}/{name}" for name in self.names(prefix)}
        wrong = sorted(stored ^ set(expected)) or [
            name for name, leaf in expected.items() if tuple(self.tensors.get_slice(name).get_shape()) != leaf.shape
        ]
        if wrong:
            raise ValueError(
                f"{self.folder / TENSORS} is of another run: {wrong[0]} and {len(wrong) - 1} more arrays are not the "
                "same here. Resume with the model and the optimizer it was saved with."
            )
        if places is not None:
            saved = jax.tree.unflatten(jax.tree.structure(like), [_Saved(self.tensors, name) for name in expected])
            return jax.tree.map(placed, saved, places)
        leaves = [owned(self.tensors.get_tensor(name)) for name in expected]
        return jax.tree.unflatten(jax.tree.structure(like), leaves)

    def restore_random_state(self) -> None:
        """Restore Python's and NumPy's global generators, which callbacks and metrics may use, and the torch-compatible
        one that samples tokens, which GKD uses, too."""
        self._set_random_state(random.setstate, np.random.set_state, default_generator())

    def _set_random_state(
        self, python: Callable[[tuple], None], numpy: Callable[[tuple], None], tokens: TorchGenerator
    ) -> None:
        version, words, gauss = self.facts["random"]["python"]
        python((version, tuple(words), gauss))
        name, keys, *rest = self.facts["random"]["numpy"]
        numpy((name, np.asarray(keys, np.uint32), *rest))
        if "tokens" in self.facts["random"]:  # older checkpoints lack it
            keys, *rest = self.facts["random"]["tokens"]
            tokens.restore(GeneratorState(np.asarray(keys, np.uint32), *rest))


class _Saved:
    """An array on disk; indexing it reads only that part."""

    def __init__(self, tensors: Any, name: str):
        self._tensors, self._name = tensors, name
        self.shape = tuple(tensors.get_slice(name).get_shape())

    def __getitem__(self, index: tuple[slice, ...]) -> np.ndarray:
        return self._tensors.get_slice(self._name)[index] if index else self._tensors.get_tensor(self._name)


_FIELDS = [f.name for f in fields(LoopProgress) if f.name != "unreported"]


def _random_state() -> dict[str, Any]:
    (name, keys, *rest), tokens = np.random.get_state(), default_generator().state()
    return {
        "python": random.getstate(),
        "numpy": [name, keys.tolist(), *rest],
        "tokens": [tokens.key.tolist(), tokens.used, tokens.position],
    }


# Saving in the background: arrays are copied to the host, and a thread runs one job at a time.


class AsyncSaver:
    """Runs one job at a time in a background thread. A job's error is raised by the caller's next method call."""

    def __init__(self):
        self._job: Future | None = None

    def begin(self, job: Callable[[], None]) -> None:
        """Start this job as soon as the previous one has finished."""
        self.settle()
        pool = ThreadPoolExecutor(1, thread_name_prefix="trl_jax-save")
        self._job = pool.submit(job)
        pool.shutdown(wait=False)  # the thread ends with the job

    def check(self) -> None:
        """Raise the job's error if it has failed; does not wait."""
        if self._job is not None and self._job.done():
            self.settle()

    def settle(self) -> None:
        """Wait for the job and raise its error, if any."""
        job, self._job = self._job, None
        if job is not None:
            job.result()

    @contextlib.contextmanager
    def settled(self) -> Iterator[None]:
        """Wait for the job at the end of the block. If the block raises, the job's error is only logged."""
        try:
            yield
        except BaseException:
            try:
                self.settle()
            except Exception as error:  # the block's own error is the one to raise
                logger.error("%s", error)
            raise
        self.settle()


def host_copy(tree: Any) -> Any:
    """Copy the arrays of a pytree to NumPy arrays that own their memory, several at once."""
    leaves, structure = jax.tree.flatten(tree)
    for leaf in leaves:
        leaf.copy_to_host_async()
    with ThreadPoolExecutor(min(8, os.cpu_count() or 1)) as pool:
        return jax.tree.unflatten(structure, list(pool.map(_copy, leaves)))


def _copy(leaf: jax.Array) -> np.ndarray:
    """On a CPU, copy through a DLPack view that is freed here. `np.asarray` would cache its view in the array, and a
    step copies an array that has a view instead of donating its memory."""
    on_cpu = leaf.is_fully_addressable and {device.platform for device in leaf.devices()} == {"cpu"}
    if on_cpu and len(leaf.devices()) == 1 and leaf.dtype.isbuiltin == 1:  # not bfloat16
        return np.from_dlpack(leaf).copy()
    return np.array(leaf)


# Decides which checkpoint is the best so far.


def is_new_best(metrics: dict[str, float], args: Any, state: TrainerState) -> bool:
    """Whether `metric_for_best_model` beats every earlier value; if so, record it in `state`.

    NaN never does, nor does None (nothing was measured). As in transformers, after the first evaluation the best value
    is at least infinite, so that EarlyStoppingCallback counts evaluations that are NaN.

    Raises:
        KeyError: the evaluation did not report that metric; the message lists those it did.
    """
    if args.metric_for_best_model is None:
        return False
    name = args.metric_for_best_model
    name = name if name.startswith("eval_") else f"eval_{name}"
    if name not in metrics:
        raise KeyError(
            f"metric_for_best_model={args.metric_for_best_model!r} asks for {name}, which the evaluation does not "
            f"report. Reported: {', '.join(metrics)}."
        )
    worst = float("-inf") if args.greater_is_better else float("inf")
    value, best = metrics[name], worst if state.best_metric is None else state.best_metric
    state.best_metric = best
    if value is None or not (value > best if args.greater_is_better else value < best):
        return False
    state.best_metric = value
    if args.save_strategy != SaveStrategy.NO:
        state.best_global_step = state.global_step
    return True


# The manifest: lists a checkpoint's files with their digests. It is written last, which completes the checkpoint.


MANIFEST = "manifest.json"
FORMAT = 2  # of a checkpoint's files; increased when other releases cannot read them
LIBRARIES = ("jax", "flax", "optax", "transformers", "datasets", "numpy")


class BrokenCheckpoint(ValueError):
    """A checkpoint that cannot be resumed from; the text names the folder, the file and what is wrong."""


def digest(path: Path) -> str:
    """XXH3 of a file's bytes; raises MemoryError with the file's name if it cannot be mapped."""
    with text.out_of_memory_names(path), path.open("rb") as file:
        if not path.stat().st_size:  # mmap refuses empty files
            return xxhash.xxh3_128_hexdigest(b"")
        with mmap.mmap(file.fileno(), 0, access=mmap.ACCESS_READ) as content:
            return xxhash.xxh3_128_hexdigest(content)


def libraries() -> dict[str, str]:
    """The versions of the libraries that a run's numbers depend on."""
    return {name: version(name) for name in LIBRARIES}


def write_manifest(folder: Path, entries: dict[str, Any]) -> None:
    """Write the manifest: `entries` and every file below `folder`. Flush everything to disk, the manifest last."""
    files = {}
    for path in sorted(path for path in folder.rglob("*") if path.is_file()):
        sync(path)
        files[path.relative_to(folder).as_posix()] = {"bytes": path.stat().st_size, "xxh3_128": digest(path)}
    body = {"format": FORMAT, **entries, "libraries": libraries(), "files": files}
    (folder / MANIFEST).write_text(_rendered(body), encoding="utf-8")
    sync(folder / MANIFEST)
    for path in [folder, *(path for path in folder.rglob("*") if path.is_dir())]:
        sync(path)


def _rendered(body: dict[str, Any]) -> str:
    """The manifest's text, with a digest of its other entries."""
    checksum = xxhash.xxh3_128_hexdigest(json.dumps(body, sort_keys=True).encode())
    return json.dumps({"xxh3_128": checksum, **body}, indent=2, sort_keys=True) + "\n"


def read_manifest(folder: Path) -> dict[str, Any]:
    """Read the manifest of a checkpoint.

    Raises:
        BrokenCheckpoint: the manifest is missing or damaged, or has another release's format.
    """
    path = folder / MANIFEST
    if path.exists() and not path.is_file():  # reading a pipe would block
        raise BrokenCheckpoint(f"{path} is not a file, so the checkpoint cannot be verified.")
    try:
        manifest = path.read_bytes().decode()
        body = json.loads(manifest)
        whole = isinstance(body, dict) and isinstance(body.pop("xxh3_128", None), str) and _rendered(body) == manifest
        if whole:
            _check_entries(body)
    except (FileNotFoundError, NotADirectoryError) as error:
        raise BrokenCheckpoint(f"{path} does not exist: the checkpoint was never completed.") from error
    except (ValueError, KeyError, TypeError, AttributeError, RecursionError) as error:
        raise BrokenCheckpoint(f"{path} is damaged: {str(error)[:500]}.") from error
    if not whole:
        raise BrokenCheckpoint(f"{path} is damaged: its contents do not match its digest.")
    stored = body["format"]
    if stored != FORMAT:
        newer, way = ("a newer", "Upgrade trl_jax") if stored > FORMAT else ("an older", "Resume with that release")
        raise BrokenCheckpoint(
            f"{path} has format {stored}, this release of trl_jax reads {FORMAT}: {newer} one wrote it. {way}, or pass "
            "the folder as model= to start a new run from its weights."
        )
    return body


def _check_entries(body: dict[str, Any]) -> None:
    """Raise ValueError, KeyError, TypeError or AttributeError if entries are missing or invalid. Entries of
    another release's format are not checked."""
    if type(body["format"]) is not int:
        raise ValueError(f"its format must be a number, got {brief(body['format'])}")
    if body["format"] != FORMAT:
        return
    for name, entry in body["files"].items():
        _ = entry["bytes"], entry["xxh3_128"], body["step"]
        if Path(name).is_absolute() or ".." in Path(name).parts:
            raise ValueError(f"it lists {brief(name)}, which is outside its folder")


def verify(folder: Path) -> dict[str, Any]:
    """Read the manifest, check every listed file's size and digest, and that there are no other weight files.

    Raises:
        BrokenCheckpoint: names the first missing, damaged or unexpected file.
    """
    manifest = read_manifest(folder)
    for name, entry in manifest["files"].items():
        path = folder / name
        if not path.is_file():
            raise BrokenCheckpoint(f"{path} is missing: {MANIFEST} lists it.")
        size = path.stat().st_size
        if size != entry["bytes"]:
            raise BrokenCheckpoint(f"{path} has {size:,} bytes, and had {entry['bytes']:,} when it was written.")
        if digest(path) != entry["xxh3_128"]:
            raise BrokenCheckpoint(f"{path} is damaged: its contents have changed since it was written.")
    strange = [path for path in folder.glob("*.safetensors*") if path.name not in manifest["files"]]
    if strange:
        raise BrokenCheckpoint(f"{strange[0]} is not among the files that {MANIFEST} lists. Remove it.")
    return manifest


def sync(path: Path) -> None:
    """Flush a file, or the entries of a folder, to disk."""
    handle = os.open(path, os.O_RDONLY)
    try:
        os.fsync(handle)
    finally:
        os.close(handle)


# Only plain files and folders in a run's folder are read, pushed and removed; links are never followed.


def entries(folder: Path, accepts: Callable[[str], bool] = lambda name: True) -> Iterator[Path]:
    """The plain files and folders in `folder` with names that `accepts`; links and the like give a warning."""
    for path in sorted(folder.iterdir()) if folder.is_dir() else ():
        if not accepts(path.name) or not os.path.lexists(path):  # removed meanwhile
            continue
        if is_folder(path) or is_file(path):
            yield path
        else:
            _tell(path.absolute(), "a link" if path.is_symlink() else "neither a file nor a folder")


def files_below(folder: Path, accepts: Callable[[str], bool] = lambda name: True, above: str = "") -> Iterator[str]:
    """The paths of all plain files below `folder`, prefixed with `above`.

    `accepts` is called with each prefixed path; a folder that it rejects is skipped.
    """
    for path in entries(folder, lambda name: accepts(above + name)):
        if is_folder(path):
            yield from files_below(path, accepts, f"{above}{path.name}/")
        else:
            yield above + path.name


def is_folder(path: Path) -> bool:
    """Whether the path is a folder and not a link to one."""
    return stat.S_ISDIR(_mode(path))


def is_file(path: Path) -> bool:
    """Whether the path is a file and not a link to one."""
    return stat.S_ISREG(_mode(path))


def discard(path: Path) -> None:
    """Remove a folder recursively, or a file, or a link but not its target."""
    if is_folder(path):
        shutil.rmtree(path)
    else:
        path.unlink(missing_ok=True)


def _mode(path: Path) -> int:
    """0 if nothing is there."""
    try:
        return path.lstat().st_mode
    except (FileNotFoundError, NotADirectoryError):
        return 0


@cache
def _tell(path: Path, kind: str) -> None:
    logger.warning("%s is %s, so it is ignored: neither read, pushed nor removed.", path, kind)


# Roll callbacks, their state and the random generators back to an earlier moment.


class RandomState:
    """A snapshot of a run's random state: Python's and NumPy's global generators, the one that samples tokens, and
    `streams`, the generators of online training."""

    def __init__(self, streams: Sequence[TorchGenerator] = ()):
        self._streams = default_generator(), *streams
        self._states = [stream.state() for stream in self._streams]
        self._python, self._numpy = random.getstate(), np.random.get_state()

    def restore(self) -> None:
        random.setstate(self._python)
        np.random.set_state(self._numpy)
        for stream, state in zip(self._streams, self._states, strict=True):
            stream.restore(state)


class RunSnapshot:
    """A snapshot of everything in a checkpoint that an evaluation or a log line may change.

    streams: as in `RandomState`.
    """

    def __init__(self, events: Events, streams: Sequence[TorchGenerator] = ()):
        self._events, self._control = events, copy.copy(events.control)
        self._state = vars(events.state) | {"log_history": list(events.state.log_history)}
        stateful = [callback for callback in events.handler.callbacks if isinstance(callback, ExportableState)]
        self._callbacks = [(callback, copy.deepcopy(callback.state()["attributes"])) for callback in stateful]
        self._random = RandomState(streams)

    def restore(self) -> None:
        self._events.control = self._control
        vars(self._events.state).update(self._state)
        for callback, attributes in self._callbacks:
            for name, value in attributes.items():
                setattr(callback, name, value)
        self._random.restore()
