"""BaseTrainer: the constructor, train, evaluate, predict, save and push."""

from __future__ import annotations

import abc
import contextlib
import os
from collections.abc import Callable, Iterator
from functools import partial
from pathlib import Path
from typing import Any, ClassVar, NamedTuple, NoReturn

import jax
from datasets import Dataset, IterableDataset
from transformers.trainer_callback import CallbackHandler, TrainerCallback, TrainerControl, TrainerState
from transformers.trainer_utils import PredictionOutput, TrainOutput

from trl_jax.config.base import BaseConfig
from trl_jax.core.files import write_whole
from trl_jax.core.text import api_boundary
from trl_jax.data.checks import check_type, materialize_images
from trl_jax.data.loader import ExampleLoader
from trl_jax.hub.parameters import counting_as_tensors
from trl_jax.hub.peft_config import as_adapter_config
from trl_jax.hub.pretrained import PreTrainedModel
from trl_jax.hub.torch_bridge import takes_tensors
from trl_jax.hub.torch_objects import check_originals, originals
from trl_jax.hub.torch_state import optimizer_class
from trl_jax.mesh.mesh import ShardingPlan
from trl_jax.mesh.processes import Accelerator, is_first, together
from trl_jax.tasks.policy import check_changes
from trl_jax.tasks.task import Task
from trl_jax.trainer.arguments import ArgumentValues, InitOnlyAttribute, check_same_rows, refuse
from trl_jax.trainer.collators import (
    VisionCollator,
    check_lengths,
    check_rows_of,
    is_older_collator,
    one_processor,
)
from trl_jax.trainer.overrides import (
    OF_TORCH,
    TrainerTraits,
    check_compute_loss,
    classes_of_script,
    loss_functions,
    names_of_script,
    warn_of_patched_trainer,
)
from trl_jax.training import callbacks as run_callbacks
from trl_jax.training import data, setup
from trl_jax.training import metrics as run_metrics
from trl_jax.training import model as model_loading
from trl_jax.training.checkpoint_files import STATE_FILE, LoopProgress, state_text
from trl_jax.training.data import Batches
from trl_jax.training.devices import enable_compilation_cache
from trl_jax.training.evaluate import MetricHooks, check_compute_metrics
from trl_jax.training.logging import tell_saved
from trl_jax.training.metrics import ScriptMetrics
from trl_jax.training.optimizer_choice import choose
from trl_jax.training.push import HubPublisher, pushes_checkpoints
from trl_jax.training.reference import ReferenceModel
from trl_jax.training.rollout import RolloutParts
from trl_jax.training.state import BATCH_METHODS, STEP_METHODS, Editable, Hooks, Progress, Setup
from trl_jax.training.step import decay_names, default_optimizer, optimizer_with_decay
from trl_jax.training.user_loss import UserStep, script_values
from trl_jax.training.user_loss_model import BoundModel, read_by_model


def _settable(name: str, doc: str, check: Callable[[Any], None] = lambda value: None) -> property:
    """A property that a script may set. It is backed by `Editable`, which all parts of the run read."""

    def read(self: BaseTrainer) -> Any:
        return getattr(self._editable, name)

    def write(self: BaseTrainer, value: Any) -> None:
        check(value)
        setattr(self._editable, name, value)

    return property(read, write, doc=doc)


def _check_model(value: Any) -> None:
    if not isinstance(value, PreTrainedModel):
        raise TypeError(
            f"trainer.model must be a model of trl_jax, got a {type(value).__name__}. Pass it as model= to a new "
            "trainer."
        )


class SuperCalls(NamedTuple):
    """What a method of `BaseTrainer` needs while a script's override of it runs, and may call `super()`. Each is None
    outside of this override.

    metrics: of `compute_loss`: the numbers to log of its batch.
    compute: of `training_step`: computes the loss of a batch.
    progress: of `_save_checkpoint`: where the loop is.
    """

    metrics: dict[str, list[Any]] | None = None
    compute: Callable[[Any], Any] | None = None
    progress: LoopProgress | None = None


class BaseTrainer(abc.ABC):
    """Trains a model on a task. A subclass defines the task (`make_task`) and the class of the arguments
    (`config_class`).

    A script's subclass may override `compute_loss`, `loss`, `training_step`, `evaluate`, `predict`, `prediction_step`,
    `log`, `save_model`, `_save_checkpoint`, `push_to_hub`, `init_hf_repo`, `create_model_card`, `create_optimizer`,
    `get_decay_parameter_names`, `_prepare_inputs`, `_get_train_sampler` and the dataloaders. Other methods that TRL's
    trainers call on themselves are refused, because trl_jax never calls them.

    Attributes:
        aux_loss_enabled, router_aux_loss_coef: whether a load-balancing loss is added, and its weight.
        compute_loss_func: the loss that was passed.
        parts: the components of the run: training loop, evaluator, checkpointer, forward pass.
    """

    _name: ClassVar[str]  # the default output directory is "<model>-<name>"
    _tag_names: ClassVar[list[str]]  # tags for the model card
    _paper: ClassVar[tuple[str, str] | None] = None  # title and arXiv number, for the model card
    config_class: ClassVar[type[BaseConfig]] = BaseConfig
    _traits: ClassVar[TrainerTraits] = TrainerTraits()
    _make_rollout: Callable[[Setup], RolloutParts] | None = None  # how online training makes its rows
    _check_images: Callable[[], None] | None = None  # checks the arguments if rows have images; None: images refused

    compute_loss_func = InitOnlyAttribute(
        lambda trainer: trainer._compute_loss_func, "Pass it to the constructor, or override compute_loss."
    )
    aux_loss_enabled = InitOnlyAttribute(
        lambda trainer: trainer._setup.router_aux_loss_coef != 0, "Set router_aux_loss_coef in the arguments."
    )
    router_aux_loss_coef = InitOnlyAttribute(
        lambda trainer: trainer._setup.router_aux_loss_coef, "Set router_aux_loss_coef in the arguments."
    )
    _total_train_tokens, _tp_size = 0, 1  # read by loss code that scripts copy from TRL

    # What may be read or set before the constructor has run.
    _compute_loss_func: Callable | None = None
    _data_collator: Any = None
    _script_optimizer: Any = None
    _signature_columns: list[str] | None = None
    _ordered: ExampleLoader | None = None  # the loader that a user-defined sampler orders
    _super_calls = SuperCalls()

    def __init_subclass__(cls, **kwargs: Any):
        super().__init_subclass__(**kwargs)
        cls._traits.refused.check_class(cls)

    @abc.abstractmethod
    def make_task(self) -> Task:
        """Create the task from the current `self.args`; called at construction and before each step and evaluation."""

    @api_boundary
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
    ):
        """Arguments in TRL's order; `args` is a `config_class`, created with output_dir "<model>-<name>" if None.

        Args:
            compute_loss_func: computes the loss from the model's outputs, the labels and the number of targets in the
                step.

        Raises:
            TypeError, ValueError: names the invalid argument, row or checkpoint.
        """
        # Again, after __init_subclass__: methods may have been assigned to a class of ours.
        self._traits.refused.check_class(type(self))
        warn_of_patched_trainer(type(self))

        # What was passed.
        collators = self._traits.collators
        if data_collator is not None:
            collators.check(data_collator)
        if isinstance(data_collator, VisionCollator):
            processing_class = one_processor(data_collator.processor, processing_class)
        args = self._config(args, model)
        enable_compilation_cache()  # before anything is compiled
        adapter = None if peft_config is None else as_adapter_config(peft_config)
        model, torch_model = model_loading.split_model(model)
        train_dataset, eval_dataset = self._read(train_dataset, eval_dataset)
        self._compute_loss_func, self._data_collator = compute_loss_func, data_collator

        # The task, and the methods that the script overrides. These may already read what is known of the run.
        hooks, self._progress = self._hooks(), Progress()
        self._argument_values = ArgumentValues(type(self), args)
        self._editable = Editable(args, pad_to_multiple_of=self._padding(args))
        self._editable.task = self.make_task()
        self._publisher = HubPublisher(self._tag_names, self._paper)
        args.join_processes()
        if args.push_to_hub:  # before the model is loaded, so that an unreachable Hub is reported within seconds
            self.init_hf_repo()
        if "compute_loss" in hooks.batch_methods:
            check_compute_loss(type(self), self._editable.task.head)
        check_compute_metrics(compute_metrics, args.batch_eval_metrics)
        self.compute_metrics, self.preprocess_logits_for_metrics = compute_metrics, preprocess_logits_for_metrics

        # The run: tokenizer, rows, model, mesh, reference.
        spec = self._spec()
        inputs = setup.Inputs(
            model, torch_model, processing_class, train_dataset, eval_dataset, adapter, quantization_config, callbacks
        )
        self._setup = setup.build(spec, hooks, self._editable, self._progress, inputs)
        if data_collator is not None:
            check_rows_of(data_collator, images=self._setup.encoder is not None)
        self.accelerator = Accelerator(args, self.end)  # starts JAX's backend, so only after rows are prepared
        if self.data_collator is None and collators.texts is not None:
            self._data_collator = collators.default(self.args, self.processing_class.pad_token_id)

        # Its parts, and the values that later changes are compared with.
        self.parts = setup.assemble(
            self._setup, spec, hooks, self._publisher,
            lambda: choose(self.args, optimizers, optimizer_cls_and_kwargs, torch_model), torch_model,
        )  # fmt: skip
        self._originals = originals(self._other_models(), torch_model)
        self._argument_values.constructed(self.args)
        self._tried_metrics: Callable | None = None  # the compute_metrics that was tried before training

    # What the constructor uses.

    def _read(self, train_dataset: Any, eval_dataset: Any) -> tuple[Any, Any]:
        """Check the type of the training rows, and read the images of datasets whose transform opens them."""
        if train_dataset is None:
            raise ValueError("`train_dataset` is required: pass a datasets.Dataset.")
        images, transforms = self._check_images is not None, self._traits.takes_transforms
        if images and not transforms:
            train_dataset = materialize_images(train_dataset, "train")
            eval_dataset = materialize_images(eval_dataset, "eval")
        check_type(train_dataset, "train", transforms=transforms, images=images)
        return train_dataset, eval_dataset

    def _other_models(self) -> dict[str, Any]:
        """The models among the arguments that are not trained, by the name of the argument."""
        return {}

    def _config(self, args: BaseConfig | None, model: Any) -> BaseConfig:
        """The arguments that were passed, or defaults with an output_dir named after the model."""
        if args is None:
            return self.config_class(f"{model_loading.short_name(model)}-{self._name}")
        if not isinstance(args, self.config_class):
            expected = self.config_class.__name__
            raise TypeError(f"args is a {type(args).__module__}.{type(args).__qualname__}; expected a {expected}.")
        return args

    def _padding(self, args: BaseConfig) -> int | str | None:
        """`pad_to_multiple_of`, from the collator that was passed unless it is called, or from the arguments."""
        return (args if self.data_collator is None or self._calls_collator else self.data_collator).pad_to_multiple_of

    def _spec(self) -> setup.TrainerSpec:
        """What this trainer contributes to its runs in addition to its task and hooks."""
        traits = self._traits
        return setup.TrainerSpec(
            make_reference=self._make_reference,
            make_rollout=self._make_rollout,
            balance_experts=self._balance_experts,
            check_images=self._check_images,
            may_get_images=self._may_get_images,
            tags=self._tag_names,
            tokenizer_sides=traits.tokenizer_sides,
            reader=traits.reader,
        )

    def _make_reference(self, args: BaseConfig, task: Task, policy: setup.Policy) -> ReferenceModel | None:
        """The reference model or teacher; None if the task has none."""
        return None

    def _balance_experts(self, model: PreTrainedModel, args: BaseConfig) -> float:
        """The weight of the load-balancing loss of a mixture of experts; 0.0 if it is never added."""
        return 0.0

    @property
    def _may_get_images(self) -> bool:
        """Whether images may come from tools although the rows have none."""
        return False

    def _hooks(self) -> Hooks:
        """The methods that a script may override, looked up when they are called."""
        overridden, user_step = names_of_script(type(self)), None
        if steps := overridden & STEP_METHODS:
            methods = [vars(cls)[name] for cls in classes_of_script(type(self)) for name in steps & vars(cls).keys()]
            tensors = any(map(takes_tensors, methods))
            user_step = UserStep(
                lambda: self._setup, self._user_step, lambda inputs: self._prepare_inputs(inputs), tensors
            )
        passed = frozenset() if self._compute_loss_func is None else {"compute_loss_func"}
        return Hooks(
            batch_methods=overridden & BATCH_METHODS | passed,
            compute_loss=self._user_loss,
            create_optimizer=self._user_optimizer,
            evaluate=lambda: self.evaluate(),
            get_train_dataloader=self._own_batches,
            log=lambda *args: self._log(*args),
            loss=lambda: self.loss if "loss" in overridden or "loss" in vars(self) else None,
            loss_functions=loss_functions(type(self), self._compute_loss_func),
            overridden=overridden,
            prediction_step=self._user_prediction,
            prepare_dataset=lambda *args: self.prepare_dataset(*args),
            save_checkpoint=self._save_progress,
            save_model=lambda *args, **options: self.save_model(*args, **options),
            script_values=lambda: script_values(self),
            set_by_script=lambda: vars(self).keys(),
            refresh_task=self._refresh_before_step,
            user_step=user_step,
        )

    @contextlib.contextmanager
    def _overriding(self, **needs: Any) -> Iterator[None]:
        """A context in which an override of a script's runs, with the fields of `SuperCalls` that `super()` needs."""
        before = self._super_calls
        self._super_calls = before._replace(**needs)
        try:
            yield
        finally:
            self._super_calls = before

    @contextlib.contextmanager
    def _as_one_process(self) -> Iterator[None]:
        """A context in which a script's method computes the loss of a batch of all devices, as a single process does.
        The step takes no mean over processes, for which losses of several processes multiply by their number."""
        world, self.accelerator.num_processes = self.accelerator.num_processes, 1
        try:
            yield
        finally:
            self.accelerator.num_processes = world

    def _user_loss(self, model: Any, *args: Any, **options: Any) -> Any:
        """Call the user-defined `compute_loss`; during the call, `self._metrics` collects the metrics of its batch."""
        with self._as_one_process(), self._overriding(metrics=model.metrics):
            return self.compute_loss(model, *args, **options)

    def _user_prediction(self, *args: Any) -> Any:
        with self._as_one_process():
            return self.prediction_step(*args)

    def _user_step(self, compute: Callable[[Any], Any], inputs: Any, num_items: Any, last: bool) -> Any:
        """Call the user-defined `training_step` on a micro-batch; `last` for the last one of a step."""
        self.accelerator.sync_gradients = last
        try:
            with self._overriding(compute=compute), self._setup.events.at_gradients():
                return self.training_step(self.model, inputs, num_items)
        finally:
            self.accelerator.sync_gradients = True

    def training_step(self, model: Any, inputs: dict[str, Any], num_items_in_batch: Any = None) -> Any:
        """The loss of a micro-batch, divided by the number of micro-batches in the step unless it is already divided by
        the step's tokens. A script may override it to read or change the batch before `super()`, and to change the
        logged loss after it. The gradient is not accessible.

        Raises:
            RuntimeError: it was called outside of train().
        """
        del model, num_items_in_batch
        if self._super_calls.compute is None:
            raise RuntimeError("training_step is called by train(), for trainers that override it.")
        return self._super_calls.compute(self._prepare_inputs(inputs))

    def _prepare_inputs(self, inputs: dict[str, Any]) -> dict[str, Any]:
        """Return the inputs unchanged. A script may override it to change a batch before its loss is computed."""
        return inputs

    @property
    def _metrics(self) -> dict[str, dict[str, list[Any]]]:
        """Numbers to log, by mode ("train" or "eval") and name; the next log has the mean of each list. Inside a
        user-defined loss, these are the numbers of the current batch. Elsewhere a script may append to its own names
        and replace any list."""
        if self._super_calls.metrics is not None:
            return dict.fromkeys(("train", "eval"), self._super_calls.metrics)
        return vars(self).setdefault("_script_metrics", {mode: ScriptMetrics() for mode in ("train", "eval")})

    # Training.

    @api_boundary
    def train(
        self,
        resume_from_checkpoint: str | bool | None = None,
        trial: Any = None,
        ignore_keys_for_eval: list[str] | None = None,
    ) -> TrainOutput:
        """Train to the end. Returns the number of steps, the mean loss and the metrics of the run.

        Args:
            resume_from_checkpoint: a checkpoint folder, or True for the newest complete one in `args.output_dir`.

        Raises:
            ValueError: there is no complete checkpoint to resume from, or it belongs to another model, optimizer or
                dataset.
            FloatingPointError: several consecutive steps were not finite.
            MemoryError: a step does not fit in memory; the message has a breakdown.
            SystemExit: after SIGTERM (143), SIGINT (130) or SIGHUP (129); the last step is in a checkpoint, unless
                save_strategy="no". A running evaluation is interrupted, and resuming repeats it.
        """
        refuse(trial=trial, ignore_keys_for_eval=ignore_keys_for_eval)
        self._follow_torch_models(trains=True)
        self._refresh_task()
        self._set_signature_columns_if_needed()
        if self._setup.online:
            check_changes(self._setup.task, self.make_task())
        self._argument_values.warn_of_changes(self.args)
        if not self._setup.online and self.compute_metrics is not self._tried_metrics:
            self.parts.evaluator.try_metrics(self._metric_hooks())
            self._tried_metrics = self.compute_metrics
        return self.parts.training.train(resume_from_checkpoint)

    def _follow_torch_models(self, *, trains: bool = False) -> None:
        """Apply or refuse changes that the script made to its torch models since their weights were copied."""
        if not self._setup.progress.in_train:
            check_originals(self._originals, trains=trains)
        self.parts.training.follow_torch_model(trains=trains)

    @property
    def _calls_collator(self) -> bool:
        """Whether data_collator is a script's own, and called."""
        return self._traits.collators.calls(self._data_collator)

    @property
    def data_collator(self) -> Any:
        """The collator that was passed, or TRL's. Only its `pad_to_multiple_of` affects the layout of steps."""
        return self._data_collator

    @data_collator.setter
    def data_collator(self, collator: Any) -> None:
        if "parts" not in vars(self):
            return  # set before super().__init__, which overwrites it, as in TRL
        if self._calls_collator and collator is self._data_collator:
            return
        if self._calls_collator or self._traits.collators.calls(collator):
            raise ValueError(
                "data_collator was set on the trainer, but a collate function is called when rows are prepared. Pass "
                "it to the constructor."
            )
        accepted = self._traits.collators.later
        accepted.check(collator)
        if not is_older_collator(collator, accepted.older):  # whose max_length is a padded length
            check_lengths(collator, self.args)
        self._data_collator, self._editable.pad_to_multiple_of = collator, collator.pad_to_multiple_of

    def _refresh_before_step(self) -> None:
        self._argument_values.check_set_alike()
        self._refresh_task()

    def _refresh_task(self) -> None:
        """Update the run's task from the current arguments and attributes.

        Raises:
            TypeError: a method or attribute was set on the trainer that is never called or read.
            ValueError: a value is invalid, or the rows would have to be prepared or laid out again.
        """
        self._traits.refused.check_instance(type(self), vars(self).keys())
        if self.model.active is not self.model:
            raise ValueError(
                "The trainer cannot train, evaluate or predict in `with model.disable_adapter():`. Evaluate the base "
                "model in a trainer of its own, without peft_config."
            )
        before = self._editable.task
        task = before.following(self.make_task) if self._setup.online else self.make_task()
        if task == before:
            return
        self._argument_values.check_mirrored(self)
        in_train = self._setup.progress.in_train
        check_same_rows(before, task, in_train=in_train, config=self.config_class.__name__)
        self._editable.task = task
        self.parts.evaluator.recompile()

    def loss(
        self, params: dict, batch: Any, key: jax.Array | None, *, remat: bool | str = False
    ) -> tuple[jax.Array, dict[str, jax.Array]]:
        """The task's loss and sums for one batch; arguments as for `training.forward.Forward.loss`."""
        return self.parts.forward.loss(params, batch, key, remat=remat)

    def compute_loss(
        self,
        model: BoundModel,
        inputs: dict[str, jax.Array],
        return_outputs: bool = False,
        num_items_in_batch: Any = None,
    ) -> Any:
        """The mean loss of a batch. An override in jax.numpy is compiled with its gradient; one in torch gets tensors
        and runs outside the compiled model.

        Args:
            model: `model(input_ids=..., attention_mask=...)` returns `.logits`, `[rows, 1]` from a score head and
                `[rows, T, V]` from a language model. It also takes `pixel_values`.
            inputs: `input_ids` and `attention_mask` `[X, T]`, the first texts of all examples followed by their second
                texts, and the task's other inputs; `pixel_values` `[P, C]`, the patches of all images, if any.
            return_outputs: return `(loss, outputs)`.
            num_items_in_batch: the number of targets in the whole step (in evaluation: in the batch), by which a
                language model's loss is divided. None for a score head, and for models whose loss transformers averages
                over micro-batches.
        """
        if self.compute_loss_func is None:
            loss, outputs = model.default_loss(self._setup.task, inputs, num_items_in_batch)
        else:
            outputs = model(**read_by_model(inputs))
            loss = self.compute_loss_func(outputs, inputs.get("labels"), num_items_in_batch=num_items_in_batch)
        return (loss, outputs) if return_outputs else loss

    def _save_progress(self, progress: LoopProgress) -> None:
        with self._overriding(progress=progress):
            self._save_checkpoint(self.model, None)

    def _get_output_dir(self, trial: Any) -> str:
        """`args.output_dir`. A `_save_checkpoint` of a script's own adds files to the checkpoints in it."""
        del trial
        return self.args.output_dir

    def _save_checkpoint(self, model: Any, trial: Any) -> None:
        """Write a checkpoint and, as TRL does, the model card to `args.output_dir`, and push it. Scripts may override
        it; the arguments are those of transformers and have no effect here.

        Raises:
            RuntimeError: it was called outside train().
        """
        del model, trial
        if self._super_calls.progress is None:
            raise RuntimeError("_save_checkpoint is called by train(). To save the model at any time: save_model().")
        background = not pushes_checkpoints(self.args)
        folder = self.parts.checkpointer.save(self._super_calls.progress, background=background)
        if is_first():
            self.create_model_card()
        self._publisher.push_saved(self.args, self._setup.events, folder)

    def create_optimizer(self) -> Any:
        """Create the optimizer: `optimizers` of the constructor, if given, else the one named by `args.optim`.

        An override may return any optax transformation; its updates are scaled by the schedule of the arguments,
        relative to its peak, as torch's LambdaLR does. Or it may return torch's AdamW, Adam or SGD over the parameters
        of `self.model`.
        """
        if self._script_optimizer is not None:
            return self._script_optimizer
        options = self.parts.training.choice, self.model.backend, self.args, self._setup.length.max_steps
        if "get_decay_parameter_names" not in self._setup.overridden:
            return default_optimizer(*options)
        return optimizer_with_decay(*options, self.model.params, self.get_decay_parameter_names(self.model))

    def _user_optimizer(self) -> Any:
        """Call `create_optimizer`, in which a script may make a torch optimizer for the model's parameters.

        Raises:
            TypeError: it is a torch optimizer of something else.
        """
        try:
            with counting_as_tensors():
                return self.create_optimizer()
        except TypeError as error:
            if "can only optimize Tensors" in str(error):
                raise TypeError(f"{type(self).__name__}.create_optimizer: {OF_TORCH}") from error
            raise

    @staticmethod
    def get_optimizer_cls_and_kwargs(args: BaseConfig, model: Any = None) -> tuple[type, dict[str, Any]]:
        """The torch class of `args.optim`, and its arguments, for a `create_optimizer` of a script's own that makes
        parameter groups. `model` has no effect.

        Raises:
            ImportError: torch is not installed.
        """
        del model
        return optimizer_class(args)

    def get_decay_parameter_names(self, model: PreTrainedModel) -> list[str]:
        """The names of the parameters with weight decay. A script may override it."""
        return decay_names(model.backend, model.params)

    # Evaluation.

    @api_boundary
    def evaluate(
        self, eval_dataset: Any = None, ignore_keys: list[str] | None = None, metric_key_prefix: str = "eval"
    ) -> dict[str, float]:
        """Loss and metrics over a dataset, raw or prepared; by default the constructor's `eval_dataset`.

        The datasets of a dict are evaluated one by one, with metrics `<prefix>_<name>_...`; a string selects one of the
        constructor's datasets.
        """
        refuse(ignore_keys=ignore_keys)
        self._refresh_task()
        dataset = self.eval_dataset if eval_dataset is None else eval_dataset
        if isinstance(dataset, dict):
            metrics = {}
            for name, part in dataset.items():
                part = name if eval_dataset is None else part
                metrics |= self.evaluate(
                    eval_dataset=part, ignore_keys=ignore_keys, metric_key_prefix=f"{metric_key_prefix}_{name}"
                )
            return metrics
        if isinstance(dataset, str):
            return self._evaluate_one(dataset, metric_key_prefix)
        if dataset is None:
            raise ValueError("evaluate() needs an eval_dataset: pass one to it or to the trainer.")
        dataset = dataset if eval_dataset is None else self.prepare_dataset(dataset, "eval")
        return self._evaluate_one(dataset, metric_key_prefix)

    def _evaluate_one(self, dataset: Any, prefix: str) -> dict[str, float]:
        self._follow_torch_models()
        self.model.eval()  # until the next step begins, as in TRL
        with together("evaluation"):
            batches = self.get_eval_dataloader(dataset)
            metrics, measured = self.parts.evaluator.evaluate(batches, prefix, self._metric_hooks())
            self._log(metrics, measured, before=f"{prefix}_")
            metrics |= {f"{prefix}_{name}": value for name, value in measured.items()}  # also with a script's own `log`
            if self.state.epoch is not None:
                metrics["epoch"] = self.state.epoch
            self._setup.events.fire("on_evaluate", metrics)
        return metrics

    def _metric_hooks(self) -> MetricHooks:
        return MetricHooks(self.compute_metrics, self.preprocess_logits_for_metrics)

    @api_boundary
    def predict(
        self, test_dataset: Any, ignore_keys: list[str] | None = None, metric_key_prefix: str = "test"
    ) -> PredictionOutput:
        """The task's predictions for every row of a dataset, raw or prepared, including rows longer than max_length.

        Returns:
            `predictions`, batch by batch in the order of the task's outputs; `label_ids`, `()` if the task has no
            labels; `metrics`, the loss and the throughput.
        """
        refuse(ignore_keys=ignore_keys)
        self._follow_torch_models()
        self._refresh_task()
        prepared = self.prepare_dataset(test_dataset, "test", bounded=False)
        loader = self.get_test_dataloader(prepared)
        self.model.eval()
        with together("prediction"):
            return self.parts.evaluator.predict(loader, metric_key_prefix, self._metric_hooks())

    def prediction_step(
        self,
        model: BoundModel,
        inputs: dict[str, Any],
        prediction_loss_only: bool,
        ignore_keys: list[str] | None = None,
    ) -> tuple:
        """`(loss, logits, labels)` of one batch. If a script overrides it, evaluation calls it for each batch.

        Logits are `[X, 1]` and labels None for a score head, `[rows, T, V]` and `[rows, T]` for a language model.
        """
        refuse(ignore_keys=ignore_keys)
        loss, outputs = self.compute_loss(model, inputs, return_outputs=True)
        return (loss, None, None) if prediction_loss_only else (loss, outputs["logits"], inputs.get("labels"))

    # Parts of the run.

    model = _settable("model", "The trained model.", _check_model)
    args = _settable("args", "The configuration.")
    processing_class = _settable("processing_class", "The tokenizer.")
    tokenizer = _settable("processing_class", "The former name of `processing_class`.")
    train_dataset = _settable("train_dataset", "The prepared training set.")
    eval_dataset = _settable("eval_dataset", "The prepared evaluation set, or a dict of them.")

    # Scripts read these before saving, which does not depend on them here.
    is_fsdp_enabled = is_deepspeed_enabled = False

    @property
    def is_in_train(self) -> bool:
        """Whether train() is running."""
        return self._setup.progress.in_train

    @is_in_train.setter
    def is_in_train(self, value: bool) -> None:
        self._setup.progress.in_train = value

    @property
    def _memory_tracker(self) -> NoReturn:
        """Raises TypeError if a script calls `transformers.Trainer.evaluate`, `predict` or `train` on this trainer:
        they read this attribute first."""
        raise TypeError(
            f"A method of transformers.Trainer was called by name with a {type(self).__name__} of trl_jax. Call "
            "super()'s, or run the script with python -m trl_jax."
        )

    @property
    def model_wrapped(self) -> PreTrainedModel:
        return self.model

    @property
    def state(self) -> TrainerState:
        return self._setup.events.state

    @property
    def control(self) -> TrainerControl:
        return self._setup.events.control

    @property
    def callback_handler(self) -> CallbackHandler:
        return self._setup.events.handler

    @property
    def sharding_plan(self) -> ShardingPlan | None:
        """How arrays are sharded over devices; None on a single device."""
        return self._setup.sharding_plan

    @property
    def train_batch_size(self) -> int:
        """Examples per micro-batch and device: from the arguments, or found by auto_find_batch_size."""
        return self._setup.train_batch_size

    @property
    def _train_batch_size(self) -> int:
        """`train_batch_size`, by the name that transformers' own dataloaders read."""
        return self.train_batch_size

    @property
    def optimizer(self) -> Any:
        """The optimizer of the last train(); before it, what a script has set, or None."""
        if "parts" in vars(self) and self.parts.training.optimizer is not None:
            return self.parts.training.optimizer
        return self._script_optimizer

    @optimizer.setter
    def optimizer(self, optimizer: Any) -> None:
        self._script_optimizer = optimizer

    @property
    def lr_scheduler(self) -> Any:
        """The schedule of the last train(); None before it."""
        return self._setup.progress.schedule

    @lr_scheduler.setter
    def lr_scheduler(self, schedule: Any) -> None:
        if schedule is not None:
            raise AttributeError(
                "lr_scheduler was set on the trainer, whose train() makes its own. Pass optimizers=(optimizer, "
                "scheduler) to the constructor, or set lr_scheduler_type and lr_scheduler_kwargs in the arguments."
            )

    def get_learning_rates(self) -> list[float]:
        """The learning rate of each parameter group of the optimizer.

        Raises:
            ValueError: there is no optimizer before train().
        """
        if self.optimizer is None:
            raise ValueError("There is no optimizer before train(), so there are no learning rates yet.")
        return [group["lr"] for group in self.optimizer.param_groups]

    def get_total_train_batch_size(self, args: Any) -> int:
        """Examples per optimizer step over all devices; `args` is ignored."""
        return self._setup.step_examples

    def num_examples(self, dataloader: Any) -> int:
        """Rows of a dataloader's dataset; without a dataset, the number of batches times the batch size.

        Raises:
            TypeError: the dataset is streamed and has no length.
        """
        try:
            return len(dataloader.dataset)
        except (AttributeError, TypeError):
            return len(dataloader) * self.args.per_device_train_batch_size

    def log(self, logs: dict[str, float], start_time: float | None = None) -> None:
        """Append `logs` with the epoch and step to `state.log_history`, and pass them to the callbacks. With
        `include_num_input_tokens_seen`, the throughput since `start_time` (of `time.time()`, in seconds) is added."""
        tokens_before, online = self._setup.progress.input_tokens_before, self._setup.online
        if "_script_metrics" in vars(self):
            mode, before = ("train", "") if self.model.training else ("eval", "eval_")
            logs |= self._script_metrics[mode].taken(logs, before)
        events = self._setup.events
        run_callbacks.log(self.args, events, logs, start_time, tokens_before=tokens_before, online=online)

    def _log(self, logs: dict[str, float], measured: dict[str, float], *args: Any, before: str = "") -> None:
        """Call `log` with `logs` and the task's metrics, prefixed with `before`. As in TRL, a user-defined `log` finds
        the latter in `self._metrics`, and `super().log` adds them."""
        if self._setup.online or not ("log" in names_of_script(type(self)) or "log" in vars(self)):
            logs |= {f"{before}{name}": value for name, value in measured.items()}
            self.log(logs, *args)
            return
        script_metrics = self._metrics["train" if self.model.training else "eval"]
        script_metrics.hold(measured, before)
        try:
            self.log(logs, *args)
        finally:
            script_metrics.release()

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
        """The number of trainable parameters."""
        return self.model.num_parameters(only_trainable=True)

    def metrics_format(self, metrics: dict[str, Any]) -> dict[str, Any]:
        """Format times as h:mm:ss, bytes as MB, FLOPs as GF, and other numbers with four digits."""
        return run_metrics.metrics_format(metrics)

    def log_metrics(self, split: str, metrics: dict[str, Any]) -> None:
        """Print the metrics of a split ("train", "eval" or "test") as a table sorted by name."""
        run_metrics.log_metrics(split, metrics)

    def save_metrics(self, split: str, metrics: dict[str, Any], combined: bool = True) -> None:
        """Write `<split>_results.json` to `args.output_dir`, and update all_results.json there if `combined`."""
        run_metrics.save_metrics(Path(self.args.output_dir), split, metrics, combined)

    def save_state(self) -> None:
        """Write trainer_state.json to `args.output_dir`."""
        write_whole(Path(self.args.output_dir) / STATE_FILE, state_text(self.state))

    def end(self) -> None:
        """Finish the runs of the experiment trackers."""
        run_callbacks.finish_trackers(self.callback_handler)

    def hyperparameter_search(self, *args: Any, **kwargs: Any) -> NoReturn:
        """Not supported: it creates models with `model_init`, which TRL's trainers do not take."""
        raise TypeError(
            "hyperparameter_search is not in this release of trl_jax. Make a trainer for each "
            "configuration and call train()."
        )

    # Data.

    def prepare_dataset(self, dataset: Any, name: str, *, bounded: bool = True) -> Dataset | IterableDataset:
        """Prepare rows for the loader; if `bounded`, rows longer than max_length are dropped. Rows that are already
        prepared are returned unchanged."""
        tokenization, task = self._editable.tokenization, self._editable.task
        if "_prepare_dataset" in names_of_script(type(self)) and tokenization.encoder is None:
            task, dataset = self._prepared_by_script(task, dataset, name)
        printed = self._progress.printed
        return data.prepare(task, self.args, tokenization, dataset, name, printed=printed, bounded=bounded)

    def _prepared_by_script(self, task: Task, dataset: Any, name: str) -> tuple[Task, Any]:
        """The rows that a user-defined `_prepare_dataset` returns, and the task that takes them."""
        return task, self._prepare_dataset(dataset, self.processing_class, self.args, name)

    def _prepare_dataset(self, dataset: Any, processing_class: Any, args: Any, dataset_name: str) -> Any:
        """The tokenized rows, with TRL's columns. A script may override it and return its own rows."""
        task, tokenization = self._editable.task, self._editable.tokenization._replace(tokenizer=processing_class)
        return data.prepare(task, args, tokenization, dataset, dataset_name, printed=self._progress.printed)

    def _set_signature_columns_if_needed(self) -> None:
        """Set `_signature_columns` to the columns of prepared rows that training reads. A script may override it and
        add others: the rows keep these but, as with TRL's own collators, batches do not have them."""
        if self._signature_columns is None:
            self._signature_columns = list(self._setup.task.columns.all)

    def loader(self, dataset: Dataset | IterableDataset, *, training: bool) -> ExampleLoader:
        """Step batches over a prepared dataset."""
        make = data.training_loader if training else data.evaluation_loader
        loader = make(self._setup, dataset)
        if training and "_get_train_sampler" in self._setup.overridden and isinstance(dataset, Dataset):
            self._ordered = loader
            sampler = self._get_train_sampler(dataset)
            return loader.in_order(data.SampledOrder(sampler, loader, f"{type(self).__name__}._get_train_sampler"))
        return loader

    def _get_train_sampler(self, train_dataset: Dataset | None = None) -> Any:
        """The row indices in the order that the arguments define. A script may override it with its own sampler."""
        del train_dataset
        if self._ordered is None:
            raise RuntimeError("_get_train_sampler is called by train(), for trainers that override it.")
        return data.RowOrder(self._ordered)

    def _own_batches(self) -> Any:
        """The result of `get_train_dataloader`; an override may also return a torch DataLoader."""
        batches, method = partial(self.batches, training=True), f"{type(self).__name__}.get_train_dataloader"
        loader, prepared = self.get_train_dataloader(), self.accelerator.has_prepared
        return data.in_order_of(loader, batches, self.args, self.data_collator, method, prepared)

    def batches(self, dataset: Dataset | IterableDataset, *, training: bool) -> Batches:
        """A dataloader over a prepared dataset, which an overridden get_train_dataloader may return."""
        return Batches(self.loader(dataset, training=training), self._setup.task)

    def get_train_dataloader(self) -> Any:
        """Batches of the training set as dicts; `set_epoch` chooses the order."""
        return self.batches(self.train_dataset, training=True)

    def get_eval_dataloader(self, eval_dataset: Any = None) -> Any:
        """Batches of a prepared evaluation set, in its order; a string selects one of the constructor's."""
        if isinstance(eval_dataset, str):
            eval_sets = self.eval_dataset if isinstance(self.eval_dataset, dict) else {}
            if eval_dataset not in eval_sets:
                sets = f"has {', '.join(eval_sets)}" if eval_sets else "is not a dict"
                raise ValueError(f"There is no evaluation set {eval_dataset!r}: the trainer's eval_dataset {sets}.")
            eval_dataset = eval_sets[eval_dataset]
        return self.batches(self.eval_dataset if eval_dataset is None else eval_dataset, training=False)

    def get_test_dataloader(self, test_dataset: Any) -> Any:
        """Batches of a prepared dataset, in its order."""
        return self.batches(test_dataset, training=False)

    # Files and the Hub.

    @api_boundary
    def save_model(self, output_dir: str | None = None, _internal_call: bool = False) -> None:
        """Write a folder that transformers can load: config, weights, tokenizer, and training_args.json."""
        folder = Path(self.args.output_dir if output_dir is None else output_dir)
        self.parts.training.follow_torch_model()
        with together("saving the model"):
            self.parts.checkpointer.write_model(folder, self.model)
        if not _internal_call:
            tell_saved(folder, self._setup.task.head, causal=self.model.backend.traits.causal)
        if self.args.push_to_hub and not _internal_call:
            self.push_to_hub(commit_message="Model save", revision=self.args.hub_revision)

    @property
    def hub_model_id(self) -> str | None:
        """The repository's full name; None until it is opened."""
        return self._publisher.repo_id

    def init_hf_repo(self, token: str | None = None, private: bool | None = None) -> None:
        """Create the repository `args.hub_model_id` (named after output_dir if None) unless it exists.

        Raises:
            TypeError, ValueError: the token is malformed.
            PermissionError, ConnectionError: it could not be created. With `hub_strategy="end"`, an unreachable Hub
                only causes a warning, because it is not needed yet.
        """
        self._publisher.open(self.args, token, private)

    @api_boundary
    def push_to_hub(
        self,
        commit_message: str | None = "End of training",
        blocking: bool = True,
        token: str | None = None,
        revision: str | None = None,
        private: bool | None = None,
        **kwargs: Any,
    ) -> Any:
        """Save the model and its card to `args.output_dir`, and upload that folder without its checkpoints.

        Args:
            kwargs: for `create_model_card`: model_name, dataset_name, tags and further metadata.

        Returns:
            The commit, or a Future of it if `blocking` is False. Call its `result()` before the script ends: as in
            transformers, an upload does not continue while Python exits.

        Raises:
            PermissionError, ConnectionError: all attempts failed. The files are still in the folder.
        """
        self._setup.events.fire("on_push_begin")
        if not is_first():  # only the first process talks to the Hub
            self.save_model(_internal_call=True)
            return None
        if not self._publisher.opened or token is not None:
            self.init_hf_repo(token=token, private=private)
        self.save_model(_internal_call=True)
        self.create_model_card(**kwargs)
        folder, message = Path(self.args.output_dir), commit_message or "End of training"
        return self._publisher.push(folder, message, blocking=blocking, revision=revision)

    def create_model_card(
        self,
        model_name: str | None = None,
        dataset_name: str | list[str] | None = None,
        tags: str | list[str] | None = None,
        **metadata: Any,
    ) -> None:
        """Write README.md to `args.output_dir`, unless it has one that trl_jax did not write."""
        named = {"model_name": model_name, "dataset_name": dataset_name, "tags": tags, "metadata": metadata}
        self._publisher.write_card(self.args, self.model, self._setup.task.head, self.state.log_history, **named)
