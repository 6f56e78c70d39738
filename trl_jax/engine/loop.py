"""The training loop: steps, epochs and the events between them, in TRL's order."""

from __future__ import annotations

import logging
from collections.abc import Callable, Iterable
from dataclasses import dataclass, field
from typing import Any, Protocol

import jax
import numpy as np
from transformers.trainer_utils import SaveStrategy

from trl_jax.engine.checkpoints.best import is_new_best
from trl_jax.engine.checkpoints.progress import Progress
from trl_jax.engine.checkpoints.snapshot import Snapshot
from trl_jax.engine.devices.processes import several
from trl_jax.engine.events import Events
from trl_jax.engine.interrupts import Interrupted, Interrupts
from trl_jax.engine.nonfinite_guard import NonFiniteGuard

logger = logging.getLogger(__name__)

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
