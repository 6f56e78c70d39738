"""Checkpoint folders: written under a temporary name, renamed when complete, gone only once a newer one is verified."""

from __future__ import annotations

import errno
import json
import os
import shutil
from collections.abc import Callable
from dataclasses import asdict
from fnmatch import fnmatch
from pathlib import Path
from typing import Any

from safetensors import SafetensorError
from transformers.trainer_callback import ExportableState, TrainerState
from transformers.trainer_utils import PREFIX_CHECKPOINT_DIR

from trl_jax.core.secrets import learn, masked
from trl_jax.engine.checkpoints.manifest import BrokenCheckpoint, sync, verify, write_manifest
from trl_jax.engine.checkpoints.plain_files import discard, entries
from trl_jax.engine.checkpoints.run_id import checkpoints, checkpoints_of, run_of, set_aside
from trl_jax.engine.events import Events

STATE_FILE = "trainer_state.json"


def save_checkpoint(
    output_dir: str,
    write: Callable[[Path], None],
    events: Events,
    facts: dict[str, Any],
    needed: int = 0,
    begin: Callable[[Callable[[], None]], None] = lambda job: job(),
) -> Path:
    """Write `checkpoint-<step>` below `output_dir` and remove what `save_total_limit` no longer allows.

    Args:
        write: fills a folder that gets its name only when everything is in it and on the disk.
        facts: for the manifest, which has the step too; "run" is the run's id.
        needed: bytes that are about to be written, where that is known.
        begin: runs the job that does all of it, now or while training goes on: the job reads nothing that a later step
            changes, if `write` does not.

    Raises:
        OSError: it could not be written; nothing else was touched.
    """
    state, run_dir = events.state, Path(output_dir)
    folder = run_dir / f"{PREFIX_CHECKPOINT_DIR}-{state.global_step}"
    best = run_dir / f"{PREFIX_CHECKPOINT_DIR}-{state.best_global_step}"
    if best == folder or run_of(best) == facts.get("run", ""):  # it may have become the best after it was written
        state.best_model_checkpoint = str(best)
    _remember_callbacks(events)
    text, facts = state_text(state), {"step": state.global_step} | facts
    limit, kept = events.args.save_total_limit, [folder]
    if state.best_model_checkpoint is not None:
        kept.append(Path(state.best_model_checkpoint))

    def fill(unfinished: Path) -> None:
        write(unfinished)
        (unfinished / STATE_FILE).write_text(text, encoding="utf-8")
        write_manifest(unfinished, facts)

    def job() -> None:
        _write_whole(folder, fill, needed, replaces=limit is not None)
        _forget_oldest(run_dir, limit, folder, kept)

    begin(job)
    return folder


def state_text(state: TrainerState) -> str:
    """The text of trainer_state.json, without secrets that a callback, a log or a name had."""
    values = asdict(state)
    learn(values)
    logs = [
        {name: value if isinstance(value, int | float) else masked(value, name) for name, value in log.items()}
        for log in values["log_history"]
    ]  # metrics are numbers, whatever their names
    try:
        return json.dumps(masked(values) | {"log_history": logs}, indent=2) + "\n"
    except (TypeError, ValueError) as error:
        raise TypeError(
            f"{STATE_FILE} cannot be written: {error}. The state() of a callback, and what it puts into the trainer's "
            "state or its log_history, must be JSON."
        ) from error


def _write_whole(folder: Path, fill: Callable[[Path], None], needed: int, *, replaces: bool) -> None:
    """Make the folder appear with everything in it, or not at all; it `replaces` one of another run, too."""
    unfinished = _temporary(folder, "unfinished")
    try:
        _check_space(folder.parent, folder, needed)
        discard(unfinished)
        unfinished.mkdir(parents=True)
        fill(unfinished)
        _publish(unfinished, folder, replaces=replaces)
    except (OSError, SafetensorError) as error:
        shutil.rmtree(unfinished, ignore_errors=True)
        raise _not_written(error, folder, needed) from error


def await_checkpoint(output_dir: str, state: Any, run: str) -> Path:
    """The checkpoint that another process has just written, as `save_checkpoint` returns it."""
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


def _not_written(error: Exception, folder: Path, needed: int) -> OSError:
    """The error of a checkpoint that could not be written; for a full disk with the bytes, which safetensors lacks."""
    number = error.errno if isinstance(error, OSError) else None
    if number == errno.ENOSPC or "os error 28" in str(error):
        number, nearest = errno.ENOSPC, next(path for path in folder.absolute().parents if path.exists())
        why = f"No space left on device: it takes {needed:,} bytes and {shutil.disk_usage(nearest).free:,} are free"
    else:
        why = str(error) if isinstance(error, SafetensorError) else error.strerror or str(error)
    earlier = "earlier ones are untouched" if checkpoints(folder.parent) else f"{folder.parent} has no earlier one"
    return OSError(
        number or errno.EIO,
        f"{why}. The checkpoint was not written; {earlier}. Make room or access there, and resume",
        str(folder),
    )


def _forget_oldest(run_dir: Path, limit: int | None, newest: Path, kept: list[Path]) -> None:
    """Remove this run's checkpoints down to `limit`, lowest step first, but none of `kept`.

    Raises:
        BrokenCheckpoint: `newest` is not as it was written; then nothing is removed.
    """
    if limit is None or limit <= 0:
        return
    own, kept = checkpoints_of(run_of(newest), run_dir), [path.absolute() for path in kept]
    excess = len(own) - limit
    if excess > 0:
        verify(newest)
        for checkpoint in [path for path in own if path.absolute() not in kept][:excess]:
            remove(checkpoint)


def remove(checkpoint: Path) -> None:
    """Rename, then remove: a folder that is half removed must not look like a checkpoint."""
    gone = _temporary(checkpoint, "gone")
    discard(gone)
    checkpoint.rename(gone)
    discard(gone)


def forget_all_but_best(output_dir: str, best: str) -> None:
    """Remove the same run's other checkpoints: `save_total_limit=1` means one folder once the run is over."""
    for checkpoint in checkpoints_of(run_of(Path(best)), Path(output_dir)):
        if checkpoint.absolute() != Path(best).absolute():
            remove(checkpoint)


def sweep(run_dir: Path) -> None:
    """Remove what killed runs left unfinished; a checkpoint that only lacked its name gets it."""
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
    """The folders of that kind that are being written, replaced or removed: no reader looks for their hidden names."""
    return list(entries(run_dir, lambda name: fnmatch(name, f".{PREFIX_CHECKPOINT_DIR}-*.{word}")))


def _named(temporary: Path) -> Path:
    """The name that `_temporary` was made of."""
    return temporary.with_name(temporary.name.removeprefix(".").rpartition(".")[0])


def _remember_callbacks(events: Events) -> None:
    saved = events.state.stateful_callbacks = {}
    for callback in [*events.handler.callbacks, events.control]:
        if isinstance(callback, ExportableState):
            name = type(callback).__name__
            if name in saved:  # the second of a kind makes it a list, as transformers writes it
                earlier = saved[name] if isinstance(saved[name], list) else [saved[name]]
                saved[name] = [*earlier, callback.state()]
            else:
                saved[name] = callback.state()
