"""The attributes and methods that scripts know from transformers' Trainer and that neither train nor evaluate."""

from __future__ import annotations

import abc
from pathlib import Path
from typing import Any

from transformers.trainer_callback import CallbackHandler, TrainerCallback, TrainerControl, TrainerState

from trl_jax.engine.sharding import ShardingPlan
from trl_jax.hub.pretrained import PreTrainedModel
from trl_jax.run import callbacks, reports
from trl_jax.run.state import RunState


def _of_run(name: str, doc: str) -> property:
    """An attribute of the trainer that the run's state holds, so that all of its parts see what a script sets."""

    def read(self: Surface) -> Any:
        return vars(self._run)[name]

    def write(self: Surface, value: Any) -> None:
        setattr(self._run, name, value)

    return property(read, write, doc=doc)


class Surface(abc.ABC):
    """The attributes and methods of a trainer besides training, which scripts read or set."""

    _run: RunState

    model = _of_run("model", "The model that trains.")
    args = _of_run("args", "The configuration.")
    processing_class = _of_run("processing_class", "The tokenizer.")
    tokenizer = _of_run("processing_class", "The processing class, as it was called before.")
    train_dataset = _of_run("train_dataset", "The prepared training set.")
    eval_dataset = _of_run("eval_dataset", "The prepared evaluation set, or a dict of them.")
    is_in_train = _of_run("in_train", "Whether train() is under way.")

    is_fsdp_enabled = is_deepspeed_enabled = False  # recipes ask before they save; here saving is the same

    @property
    def model_wrapped(self) -> PreTrainedModel:
        return self.model

    @property
    def state(self) -> TrainerState:
        return self._run.events.state

    @property
    def control(self) -> TrainerControl:
        return self._run.events.control

    @property
    def callback_handler(self) -> CallbackHandler:
        return self._run.events.handler

    @property
    def sharding_plan(self) -> ShardingPlan | None:
        """How arrays are divided over several devices; None on one."""
        return self._run.sharding_plan

    @property
    def train_batch_size(self) -> int:
        """Examples in a micro-batch, on each device: those of the arguments, or what auto_find_batch_size found."""
        return self._run.train_batch_size

    def log(self, logs: dict[str, float], start_time: float | None = None) -> None:
        """Put `logs` into `state.log_history` with the epoch and step, and hand them to the callbacks."""
        callbacks.log(self._run, logs)

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

    def get_num_trainable_parameters(self) -> int:
        """How many numbers train."""
        return self.model.num_parameters(only_trainable=True)

    def metrics_format(self, metrics: dict[str, Any]) -> dict[str, Any]:
        """Times as h:mm:ss, bytes as MB, operations as GF, other numbers with four digits."""
        return reports.metrics_format(metrics)

    def log_metrics(self, split: str, metrics: dict[str, Any]) -> None:
        """Print the metrics of "train", "eval" or "test" in columns, by name."""
        reports.log_metrics(split, metrics)

    def save_metrics(self, split: str, metrics: dict[str, Any], combined: bool = True) -> None:
        """Write `<split>_results.json` into `args.output_dir`, and add to all_results.json there where `combined`."""
        reports.save_metrics(Path(self.args.output_dir), split, metrics, combined)

    def save_state(self) -> None:
        """Write trainer_state.json into `args.output_dir`."""
        self.state.save_to_json(str(Path(self.args.output_dir) / "trainer_state.json"))

    def end(self) -> None:
        """Let trackers finish what they have open."""
        callbacks.finish_trackers(self.callback_handler)
