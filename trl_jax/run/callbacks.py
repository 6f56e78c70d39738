"""The callbacks of a run, which are transformers', and the TrainerState that they get.

Some of transformers' trackers save the model with a torch Trainer, follow a torch module's gradients, or use the name
torch where it is not installed. They are callbacks of the classes below, which do the same with the model here.
"""

from __future__ import annotations

import functools
import logging
import os
import tempfile
import time
from numbers import Number
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
from trl_jax.run.output.model_files import arguments_text, write_model
from trl_jax.run.state import RunState

logger = logging.getLogger(__name__)


def events_of(run: RunState, callbacks: list[TrainerCallback] | None) -> Events:
    """Build the events of a run: the default callbacks, those of `report_to` and the given ones, with a fresh state."""
    from transformers.integrations import get_reporting_integration_callbacks

    reporters = get_reporting_integration_callbacks(run.args.report_to)
    given = [DefaultFlowCallback, *reporters, *(callbacks or [])]
    handler = Callbacks(given, run.model, run.processing_class, None, None)
    handler.add_callback(PrinterCallback if run.args.disable_tqdm else ProgressCallback)
    return Events(handler, run.args, TrainerState(stateful_callbacks=[]), TrainerControl())


class Callbacks(CallbackHandler):
    """transformers' handler, whose trackers need no torch."""

    def add_callback(self, callback: type[TrainerCallback] | TrainerCallback) -> None:
        if isinstance(callback, type):
            super().add_callback(without_torch(callback))
            return
        kind = without_torch(type(callback))
        if kind is not type(callback):
            callback.__class__ = kind  # the same object, which the script may ask for or remove
        super().add_callback(callback)


class WandbWithoutTorch:
    """WandbCallback: WANDB_LOG_MODEL saves the model that trains; WANDB_WATCH, whose hooks are torch's, is left out."""

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
            write_model(Path(folder), model, processing_class, arguments_text(args))  # by all processes together
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
    """DVCLiveCallback: log_model=True saves the model that trains."""

    def on_train_end(
        self, args: Any, state: Any, control: Any, model: Any = None, processing_class: Any = None, **kwargs: Any
    ) -> None:
        if not self._initialized:
            return
        if self._log_model is True:
            name = "best" if args.load_best_model_at_end else "last"
            folder = Path(args.output_dir) / name
            write_model(folder, model, processing_class, arguments_text(args))  # by all processes together
            if state.is_world_process_zero:
                self.live.log_artifact(str(folder), name=name, type="model", copy=True)
        if state.is_world_process_zero:
            self.live.end()


class MlflowWithoutTorch:
    """MLflowCallback, and DagsHub's: on_log asks of a value that is no number, as the mean of nothing, whether it is
    a torch tensor."""

    def on_log(
        self, args: Any, state: Any, control: Any, logs: dict[str, Any], model: Any = None, **kwargs: Any
    ) -> None:
        numbers = {name: value for name, value in logs.items() if isinstance(value, int | float)}
        super().on_log(args, state, control, numbers, model=model, **kwargs)


class TensorBoardWithoutTorch:
    """TensorBoardCallback, which takes its writer from torch or tensorboardX."""

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
    """CodeCarbonCallback, which asks torch's build for a device that codecarbon did not know."""

    def __init__(self):
        import codecarbon

        self._codecarbon, self.tracker = codecarbon, None


_WITHOUT_TORCH = {
    "WandbCallback": WandbWithoutTorch,
    "DVCLiveCallback": DvcLiveWithoutTorch,
    "MLflowCallback": MlflowWithoutTorch,
    "TensorBoardCallback": TensorBoardWithoutTorch,
    "CodeCarbonCallback": CodeCarbonWithoutTorch,
}


@functools.cache
def without_torch(kind: type[TrainerCallback]) -> type[TrainerCallback]:
    """The class of a callback, with these methods in the place of transformers' where it is one of its trackers.

    A script's subclass keeps its own methods, whose super() is then the class here.
    """
    from transformers.integrations import integration_utils

    for name, ours in _WITHOUT_TORCH.items():
        theirs = vars(integration_utils)[name]
        if kind is theirs:
            return type(name, (ours, theirs), {})
        if issubclass(kind, theirs) and not issubclass(kind, ours):
            return type(kind.__name__, (kind, without_torch(theirs)), {})
    return kind


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
