"""The training loop."""

from __future__ import annotations

import contextlib
import logging
import os
import time
from collections.abc import Callable, Iterable, Iterator, Sequence
from dataclasses import dataclass, field
from functools import partial
from pathlib import Path
from typing import Any, Protocol

import jax
import jax.numpy as jnp
import numpy as np
from datasets import Dataset
from transformers.trainer_utils import SaveStrategy, TrainOutput

from trl_jax.config.rules import as_choice
from trl_jax.core.torch_random import TorchGenerator
from trl_jax.data.loader import ExampleLoader, RunLength
from trl_jax.hub.peft_backend import AdaptedBackend
from trl_jax.hub.torch_objects import TorchOriginal, copy_back_to_torch, is_adapted, refreshed
from trl_jax.hub.torch_state import is_torch_optimizer
from trl_jax.mesh.processes import barrier, is_first, reached, several, together
from trl_jax.rollout.steps import RolloutSteps
from trl_jax.training.callbacks import begin_state
from trl_jax.training.checkpoint_files import (
    LoopProgress,
    RandomState,
    RunSnapshot,
    forget_all_but_best,
    host_copy,
    is_new_best,
    new_id,
)
from trl_jax.training.checkpointer import Checkpointer
from trl_jax.training.data import AsNeeded, Prefetched, reason_of_layout, steps_of, training_layout
from trl_jax.training.events import Events, Interrupted, Interrupts
from trl_jax.training.failures import (
    PATIENCE,
    NonFiniteGuard,
    explain,
    explain_evaluation_memory,
    explain_memory,
    retried,
    step_memory,
)
from trl_jax.training.logging import tell_compilation, tell_images, tell_layout, tell_model, tell_trained
from trl_jax.training.metrics import memory, speed_metrics, task_metrics
from trl_jax.training.model import align_special_tokens, take_over
from trl_jax.training.optimizer_choice import GROUPS, LearningRate, OptimizerChoice, ShownOptimizer, of_torch
from trl_jax.training.optimizers import Optimizer
from trl_jax.training.push import HubPublisher, sweep_stages
from trl_jax.training.resume import find, resume, weights_of
from trl_jax.training.state import Hooks, Setup
from trl_jax.training.step import RecompileCheck, TrainStep, compiling_ahead, optimizer_of, optimizer_of_groups

logger = logging.getLogger(__name__)


class Training:
    """Implements train(): resumes if asked, runs the loop, and computes the final metrics.

    optimizer: the one of the last call of train(); None before the first.
    """

    def __init__(
        self,
        setup: Setup,
        hooks: Hooks,
        train_step: TrainStep,
        checkpointer: Checkpointer,
        publisher: HubPublisher,
        choose: Callable[[], OptimizerChoice],
        torch_model: Any,
        rollout_steps: RolloutSteps | None,
    ):
        """
        Args:
            choose: chooses an optimizer from the current arguments and those of the constructor.
            torch_model: the torch model that was passed and receives the trained weights; None without one.
            rollout_steps: the source of steps in online training; None if the rows come from a dataset.
        """
        self._rollout_steps = rollout_steps
        self._setup, self._hooks, self._train_step = setup, hooks, train_step
        self._checkpointer, self._publisher, self._torch_model = checkpointer, publisher, torch_model
        self._choose, self.choice = choose, choose()
        self._original = None if torch_model is None else TorchOriginal(torch_model)
        self._copied: dict[str, jax.Array] | None = None  # the parameters that the torch model has
        self._told_change: str | None = None  # the parameter that was last named as changed during training
        self.optimizer: Optimizer | None = None

    def train(self, resume_from: str | bool | None) -> TrainOutput:
        """Train to the end. Meanwhile output_dir is locked against other runs, and signals end the run after a step.
        With auto_find_batch_size, a run that does not fit in memory is repeated with smaller batches."""
        setup, args = self._setup, self._setup.args
        align_special_tokens(setup.model, self._torch_model, setup.processing_class, head=setup.task.head)
        interrupts = setup.progress.interrupts = Interrupts()
        saves = args.save_strategy != SaveStrategy.NO
        promise = "saving a checkpoint and leaving" if saves else "leaving without a checkpoint (save_strategy='no')"
        with setup.on_device(), contextlib.ExitStack() as entered:
            # A run that saves nothing may have a read-only output_dir.
            if is_first() and (saves or os.access(args.output_dir, os.W_OK)):
                entered.enter_context(self._checkpointer.locked())
                sweep_stages(args.output_dir)
            barrier("train")  # wait until the first process has removed leftovers of killed runs
            entered.enter_context(interrupts.handling_signals(promise))
            run = partial(self._run, as_choice(resume_from), new_id())
            try:
                return self._retried(run) if args.auto_find_batch_size else run()
            except SystemExit:
                if interrupts.received is not None:
                    self._publisher.tell_unfinished(args.output_dir)
                raise
            except (Exception, KeyboardInterrupt):
                if self._torch_model is not None and not several():
                    self._refresh_torch_model()  # a script that catches the error may go on with its model
                raise

    def follow_torch_model(self, *, trains: bool = False) -> None:
        """Apply changes that the script made to the torch model it passed. During train() they only cause a warning."""
        setup = self._setup
        if self._original is not None and not setup.progress.in_train:
            models = setup.model, self._torch_model, self._original
            take_over(*models, setup.args, setup.sharding_plan, trains=trains)

    def _refresh_torch_model(self) -> None:
        """Copy the weights of the current step to the torch model, before a callback or a reward function uses it."""
        params = self._setup.model.params
        if params is self._copied or any(array.is_deleted() for array in params.values()):  # donated to a running step
            return
        self._copied = params
        self._copy_back()

    def _copy_back(self) -> None:
        setup = self._setup
        name = self._original.changed() or next(iter(self._original.changed_flags()), None)
        if name not in (None, self._told_change):
            self._told_change = name
            logger.warning(
                "The torch model was changed during training: %s. This has no effect on this run, because the trained "
                "weights are in trainer.model, and frozen parameters are determined before train().", name
            )  # fmt: skip
        copy_back_to_torch(setup.model.backend, setup.model.params, setup.model.config, self._torch_model)
        # An adapter that has just been put on the model freezes the others; otherwise flags count in the next train().
        self._original.mark(flags=not self._original.same_parameters())

    def build_optimizer(self) -> Optimizer:
        """The result of create_optimizer, in the form that the step expects."""
        setup = self._setup
        optimizer = self._hooks.create_optimizer()
        if is_torch_optimizer(optimizer):
            models = [model for model in (setup.model, self._torch_model) if model is not None]
            self.choice = of_torch(optimizer, None, *models)
        elif isinstance(optimizer, ShownOptimizer):  # a create_optimizer that keeps the optimizer of the last train()
            self.choice = optimizer.choice
        if self.choice.groups:
            backend, max_steps = setup.model.backend, setup.length.max_steps
            optimizer = optimizer_of_groups(self.choice, backend, setup.args, max_steps, setup.model.params)
        vision = setup.model.backend.of_vision(setup.model.params)
        return optimizer_of(optimizer, self.choice, setup.args.max_grad_norm, setup.model.trainable_masks, vision)

    def _new_optimizer(self, changed: RecompileCheck) -> Optimizer | None:
        """The optimizer, if the step has to be compiled again; None if nothing has changed."""
        before = self.choice
        tx = changed()
        if (self.choice.peak, self.choice.groups) != (before.peak, before.groups):
            raise ValueError(
                "create_optimizer was called again, because the step was changed while the run trains, and returned a "
                "torch optimizer with other groups or learning rates. Make such changes between calls of train()."
            )
        if tx is not None:
            self._show(tx)
        return tx

    def _show(self, tx: Optimizer) -> None:
        """Make the optimizer visible to callbacks and as `trainer.optimizer`."""
        self.optimizer = ShownOptimizer.of(tx, self.choice, self._setup.progress.schedule)
        self._setup.events.handler.optimizer = self.optimizer

    def _retried(self, run: Callable[[], TrainOutput]) -> TrainOutput:
        """Repeat a run that does not fit in memory with smaller batches. Each attempt starts from copies of the initial
        arrays, because the step donates its arguments."""
        setup = self._setup
        first, tokens_seen = host_copy((setup.model.params, setup.progress.optimizer_state)), setup.progress.tokens_seen

        def again(size: int) -> None:
            setup.progress.found_batch_size, setup.progress.tokens_seen = size, tokens_seen
            params, state = first
            if setup.sharding_plan is None:
                setup.model.params, setup.progress.optimizer_state = jax.tree.map(jnp.array, first)
            else:
                setup.model.params = setup.sharding_plan.placed(params)
                setup.progress.optimizer_state = (
                    None if state is None else setup.sharding_plan.placed_state(state, params)
                )

        return retried(run, lambda: setup.train_batch_size, again)

    def _run(self, resume_from: str | bool | None, run_id: str) -> TrainOutput:
        setup, args, start = self._setup, self._setup.args, time.monotonic()
        self.choice = self._choose()  # arguments may have changed since construction
        tx = self.build_optimizer()
        point = find(resume_from, args.output_dir) if resume_from else None
        if point is not None and args.auto_find_batch_size and setup.progress.found_batch_size is None:
            setup.progress.found_batch_size = point.state.train_batch_size
        user_batches = self._batches_of_script()
        length = setup.length
        factors = [group.factor for group in self.choice.groups] or [1.0] * GROUPS
        schedule = LearningRate(self.choice.rates(args, length.max_steps), lambda: setup.state.global_step, factors)
        if setup.progress.schedule is not None and self.choice.groups and self.choice.schedule is not None:
            steps_before = setup.progress.schedule.last_epoch  # as in TRL, a scheduler continues in a second train()
            schedule.begin_at(-steps_before)
        setup.progress.schedule = setup.events.handler.lr_scheduler = schedule
        self._show(tx)
        self._checkpointer.forget_dataset()
        begin_state(setup.events, setup.train_batch_size)
        if self._rollout_steps is not None:
            begin = partial(begin_step, setup, self._hooks)
            self._rollout_steps.begin(begin, self._train_step.at_iterates)
        random_before, progress = None, LoopProgress()
        if point is not None:
            random_before = None if point.model_only else RandomState(_random_streams(self._rollout_steps))
            progress = resume(setup, self._checkpointer, point, length, tx)
            if user_batches is not None:
                user_batches.steps.fill_last = setup.progress.fill_last
        self._checkpointer.begin((point and point.run_id) or run_id, fresh=point is None)
        first, setup.progress.input_tokens_before = setup.state.global_step, setup.state.num_input_tokens_seen
        setup.state.max_steps, setup.state.num_train_epochs = length.max_steps, length.num_epochs
        setup.state.compute_steps(args, length.max_steps)
        loop, train_loss, unreported = self._run_loop(tx, length, progress, random_before, user_batches)
        with self._saved_on_signal(loop):
            with setup.progress.interrupts.waiting():
                self._publisher.finish(args, setup.events)
                if self._rollout_steps is not None:
                    self._rollout_steps.finish()
            # As in TRL, whose last log therefore leaves out what was collected in training.
            setup.model.train(not loop.progress.evaluated_last)
            measured = loop.work.measured(unreported)
            metrics = self._closing_metrics(train_loss, measured, start, length.max_steps, first)
            with setup.progress.interrupts.waiting():
                params = self._best_params()
        self._end(params)
        if setup.progress.interrupts.received is not None:
            setup.progress.interrupts.leave()
        last = setup.state.global_step
        tell_trained(args.output_dir, last, last - first, time.monotonic() - start)
        return TrainOutput(setup.state.global_step, train_loss, metrics)

    def _batches_of_script(self) -> Any:
        """The result of a user-defined get_train_dataloader; None without one. Its rows, which may differ from
        `train_dataset`, decide the length of the run."""
        setup, name = self._setup, "get_train_dataloader"
        setup.progress.loaded_dataset = None
        if setup.online or not (name in setup.overridden or name in self._hooks.set_by_script()):
            return None
        batches = self._hooks.get_train_dataloader()
        setup.progress.loaded_dataset = steps_of(batches, name).dataset
        return batches

    @contextlib.contextmanager
    def _saved_on_signal(self, loop: Loop) -> Iterator[None]:
        """If a signal interrupts the block, undo its changes and exit with a checkpoint of the last step."""
        before = RunSnapshot(self._setup.events, _random_streams(self._rollout_steps))
        try:
            yield
        except Interrupted:
            before.restore()
            with self._checkpointer.saver.settled():
                loop.leave_if_asked()

    def _run_loop(
        self, tx: Any, length: RunLength, progress: LoopProgress, random_before: RandomState | None, user_batches: Any
    ) -> tuple[Loop, float, list]:
        setup, checkpointer, train_step = self._setup, self._checkpointer, self._train_step
        args, printed, hooks = setup.args, setup.progress.printed, self._hooks
        tell_model(printed, args, setup.model, setup.sharding_plan)
        batches = user_batches
        if batches is None:
            batches = self._rollout_steps if setup.online else hooks.get_train_dataloader()
        setup.events.handler.train_dataloader = batches
        steps = batches if setup.online else steps_of(batches, "get_train_dataloader")
        laid_out = training_layout(setup).layout  # printed unless a survey has already printed it
        tell_layout(printed, laid_out, reason_of_layout(setup), user_loss=setup.steps_by_batch)
        train_step.start(tx)
        changed = RecompileCheck(setup, hooks.refresh_task, self.build_optimizer, hooks.loss)
        new_optimizer, groups = partial(self._new_optimizer, changed), len(self.choice.groups) or GROUPS
        work = RunWork(setup, hooks, train_step, checkpointer, self._rollout_steps, steps, new_optimizer, groups)
        place = None if setup.steps_by_batch else train_step.placed
        loop = Loop(
            work=work,
            events=setup.events,
            batches=Prefetched(steps, place, lambda: loop.leave_if_asked())
            if isinstance(steps, ExampleLoader)  # others generate completions
            else AsNeeded(steps, place),
            length=length,
            schedule=setup.progress.schedule,
            nonfinite_guard=NonFiniteGuard(
                setup.state.global_step + 1, work.explain, 1 if "underflow_overflow" in str(args.debug) else PATIENCE
            ),
            interrupts=setup.progress.interrupts,
            progress=progress,
            rollout=self._rollout_steps,
            random_before=random_before,
        )
        setup.progress.in_train = True
        self._copied, reading = None, contextlib.nullcontext()
        if self._torch_model is not None and not several():
            adds = isinstance(setup.model.backend, AdaptedBackend) and not is_adapted(self._torch_model)
            reading = refreshed(self._torch_model, self._refresh_torch_model, of_copies=not adds)
        try:
            with (
                reading,
                checkpointer.saver.settled(),
                explain_memory(work.memory_of_step),
                together("training"),  # announces an exception before waiting for a save in the background
                compiling_ahead(setup, train_step, steps, progress),
            ):
                return loop, *loop.run()
        finally:
            setup.progress.in_train = False
            train_step.step = None  # frees its programs

    def _closing_metrics(
        self, train_loss: float, measured: dict[str, float], start: float, max_steps: int, first: int
    ) -> dict[str, float]:
        """Compute and log the metrics of the whole run."""
        setup, args, state = self._setup, self._setup.args, self._setup.state
        rows = setup.step_examples * max_steps
        if isinstance(setup.train_rows, Dataset) and args.max_steps <= 0:
            rows = len(setup.train_rows) * args.num_train_epochs
        taken = state.global_step - first  # like the time, counted since this call of train()
        rows *= taken / max(max_steps, 1)
        metrics = speed_metrics("train", start, num_samples=rows, num_steps=taken)
        metrics |= {"total_flos": state.total_flos, "train_loss": train_loss}
        metrics |= memory("train", args)
        self._hooks.log(metrics, measured)
        metrics["epoch"] = state.epoch
        return metrics

    def _best_params(self) -> dict[str, jax.Array] | None:
        """With load_best_model_at_end, the weights of the best checkpoint; else None."""
        setup, best = self._setup, self._setup.state.best_model_checkpoint
        if best is None or not setup.args.load_best_model_at_end:
            return None
        return weights_of(setup.model, Path(best), setup.args.seed, setup.sharding_plan)

    def _end(self, params: dict[str, jax.Array] | None) -> None:
        """Load these weights, if any; with save_total_limit=1, keep only the best checkpoint; fire on_train_end."""
        setup, best = self._setup, self._setup.state.best_model_checkpoint
        if params is not None:
            setup.model.params = params
        if is_first() and setup.args.save_total_limit == 1 and best is not None:
            forget_all_but_best(setup.args.output_dir, best)
        if self._torch_model is not None:
            self._copy_back()
        setup.events.fire("on_train_end")


# What a run does in its steps, reports and evaluations.

Metrics = dict[str, jax.Array]


def begin_step(setup: Setup, hooks: Hooks) -> None:
    setup.events.fire("on_step_begin")
    if setup.online:
        hooks.refresh_task()  # what callbacks set also applies to a generation of this step
    setup.model.train()  # an evaluation leaves it in evaluation mode, as in TRL


@dataclass
class RunWork:
    """The `Work` of a run.

    train_step: after `start`.
    rollout_steps: as in `Training`.
    steps: the loader of the steps.
    new_optimizer: called before each step; returns the optimizer if the step must be recompiled, else None.
    groups: number of parameter groups.
    """

    setup: Setup
    hooks: Hooks
    train_step: TrainStep
    checkpointer: Checkpointer
    rollout_steps: RolloutSteps | None
    steps: Any
    new_optimizer: Callable[[], Optimizer | None]
    groups: int

    def __post_init__(self) -> None:
        # A user-defined `log` may not accept the second argument.
        self._began = () if self.setup.args.include_num_input_tokens_seen == "no" else (time.time(),)

    def begin_step(self) -> None:
        if not self.setup.online:
            begin_step(self.setup, self.hooks)

    def advance(self, batch: Any) -> Metrics:
        self.checkpointer.saver.check()
        if (tx := self.new_optimizer()) is not None:
            self.train_step.recompile(tx)
        rate = self.setup.progress.schedule.take_next(self.groups)
        self._tell(batch)
        return self.train_step.run(batch, rate)

    def _tell(self, batch: Any) -> None:
        """Announce the first step, and the first one with images."""
        printed = self.setup.progress.printed
        tell_compilation(printed, self.steps, batch.arrays.tokens.shape)
        if self.setup.encoder is not None and "images" not in printed:
            tell_images(printed, batch, share_tower=self.train_step.reference_shares_tower())

    def report(self, logs: dict[str, float], steps: list[dict[str, np.ndarray]]) -> None:
        self.hooks.log(logs, self.measured(steps), *self._began)

    def measured(self, steps: list[dict[str, np.ndarray]]) -> dict[str, float]:
        """Metrics of the steps since the last log, other than loss, grad_norm and learning_rate."""
        if not steps:
            return {}
        setup = self.setup
        if self.rollout_steps is not None:  # its trainer adds them in `log`
            self.rollout_steps.rollout.show("train", setup.state.global_step)
            return {}
        return task_metrics(setup.task, setup.objective, steps, "train", tokens_seen=setup.progress.tokens_seen)

    def evaluate(self) -> dict[str, float]:
        setup, args, explaining = self.setup, self.setup.args, contextlib.nullcontext()
        if args.auto_find_batch_size:
            explaining = explain_evaluation_memory(args, setup.state.global_step, setup.model.params)
        with explaining:
            return self.hooks.evaluate()

    def save(self, progress: LoopProgress) -> None:
        self.hooks.save_checkpoint(progress)

    def explain(self, batch: Any) -> str:
        """Why the loss or the gradients of a step's batch are not finite."""
        setup, sharded = self.setup, self.setup.sharding_plan is not None
        return explain(setup.model.params, setup.frozen, self.train_step.loss, batch, sharded=sharded)

    def memory_of_step(self) -> str:
        """What a step needs memory for, if it does not fit."""
        setup = self.setup
        sizes = {"size": setup.train_batch_size, "texts": len(setup.task.columns.texts)}
        return step_memory(
            setup.args, setup.model, setup.arrays, setup.sharding_plan, step=setup.state.global_step + 1, **sizes
        )


# The loop: steps, epochs and their callback events, in TRL's order.

_MOST_ON_DEVICE = 100  # steps whose metrics may stay on the device if a run rarely logs


class Work(Protocol):
    """What the loop leaves to others: `RunWork`, or a stand-in in tests."""

    def begin_step(self) -> None:
        """Fire on_step_begin. Online training does so itself, before it generates the batch."""

    def advance(self, batch: Any) -> Metrics:
        """The metrics of one optimizer step, still on the device."""

    def report(self, logs: dict[str, float], steps: list[dict[str, np.ndarray]]) -> None:
        """Log these numbers and the metrics of the steps since the last report, which are NumPy arrays."""

    def evaluate(self) -> dict[str, float]:
        """Run the evaluation and return its metrics."""

    def save(self, progress: LoopProgress) -> None:
        """Write a checkpoint from which another loop can resume at this progress."""


class Batches(Protocol):
    """The step batches of an epoch, without its first `skip` examples."""

    def set_epoch(self, epoch: int, skip: int, skipped_digest: int | None) -> None: ...
    def __iter__(self) -> Iterable[Any]: ...


@dataclass
class Loop:
    """The loop of one train() call. It computes nothing itself: all is done by `work`.

    Attributes:
        events: the callbacks, with args, state and control.
        batches: call set_epoch, then iterate; items have `num_micro_batches`, `num_examples`, `rows` and `rows_digest`.
        schedule: number of finished steps -> learning rate of the next step, for the log; also gets the metrics of
            evaluations.
        nonfinite_guard: checks every step's metrics, and ends the run after too many bad steps.
        interrupts: signals that ask the run to end.
        progress: where the loop starts, updated as it runs.
        rollout: in online training, the source of `batches`; None if the rows come from a dataset.
        random_before: the random state before it was restored from a checkpoint; None if none was restored.
    """

    work: Work
    events: Events
    batches: Batches
    length: RunLength
    schedule: LearningRate
    nonfinite_guard: NonFiniteGuard
    interrupts: Interrupts
    progress: LoopProgress = field(default_factory=LoopProgress)
    rollout: RolloutSteps | None = None
    random_before: RandomState | None = None
    _between_steps: bool = True

    def __post_init__(self) -> None:
        self._started_at = self._saved_at = self.events.state.global_step  # where it starts, no checkpoint is needed
        self._random_streams = _random_streams(self.rollout)
        # Exceptions between two steps that end the run with a checkpoint of the last step. All processes raise them
        # together.
        self._recoverable = () if self.rollout is None else self.rollout.recoverable
        # If batch sizes differ from those before the resume, max_steps may only be reached in a later epoch.
        self._num_epochs = self.length.num_epochs + (self.progress.epoch if self.events.args.max_steps > 0 else 0)

    def run(self) -> tuple[float, list[dict[str, np.ndarray]]]:
        """Train to the end, or until a callback stops it.

        Returns:
            The mean loss over all steps, and the metrics of the steps since the last report. The latter are empty if an
            evaluation followed these steps, because TRL's last log line then leaves them out.

        Raises:
            SystemExit: a signal ended the run.
        """
        try:
            self._epochs()
        except self._recoverable as error:
            if (saved := self._saved_step()) is None:
                raise
            raise type(error)(
                f"{error}\nThe checkpoint of step {self.events.state.global_step} is in {saved}: continue the run with "
                "trainer.train(resume_from_checkpoint=True)."
            ) from error
        except Exception:  # re-raised
            # A callback asked for a checkpoint and then raised. Saving needs all processes, and the others continue.
            if self._between_steps and self.events.control.should_save and not several():
                self._save()
            raise
        self.nonfinite_guard.settle()
        unreported = jax.device_get(self.progress.unreported)  # not cleared: the progress may still be saved
        mean = (self.progress.loss_sum + _sum_of_losses(unreported)) / max(self.events.state.global_step, 1)
        return mean, [] if self.progress.evaluated_last else unreported

    def _saved_step(self) -> str | None:
        """The checkpoint of the last step, which is written if it was not saved yet. None if the run saves nothing, has
        not taken a step, or failed within a step or a save."""
        state, args = self.events.state, self.events.args
        if not self._between_steps or args.save_strategy == SaveStrategy.NO or state.global_step == self._started_at:
            return None
        if self._saved_at != state.global_step:
            self._save()
        return os.path.join(args.output_dir, f"checkpoint-{state.global_step}")

    def _epochs(self) -> None:
        events, progress = self.events, self.progress
        events.fire("on_train_begin")
        self.leave_if_asked()
        if events.args.eval_on_start and not progress.evaluation_due:  # also in a resumed run, as in transformers
            self._evaluate_at_start()
        events.control.should_training_stop |= progress.stop_training
        if progress.epoch_over:
            self._catch_up()
            if progress.stop_training:
                return
        for epoch in range(progress.epoch + progress.epoch_over, self._num_epochs):
            events.fire("on_epoch_begin")
            self._epoch(epoch)
            if events.control.should_training_stop:
                break

    def _epoch(self, epoch: int) -> None:
        events, progress = self.events, self.progress
        if progress.epoch_over:
            progress.epoch, progress.epoch_over = epoch, False
            progress.examples, progress.micro_batches, progress.rows_digest = 0, 0, None
            progress.stop_epoch = False
        self.batches.set_epoch(epoch, progress.examples, progress.rows_digest)
        self._catch_up()
        for batch in () if progress.stop_training or progress.stop_epoch else self.batches:
            self._step(batch)
            self._report_evaluate_save()
            self._handle_signals()
            if events.control.should_epoch_stop or events.control.should_training_stop:
                break
        progress.stop_epoch = False
        self._check_not_empty()
        progress.epoch_over = True
        events.fire("on_epoch_end")
        self._report_evaluate_save()
        self._handle_signals()

    def _catch_up(self) -> None:
        """Run the evaluation that was interrupted before the run was resumed."""
        control, progress = self.events.control, self.progress
        if not progress.evaluation_due:
            return
        progress.evaluation_due = False
        control.should_evaluate, control.should_save = True, progress.save_due
        control.should_epoch_stop |= progress.stop_epoch
        self._report_evaluate_save()
        self._handle_signals()
        control = self.events.control  # callbacks may have replaced it
        progress.stop_training, progress.stop_epoch = control.should_training_stop, control.should_epoch_stop

    def _check_not_empty(self) -> None:
        events = self.events
        if self.progress.micro_batches:
            return
        if events.state.global_step == 0:
            raise ValueError(
                "train_dataset yielded no batch, so there is nothing to train on. If it is streaming, max_length may "
                "have dropped every row."
            )
        logger.warning(
            "train_dataset ended before max_steps=%d: training stops at step %d.",
            events.state.max_steps,
            events.state.global_step,
        )
        events.control.should_training_stop = True

    def _step(self, batch: Any) -> None:
        """One optimizer step. The host runs at most one step ahead of the device."""
        events, progress = self.events, self.progress
        self.work.begin_step()
        progress.learning_rate = self.schedule(events.state.global_step)
        self._between_steps = False
        reached(f"training step {events.state.global_step + 1}")
        metrics = self.work.advance(batch)
        for _ in range(batch.num_micro_batches - 1):
            events.fire("on_substep_end")
        with events.at_gradients():
            events.fire("on_pre_optimizer_step")
            events.fire("on_optimizer_step")
        self.nonfinite_guard.check(batch, metrics)
        if len(progress.unreported) % _MOST_ON_DEVICE == 0:
            progress.unreported = jax.device_get(progress.unreported)
        progress.unreported.append(metrics)
        progress.evaluated_last = False
        progress.examples += batch.num_examples
        progress.micro_batches += batch.num_micro_batches
        progress.rows_digest = batch.rows_digest
        events.state.global_step += 1
        events.state.epoch = progress.epoch + progress.micro_batches / self.length.micro_batches_per_epoch
        self._between_steps = True
        events.fire("on_step_end")

    def _report_evaluate_save(self) -> None:
        events = self.events
        if events.control.should_log and self.progress.unreported:
            self._report()
        if events.control.should_evaluate:
            metrics = self._evaluate()
            self.schedule.after_evaluation(metrics, events.args.metric_for_best_model)
            best = is_new_best(metrics, events.args, events.state)
            self.progress.evaluated_last = True
            if events.args.save_strategy == SaveStrategy.BEST:
                events.control.should_save = best
        if events.control.should_save:
            self._save()

    def _evaluate_at_start(self) -> None:
        """As in transformers, the evaluation at the start of a resumed run uses the random state of a new run; the
        steps then continue with the random state of the checkpoint."""
        of_checkpoint = RandomState(self._random_streams)
        if self.random_before is not None:
            self.random_before.restore()
        self._evaluate(at_start=True)
        if self.random_before is not None:
            of_checkpoint.restore()

    def _evaluate(self, at_start: bool = False) -> dict[str, float]:
        """Evaluate. On a signal, exit between two batches with a checkpoint from before the evaluation, which is
        repeated after a resume. The evaluation at the start affects neither the best metric nor the learning rate."""
        progress, before = self.progress, RunSnapshot(self.events, self._random_streams)
        try:
            with self.interrupts.evaluating():
                return self.work.evaluate()
        except (Interrupted, *self._recoverable) as error:
            before.restore()
            if not at_start:
                progress.evaluation_due, progress.save_due = True, self.events.control.should_save
            if isinstance(error, Interrupted):
                self.leave_if_asked()
            raise

    def _save(self) -> None:
        control, progress = self.events.control, self.progress
        self._between_steps = False  # do not retry a save that fails
        progress.stop_training, progress.stop_epoch = control.should_training_stop, control.should_epoch_stop
        progress.unreported = jax.device_get(progress.unreported)
        self.nonfinite_guard.settle()
        self.work.save(progress)
        self._between_steps, self._saved_at = True, self.events.state.global_step
        self.events.fire("on_save")

    def _handle_signals(self) -> None:
        """Exit if this or another process received a signal."""
        self.interrupts.agree(self.events.state.global_step)
        self.leave_if_asked()

    def leave_if_asked(self) -> None:
        """Between two steps: if a signal was received, save a checkpoint of the last step and raise SystemExit."""
        if self.interrupts.received is None:
            return
        if self.events.args.save_strategy != SaveStrategy.NO and self._saved_at != self.events.state.global_step:
            self._save()
        self.interrupts.leave()

    def _report(self) -> None:
        """Report the steps since the last report, whose metrics are fetched from the device here."""
        steps, self.progress.unreported = jax.device_get(self.progress.unreported), []
        loss_sum = _sum_of_losses(steps)
        self.progress.loss_sum += loss_sum
        logs = {
            "loss": loss_sum / len(steps),
            "grad_norm": float(steps[-1]["grad_norm"]),
            "learning_rate": self.progress.learning_rate,
        }
        self.work.report(logs, steps)


def _sum_of_losses(steps: list[dict[str, np.ndarray]]) -> float:
    return sum(float(step["loss"]) for step in steps)


def _random_streams(rollout: RolloutSteps | None) -> Sequence[TorchGenerator]:
    """The random generators of online training."""
    return () if rollout is None else rollout.random_streams
