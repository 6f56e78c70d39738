"""The base of every trainer: TRL's surface around the parts of a run."""

from __future__ import annotations

import abc
import dataclasses
import os
from collections.abc import Callable, Mapping
from functools import partial
from typing import Any, ClassVar

import jax
from datasets import Dataset, IterableDataset
from transformers.trainer_callback import TrainerCallback
from transformers.trainer_utils import PredictionOutput, TrainOutput

from trl_jax.data.rows.checks import check_type
from trl_jax.engine.checkpoints.progress import Progress
from trl_jax.engine.devices.compilation import keep_compilations
from trl_jax.engine.devices.processes import is_first
from trl_jax.hub.peft.lora_config import as_lora_config
from trl_jax.hub.peft.trained_tokens import with_new_tokens
from trl_jax.hub.pretrained import PreTrainedModel
from trl_jax.hub.torch.objects import resize
from trl_jax.run import construction, layout_choice
from trl_jax.run.accelerator import Accelerator
from trl_jax.run.arguments.base_config import BaseConfig
from trl_jax.run.arguments.optimizer_choice import choose
from trl_jax.run.callbacks import begin_state, events_of
from trl_jax.run.devices import check_offloading
from trl_jax.run.evaluation.evaluation import MetricHooks
from trl_jax.run.evaluation.predictions import check_compute_metrics
from trl_jax.run.hooks import TrainerHooks
from trl_jax.run.model import loading as model_loading
from trl_jax.run.output.hub_push import HubPublisher
from trl_jax.run.parts import assemble
from trl_jax.run.rollouts import RolloutParts
from trl_jax.run.state import RunState
from trl_jax.run.step.rng import check_noise
from trl_jax.run.step.train_step import default_optimizer
from trl_jax.run.user_loss.bound_model import BoundModel, script_values
from trl_jax.tasks.task import Task
from trl_jax.trainer.refusals import NEVER_CALLED, check_collator, check_overridden, check_set, names_of_script, refuse
from trl_jax.trainer.surface import Surface


class BaseTrainer(Surface):
    """Trains a model as a task explains it; a subclass says which task (`make_task`) and which arguments
    (`config_class`).

    A script's subclass may override `compute_loss`, `loss`, `evaluate`, `predict`, `prediction_step`, `log`,
    `save_model`, `_save_checkpoint`, `push_to_hub`, `init_hf_repo`, `create_model_card`, `create_optimizer` and the
    dataloaders. Other methods that TRL's trainers call on themselves are refused: nobody would call them here.

    Attributes:
        compute_metrics, preprocess_logits_for_metrics: as they were passed; a script may set others.
        data_collator: as it was passed, or TRL's. Steps are laid out without it.
        parts: what the run is made of.
    """

    _name: ClassVar[str]  # as in the output directory that is used where none is given, "<model>-<name>"
    _tag_names: ClassVar[list[str]]  # of the model's card
    _paper: ClassVar[tuple[str, str] | None] = None  # title and arXiv number of the method's, for the card
    config_class: ClassVar[type[BaseConfig]] = BaseConfig
    _collator_class: ClassVar[type | None] = None  # whose pad_to_multiple_of is taken; others are refused
    _older_collators: ClassVar[tuple[type, ...]] = ()  # of early TRL, that are taken, too
    _never_called: ClassVar[Mapping[str, str]] = NEVER_CALLED  # methods of TRL's that a script may not override
    data_collator: Any = None
    _tried_metrics: Callable | None = None  # the compute_metrics that was tried before training
    _progress: Progress | None = None  # what the checkpoint that is being saved has

    def __init_subclass__(cls, **kwargs: Any):
        super().__init_subclass__(**kwargs)
        check_overridden(cls, cls._never_called)

    @abc.abstractmethod
    def make_task(self) -> Task:
        """The task, by `self.args` as they are now; asked for at construction and at each train()."""

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
        adapter = None if peft_config is None else as_lora_config(peft_config)
        model, torch_model = model_loading.split_model(model)
        if train_dataset is None:
            raise ValueError("`train_dataset` is required: pass a datasets.Dataset.")
        check_type(train_dataset, "train")
        self.compute_loss_func = compute_loss_func
        overridden = names_of_script(type(self)) | ({"compute_loss"} if compute_loss_func is not None else set())
        self._run = run = RunState(args, None, overridden=overridden)
        self.data_collator = data_collator
        run.task = self.make_task()
        run.pad_to_multiple_of = (args if data_collator is None else data_collator).pad_to_multiple_of
        self._publisher = HubPublisher(run, self._tag_names, self._paper)
        args.join_processes()  # before anything else
        if args.push_to_hub:  # first of all: a Hub that does not answer costs seconds, not a model's loading
            self.init_hf_repo()
        quantization = model_loading.quantization_of(quantization_config, args)
        if torch_model is None:
            checkpoint = model_loading.find(model, args, run.task.head)
        else:
            checkpoint = model_loading.from_torch(torch_model, args, run.task.head)
        new_tokens = self._settle_data(checkpoint, torch_model, processing_class, train_dataset, eval_dataset)
        args.check()  # again: setters and plain assignment get past the check at construction
        construction.check_strategies(args, run.eval_dataset)
        if torch_model is not None and checkpoint.can_resize:
            resize(torch_model, run.vocab_size)
        if adapter is not None and new_tokens:
            adapter = with_new_tokens(adapter, new_tokens, run.task.head)
        run.model = model_loading.load_policy(checkpoint, args, adapter, quantization, run.vocab_size)
        if data_collator is None:
            self.data_collator = self._collator()
        construction.settle_model(run, [*self._tag_names, "trl_jax"], torch_model)
        check_compute_metrics(compute_metrics, args.batch_eval_metrics)
        self.compute_metrics, self.preprocess_logits_for_metrics = compute_metrics, preprocess_logits_for_metrics
        self.accelerator = Accelerator(args, self.end)
        construction.divide(run)
        if reference is not None:
            reference(run)
        run.events = events_of(run, callbacks)
        begin_state(run)
        chosen = partial(choose, args, optimizers, optimizer_cls_and_kwargs)
        own_rows = None if rollout is None else rollout(run)
        self.parts = assemble(run, self._hooks(), self._publisher, chosen, torch_model, own_rows)
        run.events.fire("on_init_end")
        check_noise(args, run.model.backend)
        layout_choice.check_layout(args, run.model.backend)
        check_offloading(args, run.model.backend)

    def _config(self, args: BaseConfig | None, model: Any) -> BaseConfig:
        """The arguments that were passed, or those of a run that is called after its model."""
        if args is None:
            return self.config_class(f"{model_loading.short_name(model)}-{self._name}")
        if not isinstance(args, self.config_class):
            wanted = self.config_class.__name__
            raise TypeError(f"args is a {type(args).__module__}.{type(args).__qualname__}: wanted a {wanted}.")
        return args

    def _collator(self) -> Any:
        """TRL's collator of these arguments, for scripts that call it; None where the task has none."""
        if self._collator_class is None:
            return None
        wanted = {field.name for field in dataclasses.fields(self._collator_class)}
        known = {name: value for name, value in vars(self.args).items() if name in wanted}
        if known["pad_to_multiple_of"] == "auto":
            known["pad_to_multiple_of"] = None
        return self._collator_class(pad_token_id=self.processing_class.pad_token_id, **known)

    def _settle_data(
        self, checkpoint: Any, torch_model: Any, tokenizer: Any, train: Any, evaluation: Any
    ) -> list[int]:
        """Settle the tokenizer and prepare rows, before weights are read: a bad row is named first, and num_proc forks
        before JAX has threads.

        Returns:
            The ids of tokens that the chat template brought.
        """
        run, args = self._run, self.args
        run.processing_class = construction.tokenizer_of(tokenizer, checkpoint, torch_model, args)
        run.vocab_size, new_tokens = construction.settle_tokens(
            args, run.processing_class, checkpoint.vocab_size, can_resize=checkpoint.can_resize, head=run.task.head
        )
        run.max_positions = checkpoint.max_positions
        run.train_dataset = self.prepare_dataset(train, "train")
        run.eval_dataset = self._prepared_for_evaluation(evaluation)
        return new_tokens

    def _hooks(self) -> TrainerHooks:
        """Methods as they are when they are called: a script may set others on the trainer at any time."""
        return TrainerHooks(
            compute_loss=lambda *given, **options: self.compute_loss(*given, **options),
            create_optimizer=lambda: self.create_optimizer(),
            evaluate=lambda: self.evaluate(),
            get_train_dataloader=lambda: self.get_train_dataloader(),
            log=lambda logs: self.log(logs),
            loss=lambda *given, **options: self.loss(*given, **options),
            prediction_step=lambda *given: self.prediction_step(*given),
            save_checkpoint=self._save_progress,
            save_model=lambda *given, **options: self.save_model(*given, **options),
            script_values=lambda: script_values(self),
            set_by_script=lambda: vars(self).keys(),
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
        check_set(vars(self).keys(), type(self), self._never_called)
        self._run.task = self.make_task()  # arguments may have been changed since
        if self._run.rollout is None and self.compute_metrics is not self._tried_metrics:
            self.parts.evaluator.try_metrics(self._metric_hooks())
            self._tried_metrics = self.compute_metrics
        return self.parts.training.train(resume_from_checkpoint)

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

    # ---- evaluation --------------------------------------------------------------------------------------------

    def evaluate(
        self, eval_dataset: Any = None, ignore_keys: list[str] | None = None, metric_key_prefix: str = "eval"
    ) -> dict[str, float]:
        """Loss and metrics over a dataset, raw or prepared; `eval_dataset` of the constructor if none is given.

        A dict of datasets is evaluated one by one, `<prefix>_<name>_...` each; a string picks one of the constructor's.
        """
        refuse(ignore_keys=ignore_keys)
        check_set(vars(self).keys(), type(self), self._never_called)
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
        metrics = self.parts.evaluator.evaluate(self.get_eval_dataloader(dataset), prefix, self._metric_hooks())
        self.log(metrics)
        if self.state.epoch is not None:
            metrics["epoch"] = self.state.epoch
        self._run.events.fire("on_evaluate", metrics)
        return metrics

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
        check_set(vars(self).keys(), type(self), self._never_called)
        prepared = self.prepare_dataset(test_dataset, "test", bounded=False)
        return self.parts.evaluator.predict(self.get_test_dataloader(prepared), metric_key_prefix, self._metric_hooks())

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
