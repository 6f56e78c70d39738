"""The base of every trainer: TRL's surface around the parts of a run."""

from __future__ import annotations

import abc
import os
from collections.abc import Callable, Mapping
from typing import Any, ClassVar

import jax
from datasets import Dataset, IterableDataset
from transformers.trainer_callback import TrainerCallback
from transformers.trainer_utils import TrainOutput

from trl_jax.core.called_by_name import answer_if_loaded
from trl_jax.data.rows.checks import check_type
from trl_jax.engine.checkpoints.progress import Progress
from trl_jax.engine.devices.compilation import keep_compilations
from trl_jax.engine.devices.processes import is_first
from trl_jax.hub.peft.configs import as_adapter_config
from trl_jax.hub.pretrained import PreTrainedModel
from trl_jax.run.arguments.base_config import BaseConfig
from trl_jax.run.arguments.optimizer_choice import choose
from trl_jax.run.evaluation.predictions import check_compute_metrics
from trl_jax.run.model import loading as model_loading
from trl_jax.run.rollouts.parts import RolloutParts
from trl_jax.run.state import RunState
from trl_jax.run.step.train_step import default_optimizer
from trl_jax.run.user_loss.bound_model import BoundModel
from trl_jax.tasks.rollout import check_changes
from trl_jax.tasks.task import Task
from trl_jax.trainer.shared.evaluating import Evaluating
from trl_jax.trainer.shared.kept_arguments import Settled, check_kept, check_same_rows, warn_of_changes
from trl_jax.trainer.shared.refusals import check_collator, check_lengths, check_overridden, check_set, refuse
from trl_jax.trainer.shared.setup import Setup


class BaseTrainer(Setup, Evaluating):
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
    _collator_class: ClassVar[type | None] = None  # whose pad_to_multiple_of is taken; others are refused
    _older_collators: ClassVar[tuple[type, ...]] = ()  # of early TRL, that are taken, too
    _tokenizer_sides: ClassVar[Mapping[str, str] | None] = None  # on which one loaded with the model pads and cuts
    _old_arguments: ClassVar[Mapping[str, str]] = {}  # of earlier forms of the constructor: what to write today
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

    def __init_subclass__(cls, **kwargs: Any):
        super().__init_subclass__(**kwargs)
        check_overridden(cls, {**cls._never_called, **cls._once_called})
        answer_if_loaded()

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
        reference: Callable[[RunState], None] | None = None,
        rollout: Callable[[RunState], RolloutParts] | None = None,
    ):
        """Arguments in TRL's order; `args` is a `config_class`, made with "<model>-<name>" as output_dir if None.

        Args:
            compute_loss_func: the loss, of the model's outputs, the labels and the number of targets of the step.
            reference: attaches a reference to the run, once the model is there (`run.construction.attach_reference`).
            rollout: how the run makes its rows itself; None where they are the dataset's.

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
        check_type(train_dataset, "train")
        self._compute_loss_func, self._data_collator = compute_loss_func, data_collator
        self._begin(args, own_loss=compute_loss_func is not None)
        quantization = model_loading.quantization_of(quantization_config, args)
        if torch_model is None:
            checkpoint = model_loading.find(model, args, self._run.task.head)
        else:
            checkpoint = model_loading.from_torch(torch_model, args, self._run.task.head)
        new_tokens = self._settle_data(checkpoint, torch_model, adapter, processing_class, train_dataset, eval_dataset)
        self._load_policy(checkpoint, torch_model, adapter, quantization, new_tokens)
        check_compute_metrics(compute_metrics, args.batch_eval_metrics)
        self.compute_metrics, self.preprocess_logits_for_metrics = compute_metrics, preprocess_logits_for_metrics
        self._assemble(
            callbacks, lambda: choose(self.args, optimizers, optimizer_cls_and_kwargs), torch_model, reference, rollout
        )

    # ---- training ----------------------------------------------------------------------------------------------

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
