"""The attributes and methods that scripts know from transformers' Trainer and that neither train nor evaluate."""

from __future__ import annotations

import abc
from pathlib import Path
from typing import Any, NoReturn

from datasets import Dataset, IterableDataset
from transformers.trainer_callback import CallbackHandler, TrainerCallback, TrainerControl, TrainerState

from trl_jax.core.files.whole_file import write_whole
from trl_jax.data.loader import ExampleLoader
from trl_jax.engine.checkpoints.checkpoint import STATE_FILE, state_text
from trl_jax.engine.devices.processes import is_first, together
from trl_jax.hub.pretrained import PreTrainedModel
from trl_jax.mesh.sharding import ShardingPlan
from trl_jax.run import callbacks, data, reports
from trl_jax.run.dataloaders import Batches
from trl_jax.run.first_lines import tell_saved
from trl_jax.run.output.hub_push import HubPublisher
from trl_jax.run.parts import Parts
from trl_jax.run.state import RunState


def _of_run(name: str, doc: str) -> property:
    """An attribute of the trainer that the run's state holds, so that all of its parts see what a script sets."""

    def read(self: Surface) -> Any:
        return vars(self._run)[name]

    def write(self: Surface, value: Any) -> None:
        setattr(self._run, name, value)

    return property(read, write, doc=doc)


class Surface(abc.ABC):
    """Data, files and facts that scripts ask of a trainer, or set on it, besides having it train."""

    _run: RunState
    _publisher: HubPublisher
    parts: Parts

    # ---- what the run holds ------------------------------------------------------------------------------------

    model = _of_run("model", "The model that trains.")
    args = _of_run("args", "The configuration.")
    processing_class = _of_run("processing_class", "The tokenizer.")
    tokenizer = _of_run("processing_class", "The processing class, as it was called before.")
    train_dataset = _of_run("train_dataset", "The prepared training set.")
    eval_dataset = _of_run("eval_dataset", "The prepared evaluation set, or a dict of them.")

    is_fsdp_enabled = is_deepspeed_enabled = False  # recipes ask before they save; here saving is the same

    @property
    def is_in_train(self) -> bool:
        """Whether train() is under way."""
        return self._run.progress.in_train

    @is_in_train.setter
    def is_in_train(self, value: bool) -> None:
        self._run.progress.in_train = value

    @property
    def _memory_tracker(self) -> NoReturn:
        """Refuses transformers' evaluate, predict and train, which ask for it first, where a script that imported them
        late calls them by name."""
        raise TypeError(
            f"A method of transformers.Trainer was called by name with a {type(self).__name__} of trl_jax. Import it "
            "before the trainer's class is defined (from transformers import Trainer), or call super()'s."
        )

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

    @property
    def optimizer(self) -> Any:
        """The optimizer of the last train(); None before it."""
        return self.parts.training.optimizer

    @property
    def lr_scheduler(self) -> Any:
        """The schedule of the last train(); None before it."""
        return self.parts.checkpointer.lr_scheduler

    def get_learning_rates(self) -> list[float]:
        """The rate of each of the optimizer's groups.

        Raises:
            ValueError: there is no optimizer before train().
        """
        if self.optimizer is None:
            raise ValueError("There is no optimizer before train(), so there are no learning rates yet.")
        return [group["lr"] for group in self.optimizer.param_groups]

    def get_total_train_batch_size(self, args: Any) -> int:
        """Examples of an optimizer step, on all devices together; `args` are the trainer's own."""
        return self._run.step_examples

    def num_examples(self, dataloader: Any) -> int:
        """Rows of a dataloader's dataset; of what has none, as many as its batches have at most.

        Raises:
            TypeError: the dataset is a stream.
        """
        try:
            return len(dataloader.dataset)
        except (AttributeError, TypeError):
            return len(dataloader) * self.args.per_device_train_batch_size

    def log(self, logs: dict[str, float], start_time: float | None = None) -> None:
        """Put `logs` into `state.log_history` with the epoch and step, and hand them to the callbacks; with the speed
        since `start_time`, of time.time(), where `include_num_input_tokens_seen` counts tokens."""
        callbacks.log(self._run, logs, start_time)

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
        write_whole(Path(self.args.output_dir) / STATE_FILE, state_text(self.state))

    def end(self) -> None:
        """Let trackers finish what they have open."""
        callbacks.finish_trackers(self.callback_handler)

    def hyperparameter_search(self, *args: Any, **kwargs: Any) -> NoReturn:
        """Refused: it makes models by `model_init`, which TRL's trainers here do not take either."""
        raise TypeError(
            "hyperparameter_search is not in this release of trl_jax. Make a trainer for each "
            "configuration and call train()."
        )

    # ---- data --------------------------------------------------------------------------------------------------

    def prepare_dataset(self, dataset: Any, name: str, *, bounded: bool = True) -> Dataset | IterableDataset:
        """Rows as the loader takes them; where they are `bounded`, without those longer than max_length. Preparing
        twice is preparing once."""
        return data.prepare(self._run, dataset, name, bounded=bounded)

    def _prepared_for_evaluation(self, dataset: Any) -> Any:
        if dataset is None:
            return None
        if not isinstance(dataset, dict):
            return self.prepare_dataset(dataset, "eval")
        return {name: self.prepare_dataset(part, f"eval_dataset[{name!r}]") for name, part in dataset.items()}

    def loader(self, dataset: Dataset | IterableDataset, *, training: bool) -> ExampleLoader:
        """Step batches over a prepared dataset."""
        return data.loader(self._run, dataset, training=training)

    def batches(self, dataset: Dataset | IterableDataset, *, training: bool) -> Batches:
        """A dataloader over a prepared dataset, as a script's own get_train_dataloader may return it."""
        return Batches(self.loader(dataset, training=training), self._run.task)

    def get_train_dataloader(self) -> Any:
        """Batches of the training set as dicts; `set_epoch` chooses the order."""
        return self.batches(self.train_dataset, training=True)

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
        return self.batches(self.eval_dataset if eval_dataset is None else eval_dataset, training=False)

    def get_test_dataloader(self, test_dataset: Any) -> Any:
        """Batches of a prepared dataset, in its order."""
        return self.batches(test_dataset, training=False)

    # ---- files and the Hub -------------------------------------------------------------------------------------

    def save_model(self, output_dir: str | None = None, _internal_call: bool = False) -> None:
        """Write a folder that transformers loads: config, weights, tokenizer, and training_args.json."""
        folder = Path(self.args.output_dir if output_dir is None else output_dir)
        with together():
            self.parts.checkpointer.write_model(folder, self.model)
        if not _internal_call:
            tell_saved(self._run, folder)
        if self.args.push_to_hub and not _internal_call:
            self.push_to_hub(commit_message="Model save", revision=self.args.hub_revision)

    @property
    def hub_model_id(self) -> str | None:
        """The repository's full name, None before it was opened."""
        return self._publisher.repo_id

    def init_hf_repo(self, token: str | None = None, private: bool | None = None) -> None:
        """Make the repository `args.hub_model_id`, named after output_dir if None, unless it is there.

        Raises:
            TypeError, ValueError: the token cannot be one.
            PermissionError, ConnectionError: that failed. Under `hub_strategy="end"` a Hub that cannot be reached is
                warned of only: it is not needed yet.
        """
        self._publisher.open(token, private)

    def push_to_hub(
        self,
        commit_message: str | None = "End of training",
        blocking: bool = True,
        token: str | None = None,
        revision: str | None = None,
        private: bool | None = None,
        **kwargs: Any,
    ) -> Any:
        """Save the model and its card to `args.output_dir` and upload that, checkpoints left out.

        Args:
            kwargs: for `create_model_card`: model_name, dataset_name, tags and further metadata.

        Returns:
            The commit; where `blocking` is False, a Future of it. Ask for its `result()` before the script ends: Python
            then closes what uploads need, here as in transformers.

        Raises:
            PermissionError, ConnectionError: not even the last try succeeded; everything is in the folder.
        """
        self._run.events.fire("on_push_begin")
        if not is_first():  # which alone talks to the Hub
            self.save_model(_internal_call=True)
            return None
        if not self._publisher.opened or token is not None:
            self.init_hf_repo(token=token, private=private)
        self.save_model(_internal_call=True)
        self.create_model_card(**kwargs)
        return self._publisher.push(commit_message or "End of training", blocking=blocking, revision=revision)

    def create_model_card(
        self,
        model_name: str | None = None,
        dataset_name: str | list[str] | None = None,
        tags: str | list[str] | None = None,
        **facts: Any,
    ) -> None:
        """Write README.md into `args.output_dir`; one that somebody else wrote is left alone."""
        self._publisher.write_card(model_name, dataset_name, tags, facts)
