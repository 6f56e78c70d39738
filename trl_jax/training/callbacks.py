"""The callbacks of a run: the default ones, those that save by time or write JSON lines, and trackers without torch."""

from __future__ import annotations

import functools
import json
import logging
import os
import sys
import tempfile
import time
from math import isfinite
from numbers import Number
from pathlib import Path
from typing import Any

import numpy as np
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
from transformers.utils import is_in_notebook

from trl_jax.config.base import BaseConfig
from trl_jax.hub.pretrained import PreTrainedModel
from trl_jax.mesh.processes import from_first, is_first, several
from trl_jax.rollout.completions_log import write_picture
from trl_jax.training.checkpointer import arguments_text, write_model
from trl_jax.training.events import Events

logger = logging.getLogger(__name__)


def events_of(
    args: BaseConfig, model: PreTrainedModel, processing_class: Any, callbacks: list[TrainerCallback] | None
) -> Events:
    """The events of a new run. Its callbacks are the defaults, the trackers of `report_to`, and `callbacks`."""
    from transformers.integrations import get_reporting_integration_callbacks

    reporters = get_reporting_integration_callbacks(args.report_to)
    limits = args.max_minutes, args.save_minutes
    clock = [] if limits == (None, None) else [TimeLimitCallback(*limits)]
    lines = [JsonLines(args.log_json)] if args.log_json else []
    all_callbacks = [DefaultFlowCallback, *reporters, *clock, *lines, *(callbacks or [])]
    handler = Callbacks(all_callbacks, model, processing_class, None, None)
    handler.add_callback(PrinterCallback if args.disable_tqdm else progress_callback())
    return Events(handler, args, TrainerState(stateful_callbacks=[]), TrainerControl())


_BETWEEN_LOOKS = 10.0  # seconds between two exchanges of the clock among processes


class TimeLimitCallback(TrainerCallback):
    """Requests a checkpoint every `save_minutes`, and stops the run with a checkpoint after `max_minutes`. The
    arguments of the same names in a config add it.

    With several processes, the clock of the first one decides for all. They do not exchange it after every step,
    because that waits for the device to finish the step.
    """

    def __init__(self, max_minutes: float | None = None, save_minutes: float | None = None):
        if max_minutes is None and save_minutes is None:
            raise ValueError("TimeLimitCallback needs max_minutes, save_minutes, or both.")
        self._most, self._every = max_minutes, save_minutes
        shortest = min(60 * minutes for minutes in (max_minutes, save_minutes) if minutes is not None)
        self._between_looks = min(_BETWEEN_LOOKS, shortest / 10)
        self._began = self._saved = 0.0
        self._looked, self._next_look = (0.0, 0), 0  # time and step of the last look; step of the next
        self._ending = False

    def on_train_begin(self, args: Any, state: Any, control: Any, **kwargs: Any) -> None:
        self._began = self._saved = time.monotonic()
        self._looked, self._next_look = (self._began, state.global_step), 0
        self._ending = False

    def on_step_end(self, args: Any, state: Any, control: Any, **kwargs: Any) -> None:
        if state.global_step < self._next_look:
            return
        self._ending, due = self._look(state.global_step)
        if self._ending or due:
            control.should_save = True

    def _look(self, step: int) -> tuple[bool, bool]:
        """Whether the run ends, and whether a checkpoint is due."""
        now = time.monotonic()
        ending = self._most is not None and now - self._began >= 60 * self._most
        due = self._every is not None and now - self._saved >= 60 * self._every
        if several():
            (time_before, step_before), self._looked = self._looked, (now, step)
            seconds = max(now - time_before, 1e-3) / max(step - step_before, 1)  # per step
            number = step + max(1, int(self._between_looks / seconds))
            ending, due, self._next_look = np.frombuffer(
                from_first(np.asarray([ending, due, number], np.int64).tobytes()), np.int64
            ).tolist()
        return bool(ending), bool(due)

    def on_save(self, args: Any, state: Any, control: Any, **kwargs: Any) -> None:
        self._saved = time.monotonic()
        if self._ending:  # after the save, so that the checkpoint does not record the run as finished
            logger.warning("Stopping at step %d: max_minutes=%g have passed.", state.global_step, self._most)
            control.should_training_stop = True


class JsonLines(TrainerCallback):
    """Appends each log to a file as a line of JSON. NaN and infinite values become null."""

    def __init__(self, path: str):
        self._path = Path(path)

    def on_log(self, args: Any, state: Any, control: Any, logs: dict[str, Any], **kwargs: Any) -> None:
        if not state.is_world_process_zero:
            return
        values = {name: _as_json(value) for name, value in logs.items()}
        line = json.dumps({"step": state.global_step, "time": time.time()} | values, allow_nan=False)
        self._path.parent.mkdir(parents=True, exist_ok=True)
        with self._path.open("a", encoding="utf-8") as file:
            file.write(line + "\n")


def _as_json(value: Any) -> Any:
    if value is None or isinstance(value, str | bool | int | list | dict):
        return value
    return float(value) if isfinite(value) else None  # also NumPy's and JAX's scalars


def progress_callback() -> type[TrainerCallback]:
    """transformers' default progress callback: a table of losses in a notebook, a progress bar elsewhere."""
    trainer = sys.modules.get("transformers.trainer")  # may have a custom default; importing it would import torch
    if trainer is not None:
        return trainer.DEFAULT_PROGRESS_CALLBACK
    if not is_in_notebook():
        return ProgressCallback
    from transformers.utils.notebook import NotebookProgressCallback

    return NotebookProgressCallback


class Callbacks(CallbackHandler):
    """transformers' handler, with trackers that do not need torch."""

    def add_callback(self, callback: type[TrainerCallback] | TrainerCallback) -> None:
        if isinstance(callback, type):
            super().add_callback(without_torch(callback))
            return
        kind = without_torch(type(callback))
        if kind is not type(callback):
            callback.__class__ = kind  # in place, because the script may look up or remove this object
        super().add_callback(callback)


class WandbWithoutTorch:
    """WandbCallback. WANDB_LOG_MODEL saves the trained model; WANDB_WATCH, which needs torch's hooks, is ignored."""

    def setup(self, args: Any, state: Any, model: Any, **kwargs: Any) -> None:
        watched = os.environ.pop("WANDB_WATCH", None)
        try:
            super().setup(args, state, model, **kwargs)
        finally:
            if watched is not None:
                os.environ["WANDB_WATCH"] = watched
        if watched in ("all", "parameters", "gradients") and state.is_world_process_zero:
            logger.warning(
                "WANDB_WATCH=%s is left out: wandb.watch follows the gradients of torch modules, and this model has "
                "none. grad_norm is logged as usual.",
                watched,
            )

    def on_train_end(
        self, args: Any, state: Any, control: Any, model: Any = None, processing_class: Any = None, **kwargs: Any
    ) -> None:
        if self._wandb is None or not (self._log_model.is_enabled and self._initialized):
            return
        with tempfile.TemporaryDirectory() as folder:
            write_model(Path(folder), model, processing_class, arguments_text(args))  # a collective operation
            if not state.is_world_process_zero:
                return
            run, config = self._wandb.run, self._wandb.config
            name = run.id if args.run_name is None or args.run_name == args.output_dir else run.name
            metadata = {
                key: value
                for key, value in dict(self._wandb.summary).items()
                if isinstance(value, Number) and not key.startswith("_")
            }
            if args.load_best_model_at_end:
                metadata = {
                    f"eval/{args.metric_for_best_model}": state.best_metric,
                    "train/total_floss": state.total_flos,  # in transformers' spelling
                    "model/num_parameters": config.get("model/num_parameters"),
                }
            metadata["final_model"] = True
            artifact = self._wandb.Artifact(name=f"model-{name}", type="model", metadata=metadata)
            artifact.add_dir(folder)
            run.log_artifact(artifact, aliases=["final_model"])  # wandb has copied the files


class DvcLiveWithoutTorch:
    """DVCLiveCallback. log_model=True saves the trained model."""

    def on_train_end(
        self, args: Any, state: Any, control: Any, model: Any = None, processing_class: Any = None, **kwargs: Any
    ) -> None:
        if not self._initialized:
            return
        if self._log_model is True:
            name = "best" if args.load_best_model_at_end else "last"
            folder = Path(args.output_dir) / name
            write_model(folder, model, processing_class, arguments_text(args))  # a collective operation
            if state.is_world_process_zero:
                self.live.log_artifact(str(folder), name=name, type="model", copy=True)
        if state.is_world_process_zero:
            self.live.end()


class MlflowWithoutTorch:
    """MLflowCallback. For values that are not numbers (None for the mean of nothing), the original on_log checks
    whether they are torch tensors, so they are left out."""

    def on_log(
        self, args: Any, state: Any, control: Any, logs: dict[str, Any], model: Any = None, **kwargs: Any
    ) -> None:
        numbers = {name: value for name, value in logs.items() if isinstance(value, int | float)}
        super().on_log(args, state, control, numbers, model=model, **kwargs)


class DagsHubWithoutTorch(MlflowWithoutTorch):
    """DagsHubCallback. If a script sets its `train_dataloader`, the original writes the dataset with torch.save."""

    def on_train_end(self, args: Any, state: Any, control: Any, **kwargs: Any) -> None:
        if not self.log_artifacts:
            return
        if vars(self).get("train_dataloader"):
            logger.warning(
                "DagsHubCallback.train_dataloader is left out: its dataset would be written with torch.save. "
                "%s is uploaded without it.", args.output_dir,
            )  # fmt: skip
        self.repo.directory(str(self.path)).add_dir(args.output_dir)


class TensorBoardWithoutTorch:
    """TensorBoardCallback, whose writer comes from torch or tensorboardX."""

    def __init__(self, tb_writer: Any = None):
        try:
            super().__init__(tb_writer)
        except ModuleNotFoundError as error:
            if error.name != "tensorboardX":
                raise
            raise ImportError(
                "report_to='tensorboard' writes with tensorboardX where torch is not installed: pip install "
                "tensorboardX."
            ) from error


class CodeCarbonWithoutTorch:
    """CodeCarbonCallback. The original constructor uses torch to describe a device that codecarbon does not know."""

    def __init__(self):
        import codecarbon

        self._codecarbon, self.tracker = codecarbon, None


_WITHOUT_TORCH = {
    "WandbCallback": WandbWithoutTorch,
    "DVCLiveCallback": DvcLiveWithoutTorch,
    "DagsHubCallback": DagsHubWithoutTorch,  # before its base class
    "MLflowCallback": MlflowWithoutTorch,
    "TensorBoardCallback": TensorBoardWithoutTorch,
    "CodeCarbonCallback": CodeCarbonWithoutTorch,
}


@functools.cache
def without_torch(kind: type[TrainerCallback]) -> type[TrainerCallback]:
    """The callback's class, or a version without torch if it is one of transformers' trackers.

    A user's subclass of a tracker keeps its own methods; its super() is then the version without torch.
    """
    from transformers.integrations import integration_utils

    for name, ours in _WITHOUT_TORCH.items():
        theirs = vars(integration_utils)[name]
        if kind is theirs:
            return type(name, (ours, theirs), {})
        if issubclass(kind, theirs) and not issubclass(kind, ours):
            return type(kind.__name__, (kind, without_torch(theirs)), {})
    return kind


def begin_state(events: Events, train_batch_size: int) -> None:
    """Give callbacks a fresh TrainerState of a run that has not trained yet."""
    first = is_first()
    stateful = [c for c in [*events.handler.callbacks, events.control] if isinstance(c, ExportableState)]
    events.state = TrainerState(stateful_callbacks=stateful, is_local_process_zero=first, is_world_process_zero=first)
    events.state.train_batch_size = train_batch_size


def finish_trackers(handler: CallbackHandler) -> None:
    """End the open runs of trackers such as wandb."""
    for callback in handler.callbacks:
        for tracker in ("_wandb", "_trackio"):  # modules, set if transformers' callbacks have imported them
            if vars(callback).get(tracker) is not None and callback._initialized:
                vars(callback)[tracker].finish()
                callback._initialized = False  # so that the next log starts a new run


def log(
    args: BaseConfig,
    events: Events,
    logs: dict[str, Any],
    start_time: float | None = None,
    *,
    tokens_before: int = 0,
    online: bool = False,
) -> None:
    """Append `logs` to `state.log_history` with the epoch and step, and pass them to the callbacks. As in transformers'
    Trainer, entries that are added here or by callbacks are added to `logs` in place, because evaluate() and train()
    return it.

    Args:
        start_time: time.time() at the start of training. Tokens per second since then are logged, too, if
            `include_num_input_tokens_seen` counts tokens.
        tokens_before: `state.num_input_tokens_seen` at that time.
        online: whether to draw a plot of the log history.
    """
    state = events.state
    if state.epoch is not None:
        logs["epoch"] = state.epoch
    if args.include_num_input_tokens_seen != "no":
        logs["num_input_tokens_seen"] = state.num_input_tokens_seen
        if start_time is not None:
            seconds, read = time.time() - start_time, state.num_input_tokens_seen - tokens_before
            logs["train_runtime"] = round(seconds, 4)
            if seconds > 0:
                logs["train_tokens_per_second"] = round(read / seconds, 3)
    state.log_history.append({**logs, "step": state.global_step})
    if online and is_first() and os.access(args.output_dir, os.W_OK):
        write_picture(Path(args.output_dir), state.log_history)
    events.fire("on_log", logs)
