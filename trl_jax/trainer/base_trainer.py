"""What every trainer shares: one run from arguments to a saved folder."""

from __future__ import annotations

import contextlib
import time
from collections.abc import Callable
from functools import partial
from pathlib import Path
from typing import Any, NoReturn

import jax
import jax.numpy as jnp
import numpy as np
from datasets import Dataset, IterableDataset
from transformers.trainer_callback import TrainerCallback
from transformers.trainer_utils import SaveStrategy, TrainOutput, speed_metrics

from trl_jax.core.arguments.values import as_choice
from trl_jax.engine.async_saver import host_copy
from trl_jax.engine.checkpoint import forget_all_but_best, sweep
from trl_jax.engine.interrupts import Interrupts
from trl_jax.engine.lock import only_run
from trl_jax.engine.loop import Loop
from trl_jax.engine.nonfinite_guard import PATIENCE, NonFiniteGuard
from trl_jax.engine.optimizers import Optimizer
from trl_jax.engine.prefetch import Prefetched
from trl_jax.engine.processes import barrier, check_alike, is_first, naming_lost_processes, several
from trl_jax.engine.progress import Progress
from trl_jax.engine.resume import find
from trl_jax.hub.pretrained import PreTrainedModel
from trl_jax.hub.torch.objects import give_back
from trl_jax.run.base_config import BaseConfig
from trl_jax.run.dataloaders import steps_of
from trl_jax.run.evaluation import refuse
from trl_jax.run.hub_push import sweep_stages
from trl_jax.run.memory_metrics import memory
from trl_jax.run.nan_report import explain
from trl_jax.run.oom import evaluation_told_of_memory, retried, told_of_memory
from trl_jax.run.optimizer_choice import LearningRate, choose
from trl_jax.run.precompile import compiling_ahead
from trl_jax.run.train_step import Stepping

# Methods of transformers' Trainer, and TRL's, that nobody would call here -> what a script does instead.
_OWN_LOSS = "The step is one compiled function: override compute_loss(self, model, inputs, return_outputs=False)."
_OWN_DATA = "Override get_train_dataloader or get_eval_dataloader, or order the rows and say train_sampling_strategy."
_OWN_RATES = "Override create_optimizer, or pass optimizers=(an optax transformation, a schedule)."
_OWN_CALLBACK = "Override evaluate, predict, save_model or log, or write a TrainerCallback."
_NEVER_CALLED = {
    name: instead
    for names, instead in (
        ("training_step autocast_smart_context_manager compute_loss_context_manager _wrap_model _clip_grad_norm "
         "_get_grad_norm _get_num_items_in_batch get_batch_samples _run_epoch _inner_training_loop "
         "_prepare_for_training call_model_init", _OWN_LOSS),
        ("_get_train_sampler _get_eval_sampler _get_dataloader _get_collator_with_removed_columns _prepare_dataset "
         "_prepare_input _prepare_inputs _remove_unused_columns _set_signature_columns_if_needed", _OWN_DATA),
        ("create_optimizer_and_scheduler create_scheduler get_decay_parameter_names get_optimizer_cls_and_kwargs "
         "_get_learning_rate", _OWN_RATES),
        ("evaluation_loop _evaluate _maybe_log_save_evaluate _determine_best_metric _load_best_model _save "
         "_load_from_checkpoint _save_optimizer_and_scheduler _load_optimizer_and_scheduler _save_rng_state "
         "_load_rng_state _load_callback_state _push_from_checkpoint floating_point_ops store_flos "
         "_finalize_training _init_training_state", _OWN_CALLBACK),
    )
    for name in names.split()
}  # fmt: skip


class BaseTrainer(Stepping):
    """Trains `model` on prepared datasets; a subclass explains the Task.

    A script's subclass may override `compute_loss`, `loss`, `evaluate`, `predict`, `prediction_step`, `log`,
    `save_model`, `create_optimizer` and the dataloaders. Methods of transformers' Trainer that have no counterpart here
    are refused: nobody would call them.
    """

    def __init_subclass__(cls, **kwargs: Any):
        super().__init_subclass__(**kwargs)
        own = [kind for kind in cls.__mro__ if kind.__module__.partition(".")[0] != "trl_jax"]
        if unheard := sorted({name for kind in own for name in vars(kind)} & _NEVER_CALLED.keys()):
            raise TypeError(
                f"{cls.__name__} overrides {', '.join(unheard)}, which trl_jax never calls. "
                + " ".join(dict.fromkeys(_NEVER_CALLED[name] for name in unheard))
            )

    def __init__(
        self,
        model: PreTrainedModel,
        args: BaseConfig,
        train_dataset: Dataset | IterableDataset,
        eval_dataset: Any,
        processing_class: Any,
        compute_metrics: Any = None,
        callbacks: list[TrainerCallback] | None = None,
        preprocess_logits_for_metrics: Any = None,
        optimizers: Any = (None, None),
        optimizer_cls_and_kwargs: Any = None,
        brought: Any = None,
    ):
        args.check()  # again: setters and plain assignment get past the check at construction
        check_strategies(args, eval_dataset)
        self._brought = brought  # the torch model that was passed; it gets the trained weights
        self._choose = partial(choose, args, optimizers, optimizer_cls_and_kwargs)
        self._chosen = self._choose()
        self.optimizer: Optimizer | None = None  # from the beginning of train()
        super().__init__(
            model,
            args,
            train_dataset,
            eval_dataset,
            processing_class,
            callbacks,
            compute_metrics=compute_metrics,
            preprocess_logits_for_metrics=preprocess_logits_for_metrics,
        )
        self._plan()  # refuses a run without an end now rather than at train()
        if several():
            check_alike(self._digests())
        self._events.fire("on_init_end")

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
            SystemExit: SIGTERM (143) or SIGINT (130) asked for it; what the step gave is in a checkpoint.
        """
        refuse(trial=trial, ignore_keys_for_eval=ignore_keys_for_eval)
        saves, interrupts = self.args.save_strategy != SaveStrategy.NO, Interrupts()
        promise = "saving a checkpoint and leaving" if saves else "leaving without a checkpoint (save_strategy='no')"
        with self._on_device(), contextlib.ExitStack() as held:
            if saves and is_first():
                held.enter_context(only_run(self.args.output_dir))
                sweep(Path(self.args.output_dir))
                sweep_stages(self.args.output_dir)
            barrier("train")  # until the first process has swept
            held.enter_context(interrupts.heeded(promise))
            run = partial(self._train, as_choice(resume_from_checkpoint), interrupts)
            return self._train_what_fits(run) if self.args.auto_find_batch_size else run()

    def _train_what_fits(self, run: Callable[[], TrainOutput]) -> TrainOutput:
        """Each try begins where this one did: a step takes the arrays it is given."""
        held, seen = host_copy((self.model.params, self._optimizer_state)), self._tokens_seen

        def again(size: int) -> None:
            self._found_batch_size, self._tokens_seen = size, seen
            params, state = held
            if self.sharding_plan is None:
                self.model.params, self._optimizer_state = jax.tree.map(jnp.array, held)
            else:
                self.model.params = self.sharding_plan.placed(params)
                self._optimizer_state = None if state is None else self.sharding_plan.placed_state(state, params)

        return retried(run, lambda: self.train_batch_size, again)

    def _train(self, resume_from: str | bool | None, interrupts: Interrupts) -> TrainOutput:
        self._chosen = self._choose()  # arguments may have been changed since
        args, start, tx = self.args, time.time(), self._optimizer()
        found = find(resume_from, args.output_dir) if resume_from else None
        if found is not None and args.auto_find_batch_size and self._found_batch_size is None:
            self._found_batch_size = found.state.train_batch_size
        run = self._plan()
        self.lr_scheduler = LearningRate(self._chosen.rates(args, run.max_steps), lambda: self.state.global_step)
        self.callback_handler.optimizer, self.callback_handler.lr_scheduler = tx, self.lr_scheduler
        self.optimizer = tx
        self._fingerprint = None  # the dataset may have been exchanged since the last run
        self._new_state()
        progress = self._take_up(found, run, tx) if found is not None else Progress()
        first = self.state.global_step
        self.state.max_steps, self.state.num_train_epochs = run.max_steps, run.num_epochs
        self.state.compute_steps(args, run.max_steps)
        loader = self.get_train_dataloader()
        self.callback_handler.train_dataloader = loader
        steps = steps_of(loader, "get_train_dataloader")
        step = self._step(tx)
        loop = Loop(
            events=self._events,
            batches=Prefetched(
                steps, None if "compute_loss" in self.overridden else self._place, lambda: loop.heed_while_waiting()
            ),
            num_epochs=run.num_epochs,
            micro_batches_per_epoch=run.micro_batches_per_epoch,
            advance=self._advancer(step, tx),
            learning_rate=self.lr_scheduler,
            report=self._report,
            evaluate=self._evaluate_on_the_way,
            save=self._save_checkpoint,
            nonfinite_guard=NonFiniteGuard(
                first + 1, partial(explain, self), 1 if "underflow_overflow" in str(args.debug) else PATIENCE
            ),
            interrupts=interrupts,
            progress=progress,
        )
        self.is_in_train = True
        try:
            with (
                self._background.settled(),
                naming_lost_processes(),
                told_of_memory(self),
                compiling_ahead(self, step, steps, progress),
            ):
                train_loss, unreported = loop.run()
        finally:
            self.is_in_train = False
        self._finish_pushing()
        return self._finish(train_loss, self._measured(unreported), start, run.max_steps, first)

    is_fsdp_enabled = is_deepspeed_enabled = False  # recipes ask before they save; here saving is the same

    def hyperparameter_search(self, *args: Any, **kwargs: Any) -> NoReturn:
        """Refused: it makes models by `model_init`, which TRL's RewardTrainer does not take either."""
        raise NotImplementedError(
            "hyperparameter_search is not in this release of trl_jax. Make a trainer for each "
            "configuration and call train()."
        )

    def _evaluate_on_the_way(self) -> dict[str, float]:
        telling = evaluation_told_of_memory(self) if self.args.auto_find_batch_size else contextlib.nullcontext()
        with telling:
            metrics = self.evaluate()
        self.lr_scheduler.after_evaluation(metrics, self.args.metric_for_best_model)
        return metrics

    def _report(self, logs: dict[str, float], steps: list[dict[str, np.ndarray]]) -> None:
        self.log(logs | self._measured(steps))

    def _measured(self, steps: list[dict[str, np.ndarray]]) -> dict[str, float]:
        return {"num_tokens": float(self._tokens_seen)} | self.training_metrics(steps) if steps else {}

    def _finish(
        self, train_loss: float, measured: dict[str, float], start: float, max_steps: int, first: int
    ) -> TrainOutput:
        args, state = self.args, self.state
        rows = self.micro_batch_pairs * args.gradient_accumulation_steps * max_steps
        if isinstance(self.train_dataset, Dataset) and args.max_steps <= 0:
            rows = len(self.train_dataset) * args.num_train_epochs
        taken = state.global_step - first  # the time is that of this session, so are its steps
        rows *= taken / max(max_steps, 1)
        metrics = speed_metrics("train", start, num_samples=rows, num_steps=taken)
        if args.include_num_input_tokens_seen != "no":
            metrics["train_tokens_per_second"] = round(state.num_input_tokens_seen / metrics["train_runtime"], 3)
        metrics |= {"total_flos": state.total_flos, "train_loss": train_loss} | measured | memory("train", args)
        self.log(metrics)
        metrics["epoch"] = state.epoch
        if args.load_best_model_at_end and state.best_model_checkpoint is not None:
            self.model.params = self._weights_of(Path(state.best_model_checkpoint))
        if is_first() and args.save_total_limit == 1 and state.best_model_checkpoint is not None:
            forget_all_but_best(args.output_dir, state.best_model_checkpoint)
        if self._brought is not None:
            give_back(self.model.backend, self.model.params, self.model.config, self._brought)
        self._events.fire("on_train_end")
        return TrainOutput(state.global_step, train_loss, metrics)


def check_strategies(args: BaseConfig, eval_dataset: Any) -> None:
    """What only the trainer can tell: whether the strategies have what they need."""
    if args.eval_strategy != "no" and eval_dataset is None:
        raise ValueError(
            f"eval_strategy={str(args.eval_strategy.value)!r} needs an eval_dataset. Pass one, or set "
            "eval_strategy='no'."
        )
    if args.eval_on_start and eval_dataset is None:
        raise ValueError("eval_on_start=True needs an eval_dataset. Pass one, or leave eval_on_start out.")
    wanted = args.metric_for_best_model
    if wanted is not None and isinstance(eval_dataset, dict):
        if not any(wanted.removeprefix("eval_").startswith(f"{name}_") for name in eval_dataset):
            raise ValueError(
                f"metric_for_best_model={wanted!r} names none of the evaluation sets ({', '.join(eval_dataset)}): "
                f"their metrics are called eval_<name>_loss and so on, as in 'eval_{next(iter(eval_dataset))}_loss'."
            )
    if args.save_strategy == SaveStrategy.BEST and args.metric_for_best_model is None:
        raise ValueError(
            "save_strategy='best' needs metric_for_best_model, which is None: say which metric of the evaluation "
            "decides, as in metric_for_best_model='loss'."
        )
