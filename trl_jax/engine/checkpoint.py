"""Checkpoint folders: written aside, renamed when complete, removed only once a newer one is verified."""

from __future__ import annotations

import errno
import json
import shutil
from collections.abc import Callable
from dataclasses import asdict
from pathlib import Path
from typing import Any

from safetensors import SafetensorError
from transformers.trainer_callback import ExportableState
from transformers.trainer_utils import PREFIX_CHECKPOINT_DIR, sort_checkpoints

from trl_jax.engine.events import Events
from trl_jax.engine.manifest import BrokenCheckpoint, sync, verify, write_manifest

STATE_FILE = "trainer_state.json"
# Folders without a name that a reader would look for: one being written, one being replaced, one being removed.
_UNFINISHED, _REPLACED, _REMOVED = (f".{PREFIX_CHECKPOINT_DIR}-*.{word}" for word in ("unfinished", "replaced", "gone"))


def save_checkpoint(
    output_dir: str, write: Callable[[Path], None], events: Events, facts: dict[str, Any], needed: int = 0
) -> Path:
    """Write `checkpoint-<step>` below `output_dir` and remove what `save_total_limit` no longer allows.

    Args:
        write: fills a folder that gets its name only when everything is in it and on the disk.
        facts: stands in the manifest, beside the step.
        needed: bytes that are about to be written, where that is known.

    Raises:
        OSError: it could not be written; nothing else was touched.
    """
    state, run_dir = events.state, Path(output_dir)
    folder = run_dir / f"{PREFIX_CHECKPOINT_DIR}-{state.global_step}"
    unfinished = _aside(folder, "unfinished")
    best = run_dir / f"{PREFIX_CHECKPOINT_DIR}-{state.best_global_step}"
    if best == folder or best.exists():  # it may have been written before it was known to be the best
        state.best_model_checkpoint = str(best)
    _remember_callbacks(events)
    try:
        _check_space(run_dir, folder, needed)
        shutil.rmtree(unfinished, ignore_errors=True)
        unfinished.mkdir(parents=True)
        write(unfinished)
        (unfinished / STATE_FILE).write_text(json.dumps(asdict(state), indent=2) + "\n", encoding="utf-8")
        write_manifest(unfinished, {"step": state.global_step} | facts)
        _publish(unfinished, folder)
    except (OSError, SafetensorError) as error:
        shutil.rmtree(unfinished, ignore_errors=True)
        raise _not_written(error, folder, needed) from error
    _forget_oldest(run_dir, events.args.save_total_limit, folder, kept={str(folder), state.best_model_checkpoint})
    return folder


def await_checkpoint(output_dir: str, state: Any) -> Path:
    """What another process has just written, as `save_checkpoint` returns it."""
    run_dir = Path(output_dir)
    best = run_dir / f"{PREFIX_CHECKPOINT_DIR}-{state.best_global_step}"
    if best.exists():
        state.best_model_checkpoint = str(best)
    return run_dir / f"{PREFIX_CHECKPOINT_DIR}-{state.global_step}"


def _aside(folder: Path, word: str) -> Path:
    return folder.with_name(f".{folder.name}.{word}")


def _publish(unfinished: Path, folder: Path) -> None:
    replaced = _aside(folder, "replaced")
    if folder.exists():
        shutil.rmtree(replaced, ignore_errors=True)
        folder.rename(replaced)
    unfinished.rename(folder)
    sync(folder.parent)
    if replaced.exists():
        shutil.rmtree(replaced)


def _check_space(run_dir: Path, folder: Path, needed: int) -> None:
    nearest = next(path for path in (run_dir, *run_dir.absolute().parents) if path.exists())
    if shutil.disk_usage(nearest).free < needed:
        raise OSError(errno.ENOSPC, "No space left on device", str(folder))


def _not_written(error: Exception, folder: Path, needed: int) -> OSError:
    """What could not be written and why. A full disk is told in bytes; safetensors says what it meets in words only."""
    number = error.errno if isinstance(error, OSError) else None
    if number == errno.ENOSPC or "os error 28" in str(error):
        number, nearest = errno.ENOSPC, next(path for path in folder.absolute().parents if path.exists())
        why = f"No space left on device: it takes {needed:,} bytes and {shutil.disk_usage(nearest).free:,} are free"
    else:
        why = str(error)
    return OSError(
        number or errno.EIO,
        f"{why}. The checkpoint was not written; earlier ones are untouched. Make room or access there, and resume",
        str(folder),
    )


def _forget_oldest(run_dir: Path, limit: int | None, newest: Path, kept: set[str | None]) -> None:
    """Remove checkpoints, lowest step first, down to `limit`; never one of `kept`, whatever an earlier run left.

    Raises:
        BrokenCheckpoint: `newest` does not hold what was written; then nothing is removed.
    """
    checkpoints = sort_checkpoints(str(run_dir))
    excess = len(checkpoints) - limit if limit is not None and limit > 0 else 0
    if excess > 0:
        verify(newest)
        for checkpoint in [name for name in checkpoints if name not in kept][:excess]:
            remove(Path(checkpoint))


def remove(checkpoint: Path) -> None:
    """Renamed first: a folder that is half removed must not look like a checkpoint."""
    gone = _aside(checkpoint, "gone")
    shutil.rmtree(gone, ignore_errors=True)
    checkpoint.rename(gone)
    shutil.rmtree(gone)


def forget_all_but_best(output_dir: str, best: str) -> None:
    """Remove every other checkpoint: `save_total_limit=1` means one folder once the run is over."""
    for checkpoint in sort_checkpoints(output_dir):
        if Path(checkpoint) != Path(best):
            remove(Path(checkpoint))


def sweep(run_dir: Path) -> None:
    """Clear away what runs that were killed left behind; a checkpoint that only lacked its name gets it."""
    for unfinished in run_dir.glob(_UNFINISHED):
        folder = run_dir / unfinished.name.removeprefix(".").removesuffix(".unfinished")
        try:
            verify(unfinished)
        except BrokenCheckpoint:
            shutil.rmtree(unfinished)
        else:
            _publish(unfinished, folder)
    for replaced in run_dir.glob(_REPLACED):
        folder = run_dir / replaced.name.removeprefix(".").removesuffix(".replaced")
        if folder.exists():
            shutil.rmtree(replaced)
        else:
            replaced.rename(folder)
    for gone in run_dir.glob(_REMOVED):
        shutil.rmtree(gone)


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
