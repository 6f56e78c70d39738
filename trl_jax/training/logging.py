"""The lines that a run prints."""

from __future__ import annotations

import logging
import sys
import time
from pathlib import Path
from typing import Any

import jax
from tqdm.auto import tqdm
from transformers.trainer_callback import ProgressCallback

from trl_jax.core.secrets import scrubbed
from trl_jax.data.loader import ExampleLoader
from trl_jax.mesh.processes import is_first
from trl_jax.training.events import Events
from trl_jax.training.mesh import run_devices
from trl_jax.training.model import short_name
from trl_jax.training.state import RunState

# ----------------------------------------------------------------------------------------------------
# The lines that a run says by itself: three before its first step, and one when it has trained or saved.


logger = logging.getLogger(__name__)


def show_lines(level: int, *, asked: bool) -> None:
    """Show the lines of this module at a log level that a script has `asked` for or, without, that is the usual one."""
    logger.setLevel(logging.INFO if not asked and level <= logging.WARNING else logging.NOTSET)


def tell(run: RunState, about: str, text: str) -> None:
    """Say a line, the first time that a run has one about this; on the first process."""
    if about not in run.progress.told:
        run.progress.told.add(about)
        _say(text)


def _say(text: str) -> None:
    if is_first():
        with tqdm.external_write_mode(file=sys.stderr):  # not behind a bar, on its line
            logger.info("%s", text)


def tell_model(run: RunState) -> None:
    """Say which device trains what."""
    devices = run_devices(run.args) if run.sharding_plan is None else list(run.sharding_plan.mesh.devices.flat)
    devices = devices[:1] if run.sharding_plan is None else devices
    kind = "CPU" if devices[0].platform == "cpu" else devices[0].device_kind
    every, trained = run.model.num_parameters(), run.model.num_parameters(only_trainable=True)
    share = "all of which train" if every == trained else f"of which {_count(trained)} train ({trained / every:.2%})"
    what = f"{scrubbed(short_name(run.model))} ({run.model.config.model_type}) of {_count(every)} parameters"
    text = f"Training on {len(devices)} x {kind}: {what}, {share}, computed in {run.args.compute_dtype}."
    tell(run, "model", text)


def tell_layout(run: RunState, layout: str, reason: str) -> None:
    """Say how steps are laid out that no survey of a dataset has told of: for a script's own loss, and of rows that
    the run writes.

    Args:
        reason: why it is another layout than asked for; "" where it is not.
    """
    why = "the script's own loss gets whole rows" if run.own_loss else reason
    why = why or "what it saves is known once there are rows"
    tell(run, "layout", f"Layout {layout}: {why}.")


def tell_compilation(run: RunState, steps: Any, shape: tuple[int, ...]) -> None:
    """Say that the first step waits for the compiler, and where the program is kept.

    Args:
        steps: what the loop takes steps from.
        shape: of the first step's tokens.
    """
    count = _shapes(steps)
    of = "" if count is None else f" of {count}"
    folder = jax.config.jax_compilation_cache_dir if jax.config.jax_enable_compilation_cache else None
    kept = "not kept for the next run" if folder is None else f"kept in {_from_home(folder)}"
    size = " x ".join(f"{axis:,}" for axis in shape)
    tell(run, "compilation", f"Compiling the step for shape 1{of}, tokens {size}; compiled programs are {kept}.")


def _from_home(folder: str) -> str:
    """The folder, as `~/...` where it lies under the user's own."""
    home = Path("~").expanduser()
    return f"~/{Path(folder).relative_to(home)}" if Path(folder).is_relative_to(home) else folder


def tell_trained(run: RunState, steps: int, seconds: float) -> None:
    """Say what a call of train() left, and what to call next."""
    folder = Path(run.args.output_dir) / f"checkpoint-{run.state.global_step}"
    left = f"its last checkpoint is {scrubbed(str(folder))}" if folder.is_dir() else "the model is in memory alone"
    _say(f"Trained {steps:,} step{'' if steps == 1 else 's'} in {seconds:,.1f} s; {left}. Next: trainer.save_model().")


def tell_saved(run: RunState, folder: Path) -> None:
    """Say where the model is, and a command that uses it."""
    place = scrubbed(str(folder))
    command = f"trl-jax score {place} answers.jsonl" if run.task.head == "score" else f"trl-jax chat {place}"
    usable = run.task.head == "score" or run.model.backend.causal  # exported programs do not generate
    _say(f"The model is in {place}." + (f" Next: {command}" if usable else ""))


def _shapes(steps: Any) -> int | None:
    """How many shapes a run's steps have; None where that is not known beforehand."""
    if not isinstance(steps, ExampleLoader) or steps.step_layout.layout == "padded":
        return None
    layout = steps.step_layout
    return len(layout.buckets.lengths if layout.views is None else layout.views.shapes) or None


def _count(number: int) -> str:
    for unit, name in ((10**9, "B"), (10**6, "M"), (10**3, "k")):
        if number >= unit:
            return f"{number / unit:.1f}{name}"
    return str(number)


# ----------------------------------------------------------------------------------------------------
# Says on the bar of a run's steps what goes on between two of them.


_SECONDS = 0.1  # between two looks of a person


class ProgressLine:
    """The words before the bar that transformers' ProgressCallback shows: of terminals alone, as a log would get a line
    for each of them, and of none with disable_tqdm."""

    def __init__(self, events: Events):
        self._events, self._told_at = events, float("-inf")

    def __call__(self, text: str, *, often: bool = False) -> None:
        """Say it.

        Args:
            often: it is said again and again, and not each time has to be seen.
        """
        now = time.monotonic()
        if not sys.stderr.isatty() or (often and now - self._told_at < _SECONDS):
            return
        self._told_at = now
        for bar in _bars(self._events):
            bar.set_description_str(text)


class CompilationUntimed:
    """Leaves the compiler's time out of what the bar of a run's steps expects of those to come."""

    def __init__(self, events: Events):
        self._events, self._shapes = events, set()

    def done(self, shape: tuple[int, ...]) -> None:
        """A step whose tokens have this shape was begun; for the first of each shape it was compiled before."""
        if shape in self._shapes:
            return
        self._shapes.add(shape)
        for bar in _bars(self._events):
            bar.unpause()


def _bars(events: Events) -> list[Any]:
    """The bars of a run's steps that transformers' callbacks show."""
    callbacks = [one for one in events.handler.callbacks if isinstance(one, ProgressCallback)]
    return [one.training_bar for one in callbacks if one.training_bar is not None]


class GenerationProgress:
    """Tells how many of `total` completions are done, and how many tokens a second are written."""

    def __init__(self, line: ProgressLine, total: int):
        self._line, self._total, self._began = line, total, time.monotonic()

    def __call__(self, done: int, tokens: int) -> None:
        speed = tokens / max(time.monotonic() - self._began, 1e-9)
        self._line(f"generating {done}/{self._total}, {speed:,.0f} tokens/s", often=done < self._total)
