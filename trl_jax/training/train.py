"""The training loop."""

from __future__ import annotations

import contextlib
import logging
import os
import time
from collections.abc import Callable, Iterable, Iterator
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
from trl_jax.hub.torch_objects import give_back
from trl_jax.mesh.processes import barrier, is_first, naming_lost_processes, several, together
from trl_jax.training.checkpoint import (
    Progress,
    Snapshot,
    forget_all_but_best,
    host_copy,
    is_new_best,
    new_id,
    only_run,
    sweep,
)
from trl_jax.training.data import length_of, reason_of_layout, step_layout, steps_of
from trl_jax.training.events import Events, Interrupted, Interrupts
from trl_jax.training.logging import tell_compilation, tell_layout, tell_model, tell_trained
from trl_jax.training.metrics import (
    begin_state,
    explain_evaluation_memory,
    explain_memory,
    memory,
    retried,
    speed_metrics,
    task_metrics,
)
from trl_jax.training.model import align_special_tokens
from trl_jax.training.nonfinite import PATIENCE, NonFiniteGuard, explain
from trl_jax.training.optimizer_choice import GROUPS, LearningRate, OptimizerChoice, ShownOptimizer
from trl_jax.training.optimizers import Optimizer
from trl_jax.training.prefetch import AsNeeded, Prefetched
from trl_jax.training.push import HubPublisher, sweep_stages
from trl_jax.training.resume import Checkpointer, find, resume, weights_of
from trl_jax.training.state import RunState, TrainerHooks
from trl_jax.training.step import Changes, TrainStep, compiling_ahead, optimizer_of

# ----------------------------------------------------------------------------------------------------
# One call of train(): from a place to begin, through the loop, to the closing metrics.


logger = logging.getLogger(__name__)


class Training:
    """Trains a run, as often as it is asked to.

    optimizer: of the last call of train(); None before the first.
    """

    def __init__(
        self,
        run: RunState,
        hooks: TrainerHooks,
        train_step: TrainStep,
        checkpointer: Checkpointer,
        publisher: HubPublisher,
        choose: Callable[[], OptimizerChoice],
        torch_model: Any,
    ):
        """
        Args:
            choose: what the arguments and the constructor say of the optimizer, as they are now.
            torch_model: the torch model that was passed, which gets the trained weights; None without one.
        """
        self._run, self._hooks, self._train_step = run, hooks, train_step
        self._checkpointer, self._publisher, self._torch_model = checkpointer, publisher, torch_model
        self._choose, self.choice = choose, choose()
        self.optimizer: Optimizer | None = None

    def train(self, resume_from: str | bool | None) -> TrainOutput:
        """Train to the end, alone in output_dir, heeding signals; smaller batches where auto_find_batch_size asks."""
        args = self._run.args
        run = self._run
        align_special_tokens(run.model, self._torch_model, run.processing_class, head=run.task.head)
        interrupts = self._run.progress.interrupts = Interrupts()
        saves = args.save_strategy != SaveStrategy.NO
        promise = "saving a checkpoint and leaving" if saves else "leaving without a checkpoint (save_strategy='no')"
        with self._run.on_device(), contextlib.ExitStack() as entered:
            if is_first() and (saves or os.access(args.output_dir, os.W_OK)):  # who saves nothing may do so anywhere
                self._checkpointer.lock = entered.enter_context(only_run(args.output_dir))
                entered.callback(setattr, self._checkpointer, "lock", None)
                sweep(Path(args.output_dir))
                sweep_stages(args.output_dir)
            barrier("train")  # until the first process has swept
            entered.enter_context(interrupts.heeded(promise))
            once = partial(self._once, as_choice(resume_from), new_id())
            try:
                return self._what_fits(once) if args.auto_find_batch_size else once()
            except SystemExit:
                if interrupts.received is not None:
                    self._publisher.tell_unfinished()
                raise

    def made_optimizer(self) -> Optimizer:
        """The result of create_optimizer, in the form of the step."""
        return optimizer_of(self._run, self._hooks.create_optimizer(), self.choice)

    def _renewed(self, changed: Changes) -> Optimizer | None:
        """The optimizer of a step that is made anew, which is shown then; None where nothing has changed."""
        tx = changed()
        if tx is not None:
            self._show(tx)
        return tx

    def _show(self, tx: Optimizer) -> None:
        """Give callbacks, and who asks the trainer, the optimizer."""
        self.optimizer = ShownOptimizer.of(tx, self.choice, self._checkpointer.lr_scheduler)
        self._run.events.handler.optimizer = self.optimizer

    def _what_fits(self, once: Callable[[], TrainOutput]) -> TrainOutput:
        """Each try begins where the first one did: a step takes the arrays it is given."""
        run = self._run
        first, tokens_seen = host_copy((run.model.params, run.progress.optimizer_state)), run.progress.tokens_seen

        def again(size: int) -> None:
            run.progress.found_batch_size, run.progress.tokens_seen = size, tokens_seen
            params, state = first
            if run.sharding_plan is None:
                run.model.params, run.progress.optimizer_state = jax.tree.map(jnp.array, first)
            else:
                run.model.params = run.sharding_plan.placed(params)
                run.progress.optimizer_state = None if state is None else run.sharding_plan.placed_state(state, params)

        return retried(once, lambda: run.train_batch_size, again)

    def _once(self, resume_from: str | bool | None, run_id: str) -> TrainOutput:
        run, args, start = self._run, self._run.args, time.monotonic()
        self.choice = self._choose()  # arguments may have been changed since
        tx = self.made_optimizer()
        found = find(resume_from, args.output_dir) if resume_from else None
        if found is not None and args.auto_find_batch_size and run.progress.found_batch_size is None:
            run.progress.found_batch_size = found.state.train_batch_size
        length = length_of(run)
        schedule = LearningRate(self.choice.rates(args, length.max_steps), lambda: run.state.global_step)
        self._checkpointer.lr_scheduler = run.events.handler.lr_scheduler = schedule
        self._show(tx)
        self._checkpointer.forget_dataset()
        begin_state(run)
        if run.rollout is not None:
            run.rollout.begin()
        progress = Progress() if found is None else resume(run, self._checkpointer, found, length, tx)
        self._checkpointer.begin(found, run_id)
        first, run.progress.input_tokens_before = run.state.global_step, run.state.num_input_tokens_seen
        run.state.max_steps, run.state.num_train_epochs = length.max_steps, length.num_epochs
        run.state.compute_steps(args, length.max_steps)
        loop, train_loss, unreported = self._looped(tx, length, progress)
        with self._leaving_saved(loop):
            with run.progress.interrupts.waiting():
                self._publisher.finish()
                if run.rollout is not None:
                    run.rollout.finish()
            metrics = self._closing_metrics(train_loss, unreported, start, length.max_steps, first)
            with run.progress.interrupts.waiting():
                params = self._best_params()
        self._end(params)
        if run.progress.interrupts.received is not None:
            run.progress.interrupts.leave()
        tell_trained(run, run.state.global_step - first, time.monotonic() - start)
        return TrainOutput(run.state.global_step, train_loss, metrics)

    @contextlib.contextmanager
    def _leaving_saved(self, loop: Loop) -> Iterator[None]:
        """For a signal after the last step, leave with a checkpoint of it, without what the block has changed since."""
        before = Snapshot(self._run.events)
        try:
            yield
        except Interrupted:
            before.restore()
            with self._checkpointer.saver.settled():
                loop.leave_if_asked()

    def _looped(self, tx: Any, length: Any, progress: Progress) -> tuple[Loop, float, list]:
        run, checkpointer, train_step = self._run, self._checkpointer, self._train_step
        tell_model(run)
        batches = self._hooks.get_train_dataloader() if run.rollout is None else run.rollout
        run.events.handler.train_dataloader = batches
        steps = batches if run.rollout is not None else steps_of(batches, "get_train_dataloader")
        tell_layout(run, step_layout(run, training=True).layout, reason_of_layout(run))  # unless a survey has
        step, changed = train_step.made(tx), Changes(run, self._hooks.settle_task, self.made_optimizer)
        place = None if "compute_loss" in run.overridden else train_step.placed
        tell = partial(tell_compilation, run, steps)
        advance = train_step.advancer(step, tx, checkpointer.saver.check, tell, partial(self._renewed, changed))
        # Scripts' own `log` may be older than its second argument.
        began = () if run.args.include_num_input_tokens_seen == "no" else (time.time(),)
        patience = 1 if "underflow_overflow" in str(run.args.debug) else PATIENCE
        loop = Loop(
            events=run.events,
            batches=AsNeeded(steps, place)
            if run.rollout is not None
            else Prefetched(steps, place, lambda: loop.leave_if_asked()),
            # Of other sizes than before the resume, max_steps may be reached in a later epoch than they would have it.
            num_epochs=length.num_epochs + (progress.epoch if run.args.max_steps > 0 else 0),
            micro_batches_per_epoch=length.micro_batches_per_epoch,
            advance=lambda batch: advance(batch, checkpointer.lr_scheduler.taken(GROUPS)),
            learning_rate=checkpointer.lr_scheduler,
            report=lambda logs, since: self._hooks.log(logs | self._measured(since), *began),
            evaluate=self._evaluate,
            save=self._hooks.save_checkpoint,
            nonfinite_guard=NonFiniteGuard(
                run.state.global_step + 1, partial(explain, run, self._hooks.loss), patience
            ),
            interrupts=run.progress.interrupts,
            progress=progress,
        )
        run.progress.in_train = True
        run.model.train()
        try:
            with (
                checkpointer.saver.settled(),
                naming_lost_processes(),
                explain_memory(run),
                together(),  # announces an exception before a save in the background is waited for
                compiling_ahead(run, train_step, step, steps, progress),
            ):
                return loop, *loop.run()
        finally:
            run.progress.in_train = False

    def _evaluate(self) -> dict[str, float]:
        args = self._run.args
        telling = explain_evaluation_memory(self._run) if args.auto_find_batch_size else contextlib.nullcontext()
        with telling:
            metrics = self._hooks.evaluate()
        self._checkpointer.lr_scheduler.after_evaluation(metrics, args.metric_for_best_model)
        return metrics

    def _measured(self, steps: list[dict[str, np.ndarray]]) -> dict[str, float]:
        """Metrics to log of the steps since the last log, beside loss, grad_norm and learning_rate."""
        return task_metrics(self._run, steps, "train") if steps else {}

    def _closing_metrics(
        self, train_loss: float, unreported: list, start: float, max_steps: int, first: int
    ) -> dict[str, float]:
        """The run's metrics, logged."""
        run, args, state = self._run, self._run.args, self._run.state
        rows = run.step_examples * max_steps
        if isinstance(run.train_dataset, Dataset) and args.max_steps <= 0:
            rows = len(run.train_dataset) * args.num_train_epochs
        taken = state.global_step - first  # the time is that of this session, so are its steps
        rows *= taken / max(max_steps, 1)
        metrics = speed_metrics("train", start, num_samples=rows, num_steps=taken)
        metrics |= {"total_flos": state.total_flos, "train_loss": train_loss}
        metrics |= self._measured(unreported) | memory("train", args)
        self._hooks.log(metrics)
        metrics["epoch"] = state.epoch
        return metrics

    def _best_params(self) -> dict[str, jax.Array] | None:
        """The best checkpoint's weights where load_best_model_at_end asks for them."""
        best = self._run.state.best_model_checkpoint
        return weights_of(self._run, Path(best)) if self._run.args.load_best_model_at_end and best else None

    def _end(self, params: dict[str, jax.Array] | None) -> None:
        """Take these weights, if any; leave only the best checkpoint where one may be; tell callbacks."""
        run, best = self._run, self._run.state.best_model_checkpoint
        if params is not None:
            run.model.params = params
        if is_first() and run.args.save_total_limit == 1 and best is not None:
            forget_all_but_best(run.args.output_dir, best)
        if self._torch_model is not None:
            give_back(run.model.backend, run.model.params, run.model.config, self._torch_model)
        run.events.fire("on_train_end")


# ----------------------------------------------------------------------------------------------------
# The training loop: steps, epochs and the events between them, in TRL's order.


Metrics = dict[str, jax.Array]

_MOST_ON_DEVICE = 100  # steps whose metrics may wait there, in a run that seldom logs


class Batches(Protocol):
    """An epoch's step batches, without its first `skip` examples."""

    def set_epoch(self, epoch: int, skip: int, skipped_digest: int | None) -> None: ...
    def __iter__(self) -> Iterable[Any]: ...


@dataclass
class Loop:
    """One run. It computes nothing itself and calls the functions that it has.

    Attributes:
        events: the callbacks, with args, state and control.
        batches: set_epoch, then iterate; items have `num_micro_batches`, `num_examples`, `rows` and `rows_digest`.
        num_epochs, micro_batches_per_epoch: the run's length, and the unit of an epoch's fractions.
        advance: batch -> the metrics of one optimizer step, still on the device.
        learning_rate: finished steps -> rate of the next one, as it is logged.
        report: (logs, metrics of the steps since the last report, as NumPy) -> None.
        evaluate: runs the evaluation and returns its metrics.
        save: writes a checkpoint from which another loop resumes at this `progress`.
        nonfinite_guard: checks every step's metrics, and ends the run after too many bad ones.
        interrupts: signals that ask the run to end.
        progress: where the run begins.
    """

    events: Events
    batches: Batches
    num_epochs: int
    micro_batches_per_epoch: int
    advance: Callable[[Any], Metrics]
    learning_rate: Callable[[int], float]
    report: Callable[[dict[str, float], list[dict[str, np.ndarray]]], None]
    evaluate: Callable[[], dict[str, float]]
    save: Callable[[Progress], None]
    nonfinite_guard: NonFiniteGuard
    interrupts: Interrupts
    progress: Progress = field(default_factory=Progress)
    _between_steps: bool = True

    def __post_init__(self) -> None:
        self._saved_at = self.events.state.global_step  # what it begins with is no news

    def run(self) -> tuple[float, list[dict[str, np.ndarray]]]:
        """Train to the end, or until a callback says stop.

        Returns:
            The mean loss over all steps, and the metrics of the steps since the last report. Where an evaluation came
            after those there are none, as TRL's closing log line leaves them out then.

        Raises:
            SystemExit: a signal asked for it.
        """
        try:
            self._epochs()
        except Exception:  # whatever ended the run is raised again
            # A callback asked for it and then raised. Not with other processes: saving takes all, and they go on.
            if self._between_steps and self.events.control.should_save and not several():
                self._save()
            raise
        self.nonfinite_guard.settle()
        unreported = jax.device_get(self.progress.unreported)  # they stay there: it may still be saved
        mean = (self.progress.loss_sum + _sum_of_losses(unreported)) / max(self.events.state.global_step, 1)
        return mean, [] if self.progress.evaluated_last else unreported

    def _epochs(self) -> None:
        events, progress = self.events, self.progress
        events.fire("on_train_begin")
        self.leave_if_asked()
        if events.args.eval_on_start and events.state.global_step == 0:
            self._evaluate()
        events.control.should_training_stop |= progress.stop_training
        if progress.epoch_over:
            self._catch_up()
            if progress.stop_training:
                return
        for epoch in range(progress.epoch + progress.epoch_over, self.num_epochs):
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
            self._heed_signals()
            if events.control.should_epoch_stop or events.control.should_training_stop:
                break
        progress.stop_epoch = False
        self._check_not_empty()
        progress.epoch_over = True
        events.fire("on_epoch_end")
        self._report_evaluate_save()
        self._heed_signals()

    def _catch_up(self) -> None:
        """Repeat the evaluation that the run before broke off."""
        control, progress = self.events.control, self.progress
        if not progress.evaluation_due:
            return
        progress.evaluation_due = False
        control.should_evaluate, control.should_save = True, progress.save_due
        control.should_epoch_stop |= progress.stop_epoch
        self._report_evaluate_save()
        self._heed_signals()
        control = self.events.control  # callbacks may have put another in its place
        progress.stop_training, progress.stop_epoch = control.should_training_stop, control.should_epoch_stop

    def _check_not_empty(self) -> None:
        events = self.events
        if self.progress.micro_batches:
            return
        if events.state.global_step == 0:
            raise ValueError(
                "train_dataset gave not one batch: there is nothing to train on. If it streams, max_length may have "
                "removed every row."
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
        events.fire("on_step_begin")
        progress.learning_rate = self.learning_rate(events.state.global_step)
        self._between_steps = False
        metrics = self.advance(batch)
        for _ in range(batch.num_micro_batches - 1):
            events.fire("on_substep_end")
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
        events.state.epoch = progress.epoch + progress.micro_batches / self.micro_batches_per_epoch
        self._between_steps = True
        events.fire("on_step_end")

    def _report_evaluate_save(self) -> None:
        events = self.events
        if events.control.should_log and self.progress.unreported:
            self._report()
        if events.control.should_evaluate:
            best = is_new_best(self._evaluate(), events.args, events.state)
            self.progress.evaluated_last = True
            if events.args.save_strategy == SaveStrategy.BEST:
                events.control.should_save = best
        if events.control.should_save:
            self._save()

    def _evaluate(self) -> dict[str, float]:
        """Evaluate. For a signal, leave between two passes with a checkpoint from before, which has it repeated."""
        progress, before = self.progress, Snapshot(self.events)
        try:
            with self.interrupts.evaluating():
                return self.evaluate()
        except Interrupted:
            before.restore()
            progress.evaluation_due, progress.save_due = True, self.events.control.should_save
            self.leave_if_asked()

    def _save(self) -> None:
        control, progress = self.events.control, self.progress
        self._between_steps = False  # a save that fails is not tried again
        progress.stop_training, progress.stop_epoch = control.should_training_stop, control.should_epoch_stop
        progress.unreported = jax.device_get(progress.unreported)
        self.nonfinite_guard.settle()
        self.save(progress)
        self._between_steps, self._saved_at = True, self.events.state.global_step
        self.events.fire("on_save")

    def _heed_signals(self) -> None:
        """Leave where this process or another got a signal."""
        self.interrupts.agree(self.events.state.global_step)
        self.leave_if_asked()

    def leave_if_asked(self) -> None:
        """Between two steps: raise SystemExit where a signal came, after a checkpoint of the last step."""
        if self.interrupts.received is None:
            return
        if self.events.args.save_strategy != SaveStrategy.NO and self._saved_at != self.events.state.global_step:
            self._save()
        self.interrupts.leave()

    def _report(self) -> None:
        steps = self._fetch()
        logs = {
            "loss": _sum_of_losses(steps) / len(steps),
            "grad_norm": float(steps[-1]["grad_norm"]),
            "learning_rate": self.progress.learning_rate,
        }
        self.report(logs, steps)

    def _fetch(self) -> list[dict[str, np.ndarray]]:
        """Fetch the metrics since the last call to the host, and add their losses to the sum."""
        steps, self.progress.unreported = jax.device_get(self.progress.unreported), []
        self.progress.loss_sum += _sum_of_losses(steps)
        return steps


def _sum_of_losses(steps: list[dict[str, np.ndarray]]) -> float:
    return sum(float(step["loss"]) for step in steps)
