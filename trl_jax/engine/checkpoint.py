"""Checkpoint folders: written aside and renamed, the oldest removed, the best remembered."""

from __future__ import annotations

import shutil
from collections.abc import Callable
from pathlib import Path
from typing import Any

from transformers.trainer_callback import ExportableState, TrainerState
from transformers.trainer_utils import PREFIX_CHECKPOINT_DIR, SaveStrategy, sort_checkpoints

from trl_jax.engine.events import Events

STATE_FILE = "trainer_state.json"


def save_checkpoint(output_dir: str, write_model: Callable[[Path], None], events: Events) -> Path:
    """Write `checkpoint-<step>` below `output_dir` and remove what `save_total_limit` no longer allows.

    `write_model` fills a folder that gets its name only when everything is in it.
    """
    state, run_dir = events.state, Path(output_dir)
    folder = run_dir / f"{PREFIX_CHECKPOINT_DIR}-{state.global_step}"
    unfinished = run_dir / f".{folder.name}.unfinished"
    shutil.rmtree(unfinished, ignore_errors=True)
    unfinished.mkdir(parents=True)
    write_model(unfinished)
    best = run_dir / f"{PREFIX_CHECKPOINT_DIR}-{state.best_global_step}"
    if best == folder or best.exists():  # it may have been written before it was known to be the best
        state.best_model_checkpoint = str(best)
    _remember_callbacks(events)
    state.save_to_json(str(unfinished / STATE_FILE))
    if folder.exists():
        shutil.rmtree(folder)
    unfinished.rename(folder)
    _forget_oldest(run_dir, events.args.save_total_limit, kept={str(folder), state.best_model_checkpoint})
    return folder


def _forget_oldest(run_dir: Path, limit: int | None, kept: set[str | None]) -> None:
    """Remove checkpoints, lowest step first, down to `limit`; never one of `kept`, whatever an earlier run left."""
    checkpoints = sort_checkpoints(str(run_dir))
    excess = len(checkpoints) - limit if limit is not None and limit > 0 else 0
    for checkpoint in [name for name in checkpoints if name not in kept][: max(excess, 0)]:
        shutil.rmtree(checkpoint)


def _remember_callbacks(events: Events) -> None:
    for callback in [*events.handler.callbacks, events.control]:
        if isinstance(callback, ExportableState):
            name, saved = type(callback).__name__, events.state.stateful_callbacks
            if isinstance(saved.get(name), list):
                saved[name].append(callback.state())
            else:
                saved[name] = callback.state()


def is_new_best(metrics: dict[str, float], args: Any, state: TrainerState) -> bool:
    """Whether `metric_for_best_model` beats every earlier value; remembers it in `state` if so.

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
    if not (value > best if args.greater_is_better else value < best):  # so a NaN is never the best
        return False
    state.best_metric = value
    if args.save_strategy != SaveStrategy.NO:
        state.best_global_step = state.global_step
    return True


def forget_all_but_best(output_dir: str, best: str) -> None:
    """Remove every other checkpoint: `save_total_limit=1` means one folder once the run is over."""
    for checkpoint in sort_checkpoints(output_dir):
        if Path(checkpoint) != Path(best):
            shutil.rmtree(checkpoint)
