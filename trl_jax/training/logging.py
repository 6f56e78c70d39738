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

from trl_jax.config.base import BaseConfig
from trl_jax.core.outputs import PrecomputedFeatures
from trl_jax.core.secrets import scrubbed
from trl_jax.data.loader import ExampleLoader, StepBatch
from trl_jax.hub.pretrained import PreTrainedModel
from trl_jax.mesh.mesh import ShardingPlan
from trl_jax.mesh.processes import is_first
from trl_jax.training.devices import run_devices
from trl_jax.training.events import Events
from trl_jax.training.model import short_name

logger = logging.getLogger(__name__)


def show_lines(level: int, *, asked: bool) -> None:
    """Show this module's INFO lines, unless the user set the log level (`asked`) or it is above WARNING."""
    logger.setLevel(logging.INFO if not asked and level <= logging.WARNING else logging.NOTSET)


def tell(printed: set[str], about: str, text: str) -> None:
    """Print a line on the first process, unless the run has already `printed` one about it."""
    if about not in printed:
        printed.add(about)
        _say(text)


def _say(text: str) -> None:
    if is_first():
        with tqdm.external_write_mode(file=sys.stderr):  # not on the line of a progress bar
            logger.info("%s", text)


def tell_model(printed: set[str], args: BaseConfig, model: PreTrainedModel, plan: ShardingPlan | None) -> None:
    """Print which devices train which model."""
    devices = run_devices(args)[:1] if plan is None else list(plan.mesh.devices.flat)
    kind = "CPU" if devices[0].platform == "cpu" else devices[0].device_kind
    every, trained = model.num_parameters(), model.num_parameters(only_trainable=True)
    share = "all of which train" if every == trained else f"of which {_count(trained)} train ({trained / every:.2%})"
    what = f"{scrubbed(short_name(model))} ({model.config.model_type}) of {_count(every)} parameters"
    tell(printed, "model", f"Training on {len(devices)} x {kind}: {what}, {share}, computed in {args.compute_dtype}.")


_LAYOUTS = {
    "padded": "one text per row",
    "packed": "texts end to end, without padding",
    "shared": "texts end to end, without padding; a prompt that several texts share is computed once",
}


def tell_layout(printed: set[str], layout: str, reason: str, *, user_loss: bool) -> None:
    """Print the layout of the steps if no dataset survey has done so: online, and with a user-defined loss.

    Args:
        reason: why it is not the requested layout; "" if it is.
        user_loss: whether the script overrides the loss.
    """
    why = "a user-defined loss receives whole rows" if user_loss else reason
    tell(printed, "layout", f"Layout {layout}: {why or _LAYOUTS[layout]}.")


def tell_compilation(printed: set[str], steps: Any, shape: tuple[int, ...]) -> None:
    """Print that the first step is being compiled, and where compiled programs are cached.

    Args:
        steps: the source of the loop's steps.
        shape: of the first step's tokens.
    """
    count = _shapes(steps)
    of = "" if count is None else f" of {count}"
    folder = jax.config.jax_compilation_cache_dir if jax.config.jax_enable_compilation_cache else None
    cache = "not kept for the next run" if folder is None else f"kept in {_from_home(folder)}"
    size = " x ".join(f"{axis:,}" for axis in shape)
    tell(printed, "compilation", f"Compiling the step for shape 1{of}, tokens {size}; compiled programs are {cache}.")


def tell_images(printed: set[str], batch: StepBatch, *, share_tower: bool) -> None:
    """Print how many images the first step with images has, and how often they would be computed without sharing.

    Args:
        share_tower: whether policy and reference have the same vision tower.
    """
    if batch.num_images == 0:
        return
    text = f"Images: {batch.num_images:,} in a step"
    if batch.num_image_uses > batch.num_images:
        text += f", each computed once for all texts that show it ({batch.num_image_uses:,} without sharing)"
    if isinstance(batch.arrays.images, PrecomputedFeatures):
        text += "; their features are kept, because the vision tower is not trained"
    elif share_tower:
        text += "; policy and reference share their features"
    tell(printed, "images", f"{text}.")


def tell_first(printed: set[str], what: str) -> None:
    """Print that the first evaluation or generation is being compiled."""
    tell(printed, what, f"Compiling the {what}: the first one takes longer than the others.")


def _from_home(folder: str) -> str:
    """The folder as `~/...` if it is in the user's home."""
    home = Path("~").expanduser()
    return f"~/{Path(folder).relative_to(home)}" if Path(folder).is_relative_to(home) else folder


def tell_trained(output_dir: str, last_step: int, steps: int, seconds: float) -> None:
    """Print where train() left the model, and what to call next."""
    folder = Path(output_dir) / f"checkpoint-{last_step}"
    left = f"its last checkpoint is {scrubbed(str(folder))}" if folder.is_dir() else "the model is only in memory"
    _say(f"Trained {steps:,} step{'' if steps == 1 else 's'} in {seconds:,.1f} s; {left}. Next: trainer.save_model().")


def tell_saved(folder: Path, head: str, *, causal: bool) -> None:
    """Print where the model is, and a command that uses it."""
    place = scrubbed(str(folder))
    command = f"trl-jax score {place} answers.jsonl" if head == "score" else f"trl-jax chat {place}"
    usable = head == "score" or causal  # exported programs cannot generate
    _say(f"The model is in {place}." + (f" Next: {command}" if usable else ""))


def _shapes(steps: Any) -> int | None:
    """The number of distinct step shapes; None if it is unknown."""
    if not isinstance(steps, ExampleLoader) or steps.step_layout.layout == "padded":
        return None
    layout = steps.step_layout
    return len(layout.buckets.lengths if layout.views is None else layout.views.shapes) or None


def _count(number: int) -> str:
    for unit, name in ((10**9, "B"), (10**6, "M"), (10**3, "k")):
        if number >= unit:
            return f"{number / unit:.1f}{name}"
    return str(number)


# The progress bar of the steps.

_SECONDS = 0.1  # minimum time between two frequent updates of the bar


class ProgressLine:
    """Sets the description of transformers' progress bar, on terminals only: in a log file, each would add a line."""

    def __init__(self, events: Events):
        self._events, self._told_at = events, float("-inf")

    def __call__(self, text: str, *, often: bool = False) -> None:
        """Show the text.

        Args:
            often: whether it changes so often that some updates may be skipped.
        """
        now = time.monotonic()
        if not sys.stderr.isatty() or (often and now - self._told_at < _SECONDS):
            return
        self._told_at = now
        for bar in _bars(self._events):
            bar.set_description_str(text)


class CompilationUntimed:
    """Excludes compilation from the progress bar's estimate of the remaining time."""

    def __init__(self, events: Events):
        self._events, self._shapes = events, set()

    def done(self, shape: tuple[int, ...]) -> None:
        """Note that a step with tokens of this shape was started; if it is the first, it has just been compiled."""
        if shape in self._shapes:
            return
        self._shapes.add(shape)
        for bar in _bars(self._events):
            bar.unpause()


def _bars(events: Events) -> list[Any]:
    """The training bars of transformers' progress callbacks."""
    callbacks = [callback for callback in events.handler.callbacks if isinstance(callback, ProgressCallback)]
    return [callback.training_bar for callback in callbacks if callback.training_bar is not None]


class GenerationProgress:
    """Shows how many of `total` completions are done, and the tokens per second."""

    def __init__(self, line: ProgressLine, total: int):
        self._line, self._total, self._began = line, total, time.monotonic()

    def __call__(self, done: int, tokens: int) -> None:
        speed = tokens / max(time.monotonic() - self._began, 1e-9)
        self._line(f"generating {done}/{self._total}, {speed:,.0f} tokens/s", often=done < self._total)
