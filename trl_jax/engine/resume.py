"""Which checkpoint a run goes on from."""

from __future__ import annotations

import logging
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from transformers.trainer_callback import ExportableState, TrainerState
from transformers.trainer_utils import sort_checkpoints

from trl_jax.engine.checkpoint import STATE_FILE
from trl_jax.engine.events import Events
from trl_jax.engine.manifest import MANIFEST, BrokenCheckpoint, verify

logger = logging.getLogger(__name__)


@dataclass(frozen=True)
class Found:
    """A checkpoint to go on from. `manifest` is None where another program wrote it: TRL, say."""

    folder: Path
    state: TrainerState
    manifest: dict[str, Any] | None


def find(wanted: str | Path | bool, output_dir: str) -> Found:
    """The checkpoint at a path, or for True the newest complete one in `output_dir`.

    Raises:
        ValueError: there is none, or the one at the path is not whole; the text names the file, and which other
            checkpoint is whole.
    """
    if wanted is True:
        return _newest(Path(output_dir))
    folder = Path(wanted)
    if not folder.is_dir():
        raise ValueError(
            f"resume_from_checkpoint={str(wanted)!r} is not a folder. Pass a checkpoint's, or True for the newest in "
            "output_dir."
        )
    try:
        return check(folder)
    except BrokenCheckpoint as error:
        raise BrokenCheckpoint(f"{error} {_another(folder)}") from error


def check(folder: Path) -> Found:
    """Raises BrokenCheckpoint unless every byte is there; without a manifest, unless it could be a checkpoint."""
    manifest = verify(folder) if (folder / MANIFEST).exists() or not _foreign(folder) else None
    path = folder / STATE_FILE
    try:
        state = TrainerState.load_from_json(str(path))
        if type(state.global_step) is not int or not isinstance(state.log_history, list):
            raise ValueError(f"global_step is {state.global_step!r}, wanted a whole number, and log_history a list")
        return Found(folder, state, manifest)
    except (OSError, ValueError, TypeError, RecursionError) as error:
        raise BrokenCheckpoint(f"{path} cannot be read: {error}.") from error


def _foreign(folder: Path) -> bool:
    """Whether transformers' Trainer may have written it: it has no manifest, and its optimizer is a pickle."""
    return (folder / STATE_FILE).is_file() and (folder / "optimizer.pt").is_file()


def _newest(run_dir: Path) -> Found:
    candidates = sort_checkpoints(str(run_dir))[::-1] if run_dir.is_dir() else []
    faults = []
    for candidate in candidates:
        try:
            found = check(Path(candidate))
        except BrokenCheckpoint as error:
            faults.append(str(error))
            logger.warning("%s is passed over: %s", candidate, error)
        else:
            return found
    why = " ".join(faults) or "There is no checkpoint-<step> in it."
    raise ValueError(f"No valid checkpoint found in output directory ({run_dir}). {why} Train without resuming.")


def _another(folder: Path) -> str:
    """A sentence on the newest other checkpoint beside a broken one that is whole."""
    for candidate in sort_checkpoints(str(folder.absolute().parent))[::-1]:
        if Path(candidate) != folder.absolute():
            try:
                return f"{check(Path(candidate)).folder} is whole: pass that one."
            except BrokenCheckpoint:
                continue
    return "There is no other whole checkpoint beside it."


def restore_callbacks(events: Events, *, wholly: bool) -> None:
    """Give callbacks what they had counted when `events.state` was saved, such as how long nothing had improved.

    How they were set up stays as the script has it now, unless `wholly`.
    """
    left = {
        name: list(states) if isinstance(states, list) else [states]
        for name, states in events.state.stateful_callbacks.items()
    }
    for callback in events.handler.callbacks:
        name = type(callback).__name__
        if isinstance(callback, ExportableState) and left.get(name):
            saved = left[name].pop(0)
            for attribute, value in ((saved["args"] if wholly else {}) | saved["attributes"]).items():
                setattr(callback, attribute, value)
    missing = [name for name, states in left.items() if states and name != type(events.control).__name__]
    if missing:
        logger.warning("The checkpoint has the state of callbacks that this run lacks: %s.", ", ".join(missing))


def changed_arguments(then: dict[str, Any], now: dict[str, Any]) -> list[str]:
    """"name: old -> new" for every argument that is not what it was."""
    names = sorted((then.keys() | now.keys()) - {"resume_from_checkpoint"})
    return [f"{name}: {then.get(name)!r} -> {now.get(name)!r}" for name in names if then.get(name) != now.get(name)]
