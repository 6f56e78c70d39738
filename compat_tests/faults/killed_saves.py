"""SIGKILL at every point of a save: python -m compat_tests.faults.killed_saves [--folder F]; prints the results as
JSON.

The points are all file-system calls of a save, observed through Python's audit events, and the middle of the weights.
At each point, a process forked from this one kills itself.
"""

from __future__ import annotations

import argparse
import json
import os
import shutil
import signal
import sys
import tempfile
from pathlib import Path

import numpy as np
from safetensors.numpy import save_file
from transformers.trainer_callback import CallbackHandler, DefaultFlowCallback, TrainerControl, TrainerState

from trl_jax.training.checkpoint_files import LoopProgress, progress_json, save_checkpoint, sweep, write_progress
from trl_jax.training.events import Events
from trl_jax.training.resume import find

CALLS = ("open", "os.mkdir", "os.rename", "os.remove", "os.rmdir", "shutil.rmtree", "os.listdir", "os.scandir")


class _Arguments:
    save_total_limit = 2


class Killer:
    """Counts points below `run_dir`, and kills this process at number `at`."""

    def __init__(self, run_dir: Path, at: int):
        self.run_dir, self.at, self.seen = str(run_dir), at, []

    def point(self, name: str) -> None:
        self.seen.append(name)
        if len(self.seen) - 1 == self.at:
            os.kill(os.getpid(), signal.SIGKILL)

    def __call__(self, event: str, arguments: tuple) -> None:
        if event in CALLS and any(self.run_dir in str(argument) for argument in arguments[:2]):
            self.point(f"{event} {Path(str(arguments[0])).name}")


def events_of(step: int) -> Events:
    handler = CallbackHandler([DefaultFlowCallback()], None, None, None, None)
    return Events(handler, _Arguments(), TrainerState(global_step=step), TrainerControl())


def save(run_dir: Path, step: int, point=lambda name: None) -> None:
    """Save a checkpoint of a few small arrays that contain the step."""
    arrays = {name: np.full(5000, step, np.float32) for name in ("a", "b")}

    def write(folder: Path) -> None:
        save_file(arrays, folder / "model.safetensors")
        whole = (folder / "model.safetensors").read_bytes()
        with (folder / "model.safetensors").open("wb") as file:
            for part in (whole[:9000], whole[9000:]):
                file.write(part)
                file.flush()
                point("the middle of model.safetensors")
        write_progress(folder, [], {"optimizer": arrays}, progress_json(LoopProgress(epoch=step), {}))
        point("after the training state")

    save_checkpoint(str(run_dir), write, events_of(step), {"dataset": None})


def killed(run_dir: Path, step: int, at: int) -> list[str] | None:
    """Save in a fork that kills itself at point `at`. Returns the points passed, or None if it was killed."""
    read, write = os.pipe()
    child = os.fork()
    if child == 0:
        killer = Killer(run_dir, at)
        sys.addaudithook(killer)
        save(run_dir, step, killer.point)
        os.write(write, json.dumps(killer.seen).encode())
        os._exit(0)
    os.close(write)
    with os.fdopen(read) as pipe:
        told = pipe.read()
    _, status = os.waitpid(child, 0)
    assert os.WIFSIGNALED(status) == (not told), status
    return json.loads(told) if told else None


def check(run_dir: Path, good: set[int], where: str) -> int:
    """Check what the next run finds: a complete checkpoint of one of the steps `good`, and no leftovers."""
    sweep(run_dir)
    found = find(True, str(run_dir))
    assert found.state.global_step in good, (where, found.folder)
    for folder in run_dir.iterdir():
        step = int(folder.name.removeprefix("checkpoint-"))
        assert find(folder, str(run_dir)).state.global_step == step, where
        values = np.frombuffer((folder / "model.safetensors").read_bytes()[-4:], np.float32)
        assert values[0] == step, where
    return found.state.global_step


def every_point(folder: Path, step: int) -> dict[str, int]:
    """point -> the newest valid step after a kill there, while saving `step` when checkpoints 2 and 4 exist."""
    start = folder / "start"
    for earlier in (2, 4):
        save(start, earlier)
    points = killed(Path(shutil.copytree(start, folder / "counted")), step, at=-1)
    found = {}
    for at, name in enumerate(points):
        run_dir = Path(shutil.copytree(start, folder / f"kill-{at}"))
        assert killed(run_dir, step, at) is None, name
        found[f"{at} {name}"] = check(run_dir, {4, step}, name)
        shutil.rmtree(run_dir)
    for left in (start, folder / "counted"):
        shutil.rmtree(left)
    return found


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--folder", type=Path, default=None)
    folder = Path(tempfile.mkdtemp(dir=parser.parse_args().folder))
    told = {}
    for what, step in (("a new step", 6), ("a step that is there already", 4)):
        told[what] = every_point(folder, step)
    shutil.rmtree(folder)
    print(json.dumps(told))


if __name__ == "__main__":
    main()
