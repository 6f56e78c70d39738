"""Steps, epochs, and what happens between them; TRL's order of events."""

from __future__ import annotations

import logging
from collections.abc import Callable, Iterable
from dataclasses import dataclass, field
from typing import Any, Protocol

import jax
import numpy as np
from transformers.trainer_utils import SaveStrategy

from trl_jax.engine.checkpoint import is_new_best
from trl_jax.engine.events import Events

logger = logging.getLogger(__name__)

Metrics = dict[str, jax.Array]

_HELD_ON_DEVICE = 100  # steps whose metrics may wait there; a run that seldom logs would pile them up


class Batches(Protocol):
    """An epoch's step batches; each says how many micro-batches it is made of."""

    def set_epoch(self, epoch: int) -> None: ...
    def __iter__(self) -> Iterable[Any]: ...


@dataclass
class Loop:
    """One run. It computes nothing itself: it is handed functions.

    Attributes:
        events: the callbacks, with args, state and control.
        batches: set_epoch, then iterate; items have `num_micro_batches`.
        num_epochs, micro_batches_per_epoch: how long, and what an epoch's fractions are counted in.
        advance: (batch, learning rate) -> the metrics of one optimizer step, still on the device.
        learning_rate: finished steps -> rate of the next one.
        report: (logs, metrics of the steps since the last report, as NumPy) -> None.
        evaluate: runs the evaluation and returns its metrics.
        save: writes a checkpoint.
    """

    events: Events
    batches: Batches
    num_epochs: int
    micro_batches_per_epoch: int
    advance: Callable[[Any, float], Metrics]
    learning_rate: Callable[[int], float]
    report: Callable[[dict[str, float], list[dict[str, np.ndarray]]], None]
    evaluate: Callable[[], dict[str, float]]
    save: Callable[[], None]
    _unreported: list[Metrics] = field(default_factory=list)
    _evaluated_last: bool = False
    _loss_sum: float = 0.0

    def run(self) -> tuple[float, list[dict[str, np.ndarray]]]:
        """Train to the end, or until a callback says stop.

        Returns:
            The mean loss over all steps, and the metrics of those since the last report; none of these
            where an evaluation came after them, for TRL's closing line leaves them out then.
        """
        events = self.events
        events.fire("on_train_begin")
        if events.args.eval_on_start:
            self.evaluate()
        for epoch in range(self.num_epochs):
            events.fire("on_epoch_begin")
            self._epoch(epoch)
            if events.control.should_training_stop:
                break
        unreported = self._fetch()
        return self._loss_sum / max(events.state.global_step, 1), [] if self._evaluated_last else unreported

    def _epoch(self, epoch: int) -> None:
        events, done = self.events, 0
        self.batches.set_epoch(epoch)
        for batch in self.batches:
            self._step(batch)
            done += batch.num_micro_batches
            events.state.global_step += 1
            events.state.epoch = epoch + done / self.micro_batches_per_epoch
            events.fire("on_step_end")
            self._report_evaluate_save()
            if events.control.should_epoch_stop or events.control.should_training_stop:
                break
        if done == 0 and events.state.global_step == 0:
            raise ValueError(
                "train_dataset gave not one batch: there is nothing to train on. If it streams, max_length may have "
                "removed every row."
            )
        if done == 0:
            logger.warning(
                "train_dataset ended before max_steps=%d: training stops at step %d.",
                events.state.max_steps,
                events.state.global_step,
            )
            events.control.should_training_stop = True
        events.fire("on_epoch_end")
        self._report_evaluate_save()

    def _step(self, batch: Any) -> None:
        """One optimizer step. The host runs at most one step ahead of the device."""
        events = self.events
        events.fire("on_step_begin")
        self._rate = self.learning_rate(events.state.global_step)
        metrics = self.advance(batch, self._rate)
        for _ in range(batch.num_micro_batches - 1):
            events.fire("on_substep_end")
        events.fire("on_pre_optimizer_step")
        events.fire("on_optimizer_step")
        if self._unreported:
            jax.block_until_ready(self._unreported[-1])
        if len(self._unreported) % _HELD_ON_DEVICE == 0:
            self._unreported = jax.device_get(self._unreported)
        self._unreported.append(metrics)
        self._evaluated_last = False

    def _report_evaluate_save(self) -> None:
        events = self.events
        if events.control.should_log and self._unreported:
            self._report()
        if events.control.should_evaluate:
            best = is_new_best(self.evaluate(), events.args, events.state)
            self._evaluated_last = True
            if events.args.save_strategy == SaveStrategy.BEST:
                events.control.should_save = best
        if events.control.should_save:
            self.save()
            events.fire("on_save")

    def _report(self) -> None:
        steps = self._fetch()
        logs = {
            "loss": sum(float(step["loss"]) for step in steps) / len(steps),
            "grad_norm": float(steps[-1]["grad_norm"]),
            "learning_rate": self._rate,
        }
        self.report(logs, steps)

    def _fetch(self) -> list[dict[str, np.ndarray]]:
        """The metrics since the last time, on the host; their losses go into the sum."""
        steps, self._unreported = jax.device_get(self._unreported), []
        self._loss_sum += sum(float(step["loss"]) for step in steps)
        return steps
