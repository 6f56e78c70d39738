"""What a run holds: model, arguments, callbacks, state, logs and files."""

from __future__ import annotations

import contextlib
import copy
import glob
import json
import logging
import os
from collections.abc import Iterator
from dataclasses import replace
from pathlib import Path
from typing import Any

import jax
from datasets import Dataset, IterableDataset
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
from transformers.utils import logging as transformers_logging

from trl_jax.engine.compilation import keep_compilations
from trl_jax.engine.events import Events
from trl_jax.engine.processes import barrier, is_first, several
from trl_jax.engine.sharding import Fetched
from trl_jax.hub.pretrained import PreTrainedModel
from trl_jax.run.accelerator import Accelerator
from trl_jax.run.base_config import BaseConfig
from trl_jax.run.dataloaders import Batches
from trl_jax.run.devices import check_division, run_device, sharding_plan_of
from trl_jax.run.reports import Reports
from trl_jax.run.task import Task

logger = logging.getLogger(__name__)

ARGUMENTS = "training_args.json"


class Session(Reports, Task):
    """The attributes and methods scripts know from transformers' Trainer that neither train nor evaluate.

    Attributes: model, args, processing_class, train_dataset, eval_dataset, callback_handler, state, control.
    """

    def __init__(
        self,
        model: PreTrainedModel,
        args: BaseConfig,
        train_dataset: Dataset | IterableDataset,
        eval_dataset: Any,
        processing_class: Any,
        callbacks: list[TrainerCallback] | None,
    ):
        self.model, self.args, self.processing_class = model, args, processing_class
        self.accelerator = Accelerator(args, self.end)
        self.train_dataset, self.eval_dataset = train_dataset, eval_dataset
        self.is_in_train = False
        self.sharding_plan = sharding_plan_of(args)  # None on one device
        check_division(self.sharding_plan, model, self.overridden)
        if self.sharding_plan is not None:
            self.sharding_plan = replace(self.sharding_plan, axes=model.backend.axes)
            self.model.params, self.model.frozen = map(
                self.sharding_plan.placed, (self.model.params, self.model.frozen)
            )
        if several():
            self.model.read, self.model.writes = Fetched, is_first()
        self._tokens_seen = 0
        self._found_batch_size: int | None = None  # by auto_find_batch_size
        self._fills: bool | None = None  # its epochs' ends, as the run did that a checkpoint is of
        self._events = Events(
            self._callback_handler(callbacks), args, TrainerState(stateful_callbacks=[]), TrainerControl()
        )
        self._new_state()
        self._arguments = json.dumps(_written(args), indent=2)  # now: what cannot be written should not cost a run
        set_log_level(args.get_process_log_level())
        keep_compilations()
        _warn_of_idle_devices(args)
        os.makedirs(args.output_dir, exist_ok=True)

    # ---- dataloaders, logs, files ------------------------------------------------------------------------------

    def get_train_dataloader(self) -> Any:
        """Batches of the training set as dicts; `set_epoch` chooses the order."""
        return Batches(self.loader(self.train_dataset, training=True))

    def get_eval_dataloader(self, eval_dataset: Any = None) -> Any:
        """Batches of a prepared evaluation set, in its order; a string picks one of the constructor's."""
        if isinstance(eval_dataset, str):
            known = self.eval_dataset if isinstance(self.eval_dataset, dict) else {}
            if eval_dataset not in known:
                raise ValueError(
                    f"There is no evaluation set {eval_dataset!r}: the trainer was given "
                    f"{', '.join(known) or 'no dict of them'}."
                )
            eval_dataset = known[eval_dataset]
        return Batches(self.loader(self.eval_dataset if eval_dataset is None else eval_dataset, training=False))

    def get_test_dataloader(self, test_dataset: Any) -> Any:
        """Batches of a prepared dataset, in its order."""
        return Batches(self.loader(test_dataset, training=False))

    def log(self, logs: dict[str, float], start_time: float | None = None) -> None:
        """Put `logs` into `state.log_history` with the epoch and step, and hand them to the callbacks."""
        if self.state.epoch is not None:
            logs = {**logs, "epoch": self.state.epoch}
        if self.args.include_num_input_tokens_seen != "no":
            logs = {**logs, "num_input_tokens_seen": self.state.num_input_tokens_seen}
        self.state.log_history.append({**logs, "step": self.state.global_step})
        self._events.fire("on_log", logs)

    def save_model(self, output_dir: str | None = None, _internal_call: bool = False) -> None:
        """Write a folder that transformers loads: config, weights, tokenizer, and training_args.json."""
        self.write_model(Path(self.args.output_dir if output_dir is None else output_dir), self.model)

    def write_model(self, folder: Path, model: PreTrainedModel) -> None:
        """What `save_model` writes, of a model that may be a copy of the trainer's."""
        model.save_pretrained(folder)
        if not is_first():
            barrier("save_model")
            return
        self.processing_class.save_pretrained(folder)
        (folder / ARGUMENTS).write_text(self._arguments + "\n", encoding="utf-8")
        barrier("save_model")

    @property
    def overridden(self) -> set[str]:
        """Names that a script's own subclass defines."""
        own = [kind for kind in type(self).__mro__ if kind.__module__.partition(".")[0] != "trl_jax"]
        return {name for kind in own for name in vars(kind)}

    @property
    def train_batch_size(self) -> int:
        """Pairs in a micro-batch, on each device: those of the arguments, or what `auto_find_batch_size` found."""
        return self._found_batch_size or self.args.per_device_train_batch_size

    @property
    def tokenizer(self) -> Any:
        """The processing class, as it was called before."""
        return self.processing_class

    @property
    def model_wrapped(self) -> PreTrainedModel:
        return self.model

    @property
    def shards(self) -> int:
        """How many devices, or groups of them, have pairs of their own."""
        return 1 if self.sharding_plan is None else self.sharding_plan.shards

    @property
    def micro_batch_pairs(self) -> int:
        """Pairs of a micro-batch of training, on all devices together."""
        return self.train_batch_size * self.shards

    def get_num_trainable_parameters(self) -> int:
        return self.model.num_parameters(only_trainable=True)

    def end(self) -> None:
        """Let trackers finish what they have open."""
        for callback in self.callback_handler.callbacks:
            for tracker in ("_wandb", "_trackio"):  # modules, where transformers' callbacks have imported them
                if vars(callback).get(tracker) is not None and callback._initialized:
                    vars(callback)[tracker].finish()
                    callback._initialized = False  # a run that is over cannot be ended, but the next log begins one

    # ---- callbacks and state -----------------------------------------------------------------------------------

    @property
    def state(self) -> TrainerState:
        return self._events.state

    @contextlib.contextmanager
    def seen_at(self, reached: dict[str, Any]) -> Iterator[None]:
        """While this holds, `state` says that the run has `reached` these: arrays of a program that is traced."""
        real = self._events.state
        self._events.state = copy.copy(real)
        vars(self._events.state).update(reached)
        try:
            yield
        finally:
            self._events.state = real

    @property
    def control(self) -> TrainerControl:
        return self._events.control

    @property
    def callback_handler(self) -> CallbackHandler:
        return self._events.handler

    def add_callback(self, callback: type[TrainerCallback] | TrainerCallback) -> None:
        """Add a callback, as a class or an instance."""
        self.callback_handler.add_callback(callback)

    def pop_callback(self, callback: type[TrainerCallback] | TrainerCallback) -> TrainerCallback | None:
        """Remove a callback and return it; None if there was none."""
        return self.callback_handler.pop_callback(callback)

    def remove_callback(self, callback: type[TrainerCallback] | TrainerCallback) -> None:
        """Remove a callback."""
        self.callback_handler.remove_callback(callback)

    def is_local_process_zero(self) -> bool:
        return self.args.local_process_index == 0

    def is_world_process_zero(self) -> bool:
        return self.args.process_index == 0

    def _callback_handler(self, callbacks: list[TrainerCallback] | None) -> CallbackHandler:
        from transformers.integrations import get_reporting_integration_callbacks

        reporters = get_reporting_integration_callbacks(self.args.report_to)
        handler = CallbackHandler(
            [DefaultFlowCallback, *reporters, *(callbacks or [])], self.model, self.processing_class, None, None
        )
        handler.add_callback(PrinterCallback if self.args.disable_tqdm else ProgressCallback)
        return handler

    def _new_state(self) -> None:
        kept = [c for c in [*self.callback_handler.callbacks, self.control] if isinstance(c, ExportableState)]
        first = is_first()
        self._events.state = TrainerState(
            stateful_callbacks=kept, is_local_process_zero=first, is_world_process_zero=first
        )
        self.state.train_batch_size = self.train_batch_size

    @contextlib.contextmanager
    def _on_device(self):
        """The device of the run, and float32 products as exact as torch's unless tf32 was asked for."""
        precision = "tensorfloat32" if self.args.tf32 and self.args.device.type == "cuda" else "float32"
        with jax.default_device(run_device(self.args)), jax.default_matmul_precision(precision):
            yield


def _warn_of_idle_devices(args: BaseConfig) -> None:
    """JAX without the plugin of an accelerator runs on the CPU, and says so in no way one would notice."""
    if args.use_cpu or os.environ.get("JAX_PLATFORMS") or jax.default_backend() != "cpu":
        return
    for kind, extra, pattern in (("GPU", "cuda", "/dev/nvidia[0-9]*"), ("TPU", "tpu", "/dev/accel[0-9]*")):
        if glob.glob(pattern):
            logger.warning(
                'Training on the CPU, though this machine has a %s: pip install "trl_jax[%s]", or pass use_cpu=True.',
                kind,
                extra,
            )


def set_log_level(level: int) -> None:
    """What `log_level` asks for, of transformers' loggers and of ours."""
    transformers_logging.set_verbosity(level)
    ours = logging.getLogger("trl_jax")
    ours.setLevel(level)
    if not ours.hasHandlers():
        ours.addHandler(logging.StreamHandler())


def _written(args: BaseConfig) -> dict[str, Any]:
    """The arguments for a file: no access token, also not in the dicts they hold; dtypes by name."""
    values = args.to_dict()  # hides every name that ends in _token: two of those are no secret
    values |= {name: getattr(args, name) for name in ("eos_token", "pad_token") if name in values}
    for name, value in values.items():
        if isinstance(value, dict):
            hidden = {"token": "<TOKEN>"} if value.get("token") else {}
            values[name] = {key: str(entry) if "dtype" in key else entry for key, entry in value.items()} | hidden
    return values
