"""Tells the checkpoints of one run from those of other runs in the same output_dir.

Each run has a random id, made when it begins and kept when it resumes; it is in the manifest of each checkpoint. Where
there are checkpoints of others, a record in the folder names the run that was begun or resumed last.
"""

from __future__ import annotations

import logging
import os
import re
import secrets
from pathlib import Path

from transformers.trainer_utils import PREFIX_CHECKPOINT_DIR

from trl_jax.engine.checkpoints.manifest import BrokenCheckpoint, read_manifest, sync
from trl_jax.engine.checkpoints.plain_files import entries, is_file, is_folder
from trl_jax.engine.devices.processes import from_first

RECORD = ".trl_jax.run"
_NAME = re.compile(PREFIX_CHECKPOINT_DIR + r"-(\d+)(-run-\w+(-\d+)?)?")

logger = logging.getLogger(__name__)


def new_id() -> str:
    """32 random hexadecimal digits, the same in all processes."""
    return from_first(secrets.token_bytes(16)).hex()


def checkpoints(run_dir: Path) -> list[Path]:
    """The folders named checkpoint-<step>, and those set aside, lowest step first."""
    found = [path for path in entries(run_dir, lambda name: _NAME.fullmatch(name) is not None) if is_folder(path)]
    matches = {path: _NAME.fullmatch(path.name) for path in found}
    return sorted(found, key=lambda path: (int(matches[path][1]), matches[path][2] is None, path))


def run_of(checkpoint: Path) -> str | None:
    """The id of the run that wrote a checkpoint: "" if its manifest has none, None without a manifest one can read."""
    if not is_folder(checkpoint):
        return None
    try:
        return str(read_manifest(checkpoint).get("run", ""))
    except (BrokenCheckpoint, OSError):
        return None


def checkpoints_of(run: str | None, run_dir: Path) -> list[Path]:
    """The checkpoints of one run, lowest step first; none of None, for nobody knows whose they are."""
    return [] if run is None else [path for path in checkpoints(run_dir) if run_of(path) == run]


def recorded(run_dir: Path) -> str | None:
    """The id of the run that was begun or resumed last; None where no record says it."""
    path = run_dir / RECORD
    return path.read_text(encoding="utf-8", errors="replace").strip() if is_file(path) else None


def record(run_dir: Path, run: str, *, fresh: bool, replaces: bool = False) -> None:
    """Record that this run goes on in `run_dir`, and warn where a fresh one finds checkpoints of others, which it
    `replaces` where it needs their names."""
    owners = {path: run_of(path) for path in checkpoints(run_dir)}
    others = [path.name for path, owner in owners.items() if owner != run and (fresh or owner is not None)]
    if not others:
        (run_dir / RECORD).unlink(missing_ok=True)
    elif recorded(run_dir) != run:
        _write(run_dir / RECORD, run)
        if fresh:
            logger.warning(
                "output_dir=%r holds checkpoints of other runs: %s. This run leaves them there, %s where it needs "
                "their names, and from now on resume_from_checkpoint=True takes this run's only. To go on from one of "
                "the others, pass its path.",
                str(run_dir), ", ".join(others), "but replaces them" if replaces else "renamed",
            )  # fmt: skip


def _write(path: Path, text: str) -> None:
    new = path.with_name(f"{path.name}.new")
    new.unlink(missing_ok=True)
    new.write_text(f"{text}\n", encoding="utf-8")
    sync(new)
    new.rename(path)


def set_aside(checkpoint: Path) -> None:
    """Rename another run's checkpoint to checkpoint-<step>-run-<id>, of which the first eight digits are enough."""
    name = f"{checkpoint.name}-run-{(run_of(checkpoint) or 'unknown')[:8]}"
    taken, number = set(os.listdir(checkpoint.parent)), 1
    aside = name
    while aside in taken:
        number += 1
        aside = f"{name}-{number}"
    checkpoint.rename(checkpoint.with_name(aside))
    logger.warning("%s is not of this run: it is now %s.", checkpoint, aside)


def checkpoint_of(run: str | None, run_dir: Path, name: str) -> Path | None:
    """The checkpoint of this name that the run wrote, set aside or not; None without one."""
    for path in checkpoints(run_dir):
        if (path.name == name or path.name.startswith(f"{name}-run-")) and run_of(path) == run:
            return path
    return None
