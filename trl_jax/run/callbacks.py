"""The callbacks of a run, which are transformers', and the TrainerState that they get."""

from __future__ import annotations

import os
import time
from pathlib import Path
from typing import Any

from transformers.trainer_callback import (
    CallbackHandler,
    DefaultFlowCallback,
    ExportableState,
    PrinterCallback,
    ProgressCallback,
    TrainerCallback,
    TrainerControl,
    TrainerState,
)

from trl_jax.engine.devices.processes import is_first
from trl_jax.engine.events import Events
from trl_jax.rollout.picture import write_picture
from trl_jax.run.state import RunState


def events_of(run: RunState, callbacks: list[TrainerCallback] | None) -> Events:
    """Build the events of a run: the default callbacks, those of `report_to` and the given ones, with a fresh state."""
    from transformers.integrations import get_reporting_integration_callbacks

    reporters = get_reporting_integration_callbacks(run.args.report_to)
    handler = CallbackHandler(
        [DefaultFlowCallback, *reporters, *(callbacks or [])], run.model, run.processing_class, None, None
    )
    handler.add_callback(PrinterCallback if run.args.disable_tqdm else ProgressCallback)
    return Events(handler, run.args, TrainerState(stateful_callbacks=[]), TrainerControl())


def begin_state(run: RunState) -> None:
    """Give callbacks a fresh TrainerState: nothing has been trained yet."""
    events, first = run.events, is_first()
    stateful = [c for c in [*events.handler.callbacks, events.control] if isinstance(c, ExportableState)]
    events.state = TrainerState(
        stateful_callbacks=stateful, is_local_process_zero=first, is_world_process_zero=first
    )
    events.state.train_batch_size = run.train_batch_size


def finish_trackers(handler: CallbackHandler) -> None:
    """End the runs that trackers such as wandb have open."""
    for callback in handler.callbacks:
        for tracker in ("_wandb", "_trackio"):  # modules, where transformers' callbacks have imported them
            if vars(callback).get(tracker) is not None and callback._initialized:
                vars(callback)[tracker].finish()
                callback._initialized = False  # the next log then begins a new run


def log(run: RunState, logs: dict[str, Any], start_time: float | None = None) -> None:
    """Append `logs` to `state.log_history` with the epoch and step, and pass them to the callbacks. What is added, by
    callbacks too, is put into `logs`, as transformers' Trainer does: evaluate() and train() return it.

    Args:
        start_time: of the training, by time.time(): how many tokens it has read a second is then logged, too, where
            `include_num_input_tokens_seen` counts them.
    """
    state = run.state
    if state.epoch is not None:
        logs["epoch"] = state.epoch
    if run.args.include_num_input_tokens_seen != "no":
        logs["num_input_tokens_seen"] = state.num_input_tokens_seen
        if start_time is not None:
            seconds, read = time.time() - start_time, state.num_input_tokens_seen - run.progress.input_tokens_before
            logs["train_runtime"] = round(seconds, 4)
            if seconds > 0:
                logs["train_tokens_per_second"] = round(read / seconds, 3)
    state.log_history.append({**logs, "step": state.global_step})
    if run.rollout is not None and is_first() and os.access(run.args.output_dir, os.W_OK):
        write_picture(Path(run.args.output_dir), state.log_history)
    run.events.fire("on_log", logs)
