"""BaseTrainer: the constructor, train, evaluate, predict, save and push."""

from __future__ import annotations

import abc
import contextlib
import dataclasses
import os
from collections.abc import Callable, Iterator, Mapping
from pathlib import Path
from typing import Any, ClassVar, NoReturn

import jax
from datasets import Dataset, IterableDataset
from transformers.trainer_callback import CallbackHandler, TrainerCallback, TrainerControl, TrainerState
from transformers.trainer_utils import PredictionOutput, TrainOutput

from trl_jax.config.base import BaseConfig
from trl_jax.core.files import write_whole
from trl_jax.data.checks import check_type
from trl_jax.data.image_rows import first_row, has_images
from trl_jax.data.loader import ExampleLoader
from trl_jax.hub.auto import Checkpoint
from trl_jax.hub.peft_config import AdapterConfig, PromptLearningConfig, as_adapter_config, positions_beside
from trl_jax.hub.peft_targets import with_new_tokens
from trl_jax.hub.pretrained import PreTrainedModel
from trl_jax.hub.quantization import BitsAndBytesConfig
from trl_jax.hub.torch_objects import resize
from trl_jax.mesh.mesh import ShardingPlan
from trl_jax.mesh.processes import Accelerator, is_first, together
from trl_jax.tasks.policy import check_changes
from trl_jax.tasks.task import Task
from trl_jax.trainer.overrides import (
    NEVER_CALLED,
    NEVER_READ,
    ONCE_CALLED,
    Settled,
    check_collator,
    check_kept,
    check_lengths,
    check_overridden,
    check_same_rows,
    check_set,
    kept_of,
    names_of_script,
    read_once,
    refuse,
    warn_of_changes,
)
from trl_jax.training import data, setup
from trl_jax.training import metrics as callbacks
from trl_jax.training import model as model_loading
from trl_jax.training.checkpoint import STATE_FILE, Progress, state_text
from trl_jax.training.data import Batches
from trl_jax.training.devices import keep_compilations
from trl_jax.training.evaluate import MetricHooks, check_compute_metrics
from trl_jax.training.logging import tell_saved
from trl_jax.training.optimizer_choice import choose
from trl_jax.training.push import HubPublisher
from trl_jax.training.script_loss import BoundModel, script_values
from trl_jax.training.state import RunState, TrainerHooks
from trl_jax.training.step import default_optimizer


def _of_run(name: str, doc: str) -> property:
    """An attribute of the trainer that the run's state holds, so that all of its parts see what a script sets."""

    def read(self: BaseTrainer) -> Any:
        return vars(self._run)[name]

    def write(self: BaseTrainer, value: Any) -> None:
        setattr(self._run, name, value)

    return property(read, write, doc=doc)


class BaseTrainer(abc.ABC):
    """Trains a model as a task explains it; a subclass says which task (`make_task`) and which arguments
    (`config_class`).

    A script's subclass may override `compute_loss`, `loss`, `evaluate`, `predict`, `prediction_step`, `log`,
    `save_model`, `_save_checkpoint`, `push_to_hub`, `init_hf_repo`, `create_model_card`, `create_optimizer` and the
    dataloaders. Other methods that TRL's trainers call on themselves are refused: nobody would call them here.

    Attributes:
        aux_loss_enabled, router_aux_loss_coef: whether a loss that balances experts is added, and its weight.
        compute_loss_func: the loss that was passed.
        parts: what the run is made of.
    """

    _name: ClassVar[str]  # as in the output directory that is used where none is given, "<model>-<name>"
    _tag_names: ClassVar[list[str]]  # of the model's card
    _paper: ClassVar[tuple[str, str] | None] = None  # title and arXiv number of the method's, for the card
    config_class: ClassVar[type[BaseConfig]] = BaseConfig
    _takes_transforms: ClassVar[bool] = False  # whether the dataset may have a transform
    _collator_class: ClassVar[type | None] = None  # whose pad_to_multiple_of is taken; others are refused
    _older_collators: ClassVar[tuple[type, ...]] = ()  # of early TRL, that are taken, too
    _tokenizer_sides: ClassVar[Mapping[str, str] | None] = None  # on which one loaded with the model pads and cuts
    _old_arguments: ClassVar[Mapping[str, str]] = {}  # of earlier forms of the constructor: what to write today
    _takes_images: ClassVar[bool] = False  # whether rows may have images
    _data_collator: Any = None
    _compute_loss_func: Callable | None = None
    compute_loss_func = Settled(
        lambda trainer: trainer._compute_loss_func, "Pass it to the constructor, or override compute_loss."
    )
    aux_loss_enabled = Settled(
        lambda trainer: trainer._run.router_aux_loss_coef != 0, "Say router_aux_loss_coef in the arguments."
    )
    router_aux_loss_coef = Settled(
        lambda trainer: trainer._run.router_aux_loss_coef, "Say router_aux_loss_coef in the arguments."
    )
    _tried_metrics: Callable | None = None  # the compute_metrics that was tried before training
    _progress: Progress | None = None  # what the checkpoint that is being saved has
    _never_called: ClassVar[Mapping[str, str]] = NEVER_CALLED  # methods of TRL's that a script may not override
    _once_called: ClassVar[Mapping[str, str]] = ONCE_CALLED  # the same of earlier releases
    _never_read: ClassVar[Mapping[str, str]] = NEVER_READ  # attributes of TRL's that a script may not set
    _run: RunState
    _publisher: HubPublisher
    parts: setup.Parts

    def __init_subclass__(cls, **kwargs: Any):
        super().__init_subclass__(**kwargs)
        check_overridden(cls, {**cls._never_called, **cls._once_called})

    @abc.abstractmethod
    def make_task(self) -> Task:
        """The task, by `self.args` as they are now; asked for at construction, and before each step and evaluation."""

    def __init__(
        self,
        model: str | os.PathLike | PreTrainedModel,
        args: BaseConfig | None = None,
        data_collator: Any = None,
        train_dataset: Dataset | IterableDataset | None = None,
        eval_dataset: Any = None,
        processing_class: Any = None,
        compute_metrics: Callable | None = None,
        callbacks: list[TrainerCallback] | None = None,
        optimizers: tuple[Any, Any] = (None, None),
        optimizer_cls_and_kwargs: tuple[Any, dict[str, Any]] | None = None,
        preprocess_logits_for_metrics: Callable | None = None,
        quantization_config: Any = None,
        peft_config: Any = None,
        *,
        compute_loss_func: Callable | None = None,
        spec: setup.TrainerSpec | None = None,
    ):
        """Arguments in TRL's order; `args` is a `config_class`, made with "<model>-<name>" as output_dir if None.

        Args:
            compute_loss_func: the loss, of the model's outputs, the labels and the number of targets of the step.
            spec: what the trainer class contributes besides its task; None: nothing.

        Raises:
            TypeError, ValueError: an argument, row or checkpoint at fault, by name.
        """
        own = () if self._collator_class is None else (self._collator_class,)
        check_collator(data_collator, (*own, *self._older_collators))
        args = self._config(args, model)
        keep_compilations()  # before anything is compiled
        adapter = None if peft_config is None else as_adapter_config(peft_config)
        model, torch_model = model_loading.split_model(model)
        if train_dataset is None:
            raise ValueError("`train_dataset` is required: pass a datasets.Dataset.")
        check_type(train_dataset, "train", transforms=self._takes_transforms, images=self._takes_images)
        self._compute_loss_func, self._data_collator = compute_loss_func, data_collator
        self._begin(args, own_loss=compute_loss_func is not None)
        quantization = model_loading.quantization_of(quantization_config, args)
        if torch_model is None:
            checkpoint = model_loading.find(model, args, self._run.task.head)
        else:
            checkpoint = model_loading.from_torch(torch_model, args, self._run.task.head)
        if self._takes_images and has_images(first_row(train_dataset)):
            self._check_images()
            if isinstance(adapter, PromptLearningConfig):
                raise ValueError(
                    "peft_config: adapters of virtual tokens are not supported for rows with images. Pass a LoraConfig."
                )
            checkpoint = model_loading.with_images(checkpoint)
        new_tokens = self._settle_data(checkpoint, torch_model, adapter, processing_class, train_dataset, eval_dataset)
        self._load_policy(checkpoint, torch_model, adapter, quantization, new_tokens)
        check_compute_metrics(compute_metrics, args.batch_eval_metrics)
        self.compute_metrics, self.preprocess_logits_for_metrics = compute_metrics, preprocess_logits_for_metrics
        self.accelerator = Accelerator(args, self.end)
        self.parts = setup.assemble(
            self._run, spec or setup.TrainerSpec(), self._hooks(), self._publisher, callbacks,
            lambda: choose(self.args, optimizers, optimizer_cls_and_kwargs), torch_model,
        )  # fmt: skip

    # ---- construction, step by step

    def _config(self, args: BaseConfig | None, model: Any) -> BaseConfig:
        """The arguments that were passed, or those of a run that is called after its model."""
        if args is None:
            return self.config_class(f"{model_loading.short_name(model)}-{self._name}")
        if not isinstance(args, self.config_class):
            wanted = self.config_class.__name__
            raise TypeError(f"args is a {type(args).__module__}.{type(args).__qualname__}: wanted a {wanted}.")
        return args

    def _begin(self, args: BaseConfig, *, own_loss: bool) -> None:
        """Begin the run: its task is made, processes find each other, the Hub answers.

        Args:
            own_loss: the constructor was given a loss.
        """
        overridden = names_of_script(type(self)) | ({"compute_loss"} if own_loss else set())
        self._run = run = RunState(args, None, overridden=overridden)
        run.batch_size = args.per_device_train_batch_size
        self._kept = {name: kept.of(args) for name, kept in kept_of(type(self)).items()}
        self._read_once = read_once(self)
        run.task = self.make_task()
        run.pad_to_multiple_of = (args if self.data_collator is None else self.data_collator).pad_to_multiple_of
        self._publisher = HubPublisher(run, self._tag_names, self._paper)
        args.join_processes()  # before anything else
        if args.push_to_hub:  # first of all: a Hub that does not answer costs seconds, not a model's loading
            self.init_hf_repo()

    def _settle_data(
        self,
        checkpoint: Any,
        torch_model: Any,
        adapter: AdapterConfig | None,
        tokenizer: Any,
        train: Any,
        evaluation: Any,
    ) -> list[int]:
        """Settle the tokenizer and prepare rows, before weights are read: a bad row is named first, and num_proc forks
        before JAX has threads.

        Returns:
            The ids of tokens that the chat template brought.
        """
        run, args = self._run, self.args
        run.processing_class = setup.tokenizer_of(tokenizer, checkpoint, torch_model, args, self._tokenizer_sides)
        run.vocab_size, new_tokens = setup.settle_tokens(
            args, run.processing_class, checkpoint.vocab_size, can_resize=checkpoint.can_resize, head=run.task.head
        )
        if isinstance(checkpoint, Checkpoint) and checkpoint.native is not None and checkpoint.native.arch.vision:
            run.encoder = setup.image_encoder(checkpoint, run.processing_class, tokenizer)
        run.max_positions = positions_beside(checkpoint.max_positions, adapter)
        run.train_dataset = self.prepare_dataset(train, "train")
        run.eval_dataset = self._prepared_for_evaluation(evaluation)
        return new_tokens

    def _load_policy(
        self,
        checkpoint: Checkpoint | PreTrainedModel,
        torch_model: Any,
        adapter: AdapterConfig | None,
        quantization: BitsAndBytesConfig | None,
        new_tokens: list[int],
    ) -> None:
        """Read the weights of the model that trains, and settle what the tokenizer and the arguments say of it.

        Args:
            new_tokens: those that the chat template brought, which an adapter trains, too.
        """
        run, args = self._run, self.args
        args.check()  # again: setters and plain assignment get past the check at construction
        setup.check_strategies(args, run.eval_dataset)
        if torch_model is not None and checkpoint.can_resize:
            resize(torch_model, run.vocab_size)
        if adapter is not None and new_tokens:
            adapter = with_new_tokens(adapter, new_tokens, run.task.head)
        run.model = model_loading.load_policy(checkpoint, args, adapter, quantization, run.vocab_size)
        if self.data_collator is None:
            self._data_collator = self._collator()
        setup.settle_model(run, [*self._tag_names, "trl_jax"], torch_model)

    def _check_images(self) -> None:
        """Raise ValueError or TypeError for arguments that rows with images do not go with."""
        if self._run.own_loss:
            raise TypeError(
                f"The trainer's own {' and '.join(sorted(self._run.own_loss))} is not supported for rows with images "
                "yet. Leave it out."
            )

    def _collator(self) -> Any:
        """TRL's collator of these arguments, for scripts that call it; None where the task has none."""
        if self._collator_class is None:
            return None
        wanted = {field.name for field in dataclasses.fields(self._collator_class)}
        known = {name: value for name, value in vars(self.args).items() if name in wanted}
        if known["pad_to_multiple_of"] == "auto":
            known["pad_to_multiple_of"] = None
        return self._collator_class(pad_token_id=self.processing_class.pad_token_id, **known)

    def _hooks(self) -> TrainerHooks:
        """Methods as they are when they are called: a script may set others on the trainer at any time."""
        return TrainerHooks(
            compute_loss=lambda *given, **options: self.compute_loss(*given, **options),
            create_optimizer=lambda: self.create_optimizer(),
            evaluate=lambda: self.evaluate(),
            get_train_dataloader=lambda: self.get_train_dataloader(),
            log=lambda *given: self.log(*given),
            loss=lambda *given, **options: self.loss(*given, **options),
            settle_task=lambda: self._settle_task(),
            prediction_step=lambda *given: self.prediction_step(*given),
            save_checkpoint=self._save_progress,
            save_model=lambda *given, **options: self.save_model(*given, **options),
            script_values=lambda: script_values(self),
            set_by_script=lambda: vars(self).keys(),
        )

    # ---- training

    def train(
        self,
        resume_from_checkpoint: str | bool | None = None,
        trial: Any = None,
        ignore_keys_for_eval: list[str] | None = None,
    ) -> TrainOutput:
        """Train to the end. Returns the steps taken, the mean loss, and the run's metrics.

        Args:
            resume_from_checkpoint: a checkpoint's folder, or True for the newest whole one in `args.output_dir`.

        Raises:
            ValueError: there is nothing whole to resume from, or it is of another model, optimizer or dataset.
            FloatingPointError: several steps in a row gave no number.
            MemoryError: a step does not fit; the text says what takes how much.
            SystemExit: SIGTERM (143), SIGINT (130) or SIGHUP (129) asked for it; what the last step gave is in a
                checkpoint, unless save_strategy="no". An evaluation on the way is broken off, and resuming repeats it.
        """
        refuse(trial=trial, ignore_keys_for_eval=ignore_keys_for_eval)
        self._settle_task()
        if self._run.rollout is None:
            warn_of_changes(self, self._read_once)
        else:
            check_changes(self._run.task, self.make_task())
        if self._run.rollout is None and self.compute_metrics is not self._tried_metrics:
            self.parts.evaluator.try_metrics(self._metric_hooks())
            self._tried_metrics = self.compute_metrics
        return self.parts.training.train(resume_from_checkpoint)

    @property
    def data_collator(self) -> Any:
        """The collator as it was passed, or TRL's. Steps are laid out without it, and go by its pad_to_multiple_of."""
        return self._data_collator

    @data_collator.setter
    def data_collator(self, collator: Any) -> None:
        if "parts" not in vars(self):
            return  # before the constructor, as in TRL, which then overwrites it
        check_collator(collator, () if self._collator_class is None else (self._collator_class,))
        check_lengths(collator, self.args)
        self._data_collator, self._run.pad_to_multiple_of = collator, collator.pad_to_multiple_of

    def _settle_task(self) -> None:
        """Let the run's task be that of the arguments and attributes as they are now: they may have been changed since.

        Raises:
            TypeError: something was set on the trainer that nobody would call or read.
            ValueError: a value that the arguments do not take; or rows would have to be prepared or laid out anew.
        """
        check_set(vars(self).keys(), type(self), self._never_called, self._never_read)
        run = self._run
        if run.rollout is not None:
            return  # as in TRL, what decides it was read once
        task = self.make_task()
        if task == run.task:
            return
        check_kept(self)
        check_same_rows(run.task, task, in_train=run.progress.in_train, config=self.config_class.__name__)
        run.task = task
        self.parts.evaluator.compile_anew()

    def loss(
        self, params: dict, batch: Any, key: jax.Array | None, *, remat: bool | str = False
    ) -> tuple[jax.Array, dict[str, jax.Array]]:
        """The task's loss and sums of one pass through a batch; arguments as of `run.forward.Forward.loss`."""
        return self.parts.forward.loss(params, batch, key, remat=remat)

    def compute_loss(
        self,
        model: BoundModel,
        inputs: dict[str, jax.Array],
        return_outputs: bool = False,
        num_items_in_batch: Any = None,
    ) -> Any:
        """The mean loss of a batch. Scripts override it, in jax.numpy; it is compiled, gradient and all. One in torch
        is given tensors, and computes apart from the model.

        Args:
            model: called as `model(input_ids=..., attention_mask=...)`, gives `.logits`, `[rows, 1]` of a score head
                and `[rows, T, V]` of a language model's.
            inputs: `input_ids` and `attention_mask` `[X, T]`: each example's first text, then the second ones, and what
                else the task has.
            return_outputs: give `(loss, outputs)`.
            num_items_in_batch: the targets of the whole step, which a language model's loss is divided by; None in an
                evaluation and under a score head.
        """
        if self.compute_loss_func is None:
            loss, outputs = model.default_loss(self._run.task, inputs, num_items_in_batch)
        else:
            outputs = model(input_ids=inputs["input_ids"], attention_mask=inputs["attention_mask"])
            loss = self.compute_loss_func(outputs, inputs.get("labels"), num_items_in_batch=num_items_in_batch)
        return (loss, outputs) if return_outputs else loss

    def _save_progress(self, progress: Progress) -> None:
        self._progress = progress
        try:
            self._save_checkpoint(self.model, None)
        finally:
            self._progress = None

    def _save_checkpoint(self, model: Any, trial: Any) -> None:
        """Write the checkpoint of a step and, as TRL does, the model's card into `args.output_dir`, and push it.
        Scripts override it, with transformers' arguments, of which neither says more than the run has.

        Raises:
            RuntimeError: no step has asked for it.
        """
        del model, trial
        if self._progress is None:
            raise RuntimeError("_save_checkpoint is called by train(). To save the model at any time: save_model().")
        folder = self.parts.checkpointer.save(self._progress, background=not self._publisher.pushes_checkpoints)
        if is_first():
            self.create_model_card()
        self._publisher.push_saved(folder)

    def create_optimizer(self) -> Any:
        """Create the optimizer; `optimizers` of the constructor, if given, or what `args.optim` names.

        Overriding it: return any optax transformation; its updates are scaled as torch's LambdaLR would, by the
        schedule of the arguments as a share of its peak.
        """
        return default_optimizer(self._run, self.parts.training.choice)

    # ---- evaluation

    def evaluate(
        self, eval_dataset: Any = None, ignore_keys: list[str] | None = None, metric_key_prefix: str = "eval"
    ) -> dict[str, float]:
        """Loss and metrics over a dataset, raw or prepared; `eval_dataset` of the constructor if none is given.

        A dict of datasets is evaluated one by one, `<prefix>_<name>_...` each; a string picks one of the constructor's.
        """
        refuse(ignore_keys=ignore_keys)
        self._settle_task()
        dataset = self.eval_dataset if eval_dataset is None else eval_dataset
        if isinstance(dataset, dict):
            metrics = {}
            for name, part in dataset.items():
                part = part if eval_dataset is None else self.prepare_dataset(part, f"eval_dataset[{name!r}]")
                metrics |= self._evaluate_one(part, f"{metric_key_prefix}_{name}")
            return metrics
        if isinstance(dataset, str):
            return self._evaluate_one(dataset, metric_key_prefix)
        if dataset is None:
            raise ValueError("evaluate() needs an eval_dataset: pass one to it or to the trainer.")
        dataset = dataset if eval_dataset is None else self.prepare_dataset(dataset, "eval")
        return self._evaluate_one(dataset, metric_key_prefix)

    def _evaluate_one(self, dataset: Any, prefix: str) -> dict[str, float]:
        with together(), self._model_at_rest():
            metrics = self.parts.evaluator.evaluate(self.get_eval_dataloader(dataset), prefix, self._metric_hooks())
            self.log(metrics)
            if self.state.epoch is not None:
                metrics["epoch"] = self.state.epoch
            self._run.events.fire("on_evaluate", metrics)
        return metrics

    @contextlib.contextmanager
    def _model_at_rest(self) -> Iterator[None]:
        """`model.training` is False meanwhile, as scripts' methods that are called on the way may ask."""
        self._run.model.eval()
        try:
            yield
        finally:
            self._run.model.train(self._run.progress.in_train)

    def _metric_hooks(self) -> MetricHooks:
        return MetricHooks(self.compute_metrics, self.preprocess_logits_for_metrics)

    def predict(
        self, test_dataset: Any, ignore_keys: list[str] | None = None, metric_key_prefix: str = "test"
    ) -> PredictionOutput:
        """The task's predictions for every row of a dataset, raw or prepared; of those longer than max_length, too.

        Returns:
            `predictions`, batch by batch in the order of the task's outputs; `label_ids`, which are `()` unless the
            task has labels; `metrics` has the loss and the speed.
        """
        refuse(ignore_keys=ignore_keys)
        self._settle_task()
        prepared = self.prepare_dataset(test_dataset, "test", bounded=False)
        loader = self.get_test_dataloader(prepared)
        with together(), self._model_at_rest():
            return self.parts.evaluator.predict(loader, metric_key_prefix, self._metric_hooks())

    def prediction_step(
        self,
        model: BoundModel,
        inputs: dict[str, Any],
        prediction_loss_only: bool,
        ignore_keys: list[str] | None = None,
    ) -> tuple:
        """(loss, logits, labels) of one batch. Where a script overrides it, evaluation calls it every time.

        Logits are `[X, 1]` and labels None under a score head, `[rows, T, V]` and `[rows, T]` of a language model.
        """
        refuse(ignore_keys=ignore_keys)
        loss, outputs = self.compute_loss(model, inputs, return_outputs=True)
        return (loss, None, None) if prediction_loss_only else (loss, outputs["logits"], inputs.get("labels"))

    # ---- what the run holds

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
            f"A method of transformers.Trainer was called by name with a {type(self).__name__} of trl_jax. Call "
            "super()'s, or run the script with python -m trl_jax."
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
        return callbacks.metrics_format(metrics)

    def log_metrics(self, split: str, metrics: dict[str, Any]) -> None:
        """Print the metrics of "train", "eval" or "test" in columns, by name."""
        callbacks.log_metrics(split, metrics)

    def save_metrics(self, split: str, metrics: dict[str, Any], combined: bool = True) -> None:
        """Write `<split>_results.json` into `args.output_dir`, and add to all_results.json there where `combined`."""
        callbacks.save_metrics(Path(self.args.output_dir), split, metrics, combined)

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

    # ---- data

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

    # ---- files and the Hub

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
