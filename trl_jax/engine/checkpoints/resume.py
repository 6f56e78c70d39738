"""Finds the checkpoint from which a run resumes, and restores callbacks."""

from __future__ import annotations

import logging
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from transformers.trainer_callback import ExportableState, TrainerState

from trl_jax.core.printable import brief, listed
from trl_jax.core.secrets import masked
from trl_jax.engine.checkpoints.checkpoint import STATE_FILE
from trl_jax.engine.checkpoints.manifest import MANIFEST, BrokenCheckpoint, verify
from trl_jax.engine.checkpoints.progress import FACTS, TENSORS
from trl_jax.engine.checkpoints.run_id import checkpoints, recorded, run_of
from trl_jax.engine.events import Events

logger = logging.getLogger(__name__)

OPTIMIZER = "optimizer.pt"  # of transformers' Trainer


@dataclass(frozen=True)
class ResumePoint:
    """A checkpoint to resume from. `manifest` is None where another program wrote it, such as TRL."""

    folder: Path
    state: TrainerState
    manifest: dict[str, Any] | None

    @property
    def model_only(self) -> bool:
        """Whether `save_only_model` left out the optimizer, its schedule and the random numbers."""
        if self.manifest is None:
            return not (self.folder / OPTIMIZER).is_file()
        return not any(name in self.manifest["files"] for name in (FACTS, TENSORS))


def find(wanted: str | Path | bool, output_dir: str) -> ResumePoint:
    """Find the checkpoint at a path, or for True the newest complete one of the run that was last at `output_dir`.

    Without a checkpoint of this package's there, True takes one of transformers' Trainer.

    Raises:
        ValueError: there is none, nothing tells which of several runs is meant, or the one at the path is not complete;
            the text names the file, and a checkpoint that is complete.
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


def check(folder: Path) -> ResumePoint:
    """Check every byte of a checkpoint; without a manifest, that it can be read at all.

    Raises:
        BrokenCheckpoint: it is not complete.
    """
    manifest = verify(folder) if (folder / MANIFEST).exists() or not _is_transformers(folder) else None
    path = folder / STATE_FILE
    try:
        state = TrainerState.load_from_json(str(path))
        _check_numbers(state, manifest)
        return ResumePoint(folder, state, manifest)
    except (OSError, ValueError, TypeError, RecursionError) as error:
        raise BrokenCheckpoint(f"{path} cannot be read: {str(error)[:500]}.") from error


def _check_numbers(state: TrainerState, manifest: dict[str, Any] | None) -> None:
    """Raises ValueError for a state that no run can have written."""
    step, epoch = state.global_step, state.epoch
    if type(step) is not int or step < 0 or not isinstance(state.log_history, list):
        raise ValueError(f"global_step is {brief(step)}, wanted a whole number of at least 0, and log_history a list")
    if manifest is not None and step != manifest["step"]:
        raise ValueError(f"global_step is {step}, but {MANIFEST} says {manifest['step']}")
    most = max(state.num_train_epochs, step) + 1
    if epoch is not None and not 0 <= epoch <= most:
        raise ValueError(f"epoch is {brief(epoch)}, wanted one from 0 to {most} after {step} steps")


def _is_transformers(folder: Path) -> bool:
    """Whether transformers' Trainer may have written it, whose optimizer and arguments are pickles."""
    pickles = [folder / OPTIMIZER, folder / "training_args.bin"]
    return (folder / STATE_FILE).is_file() and any(path.is_file() for path in pickles)


def _newest(run_dir: Path) -> ResumePoint:
    runs = {path: run_of(path) for path in reversed(checkpoints(run_dir))}
    wanted = _wanted_run(run_dir, runs)
    faults, others = [], [path.name for path, run in runs.items() if run not in (wanted, None)]
    for candidate in [path for path, run in runs.items() if run in (wanted, None)]:
        try:
            point = check(candidate)
        except BrokenCheckpoint as error:
            faults.append(str(error))
            logger.warning("%s is passed over: %s", candidate, error)
        else:
            if point.manifest is not None or wanted is None:
                return point
            others.append(candidate.name)
    why = " ".join(faults) or ("" if others else "There is no checkpoint-<step> in it.")
    if others:
        whose = f"{', '.join(others)} {'is' if len(others) == 1 else 'are'} not of the run that was begun last here."
        why = f"{why} {whose} Pass a path to go on from there.".lstrip()
    raise ValueError(f"No valid checkpoint found in output directory ({run_dir}). {why} Train without resuming.")


def _wanted_run(run_dir: Path, runs: dict[Path, str | None]) -> str | None:
    """The run that was last at the folder, by its record; without one, the only run there is."""
    wanted, known = recorded(run_dir), {run for run in runs.values() if run is not None}
    if wanted is None and len(known) > 1:
        listed = ", ".join(f"{path.name} (run {run[:8]})" for path, run in runs.items() if run is not None)
        raise ValueError(
            f"output_dir={str(run_dir)!r} holds checkpoints of {len(known)} runs: {listed}. Nothing tells which is "
            "meant: pass the path of one as resume_from_checkpoint."
        )
    return wanted if wanted is not None else next(iter(known), None)


def _another(folder: Path) -> str:
    """A sentence that names the newest complete checkpoint beside a broken one, of the same run if that is known."""
    run = run_of(folder)
    for candidate in reversed(checkpoints(folder.absolute().parent)):
        if candidate != folder.absolute() and (run is None or run_of(candidate) == run):
            try:
                return f"{check(candidate).folder} is whole: pass that one."
            except BrokenCheckpoint:
                continue
    return "There is no other whole checkpoint beside it."


def restore_callbacks(events: Events, *, wholly: bool) -> None:
    """Restore the counts of callbacks from `events.state`, such as the evaluations without an improvement.

    Their settings stay as the script has them now, unless `wholly`.
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
                if value != masked(vars(callback).get(attribute), attribute):  # else it is as saved, or was a secret
                    setattr(callback, attribute, value)
    missing = [name for name, states in left.items() if states and name != type(events.control).__name__]
    if missing:
        logger.warning("The checkpoint has the state of callbacks that this run lacks: %s.", listed(missing))


def changed_arguments(then: dict[str, Any], now: dict[str, Any]) -> list[str]:
    """"name: old -> new" for every argument that has changed."""
    names = sorted((then.keys() | now.keys()) - {"resume_from_checkpoint"})
    changed = [name for name in names if then.get(name) != now.get(name)]
    return [f"{name}: {brief(then.get(name), 200)} -> {brief(now.get(name), 200)}" for name in changed]
