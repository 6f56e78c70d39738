"""One call of train(): from a place to begin, through the loop, to the closing metrics."""

from __future__ import annotations

import contextlib
import logging
import os
import time
from collections.abc import Callable, Iterator
from functools import partial
from pathlib import Path
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from datasets import Dataset
from transformers.trainer_utils import SaveStrategy, TrainOutput

from trl_jax.core.arguments.values import as_choice
from trl_jax.engine.checkpoints.async_saver import host_copy
from trl_jax.engine.checkpoints.checkpoint import forget_all_but_best, sweep
from trl_jax.engine.checkpoints.lock import only_run
from trl_jax.engine.checkpoints.progress import Progress
from trl_jax.engine.checkpoints.resume import find
from trl_jax.engine.checkpoints.run_id import new_id
from trl_jax.engine.checkpoints.snapshot import Snapshot
from trl_jax.engine.devices.processes import barrier, is_first, naming_lost_processes, together
from trl_jax.engine.interrupts import Interrupted, Interrupts
from trl_jax.engine.loop import Loop
from trl_jax.engine.nonfinite_guard import PATIENCE, NonFiniteGuard
from trl_jax.engine.optimizers.optimizer import Optimizer
from trl_jax.engine.prefetch import AsNeeded, Prefetched
from trl_jax.hub.torch.objects import give_back
from trl_jax.run.arguments.optimizer_choice import GROUPS, LearningRate, OptimizerChoice
from trl_jax.run.arguments.param_groups import ShownOptimizer
from trl_jax.run.callbacks import begin_state
from trl_jax.run.construction import align_model
from trl_jax.run.data import length_of, reason_of_layout, step_layout
from trl_jax.run.dataloaders import steps_of
from trl_jax.run.first_lines import tell_compilation, tell_layout, tell_model, tell_trained
from trl_jax.run.hooks import TrainerHooks
from trl_jax.run.memory.metrics import memory
from trl_jax.run.memory.oom import explain_evaluation_memory, explain_memory, retried
from trl_jax.run.nan_report import explain
from trl_jax.run.output.checkpointing import Checkpointer
from trl_jax.run.output.hub_push import HubPublisher, sweep_stages
from trl_jax.run.output.resuming import resume, weights_of
from trl_jax.run.reports import speed_metrics, task_metrics
from trl_jax.run.state import RunState
from trl_jax.run.step.changes import Changes
from trl_jax.run.step.precompile import compiling_ahead
from trl_jax.run.step.train_step import TrainStep, optimizer_of

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
        align_model(self._run, self._torch_model)
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
