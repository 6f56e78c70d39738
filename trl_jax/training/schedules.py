"""Learning rate schedules."""

from __future__ import annotations

import math
from collections import deque
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

# Learning rates that follow an evaluation metric; their state is saved in checkpoints.


class Plateau:
    """torch's ReduceLROnPlateau: multiply the rate by `factor` after more than `patience` evaluations without progress.

    A call returns the rate of the next step, whatever its number; pass the metric of each evaluation to `observe`.
    """

    def __init__(
        self,
        peak: float,
        *,
        mode: str = "min",
        factor: float = 0.1,
        patience: int = 10,
        threshold: float = 1e-4,
        threshold_mode: str = "rel",
        cooldown: int = 0,
        min_lr: float = 0.0,
        eps: float = 1e-8,
    ):
        self._sign = 1.0 if mode == "min" else -1.0
        self._factor, self._patience, self._cooldown = factor, patience, cooldown
        self._threshold, self._relative = threshold, threshold_mode == "rel"
        self._min_lr, self._eps = min_lr, eps
        self.rate, self.best, self.bad, self.cooling = peak, None, 0, 0

    def __call__(self, step: int) -> float:
        return self.rate

    def observe(self, metric: float) -> None:
        if self._is_better(metric):
            self.best, self.bad = metric, 0
        else:
            self.bad += 1
        if self.cooling > 0:
            self.cooling, self.bad = self.cooling - 1, 0
        if self.bad > self._patience:
            self.lower()
            self.cooling, self.bad = self._cooldown, 0

    def lower(self) -> None:
        lower = max(self.rate * self._factor, self._min_lr)
        self.rate = lower if self.rate - lower > self._eps else self.rate

    def _is_better(self, metric: float) -> bool:
        """Whether the metric is better by more than the threshold; NaN never is."""
        best = math.inf if self.best is None else self._sign * self.best
        if self._relative:
            return self._sign * metric < best * (1.0 - self._sign * self._threshold)
        return self._sign * metric < best - self._threshold

    def state(self) -> dict[str, Any]:
        """The state, as JSON values."""
        return {name: value for name, value in vars(self).items() if not name.startswith("_")}

    def restore(self, state: dict[str, Any]) -> None:
        vars(self).update(state)


class Greedy(Plateau):
    """GreedyLR (arXiv:2512.14527): a Plateau that also raises the rate.

    It divides the rate by `factor` after more than `patience` evaluations in a row with progress. After `reset_start`
    further reductions at `min_lr`, it restarts from the first rate. With `smooth`, it compares means of the last
    `window_size` metrics.
    """

    def __init__(
        self,
        peak: float,
        *,
        mode: str = "min",
        factor: float = 0.95,
        patience: int = 10,
        threshold: float = 1e-6,
        threshold_mode: str = "abs",
        cooldown: int = 0,
        warmup: int = 0,
        min_lr: float = 1e-3,
        max_lr: float = 1.0,
        eps: float = 1e-8,
        smooth: bool = False,
        window_size: int = 50,
        reset_start: int = 500,
    ):
        super().__init__(
            peak,
            mode=mode,
            factor=factor,
            patience=patience,
            threshold=threshold,
            threshold_mode=threshold_mode,
            cooldown=cooldown,
            min_lr=min_lr,
            eps=eps,
        )
        self._peak, self._max_lr, self._warmup, self._resets_after = peak, max_lr, warmup, reset_start
        self._window_size = window_size if smooth else 1
        self.good, self.warming, self.resets_in, self.window = 0, 0, reset_start, []

    def observe(self, metric: float) -> None:
        self.window = list(deque([*self.window, metric], maxlen=self._window_size))
        metric = sum(self.window) / len(self.window)
        if self.cooling > 0 or self.warming > 0:
            self.cooling, self.warming = (self.cooling - 1, self.warming) if self.cooling else (0, self.warming - 1)
            self.bad = self.good = 0
            return
        if self._is_better(metric):
            self.best, self.bad, self.good = metric, 0, self.good + 1
        else:
            self.bad, self.good = self.bad + 1, 0
        if self.good > self._patience:
            self.raise_()
            self.warming, self.good = self._warmup, 0
        elif self.bad > self._patience:
            self.lower()
            self._count_down()
            self.cooling, self.bad = self._cooldown, 0

    def raise_(self) -> None:
        higher = min(self.rate / self._factor, self._max_lr)
        self.rate = higher if higher - self.rate > self._eps else self.rate
        self.resets_in = self._resets_after

    def _count_down(self) -> None:
        if self.rate > self._min_lr:
            return
        self.resets_in -= 1
        if self.resets_in <= 0:
            self.rate, self.best, self.window = self._peak, None, []
            self.bad = self.good = self.cooling = self.warming = 0
            self.resets_in = self._resets_after


ADAPTIVE = {"reduce_lr_on_plateau": Plateau, "greedy": Greedy}


# Learning rates as functions of the step, in Python floats, so that they equal those that TRL logs to the last digit.


Schedule = Callable[[int], float]


@dataclass(frozen=True)
class Span:
    """A schedule's number of warmup steps, total number of steps, and highest rate."""

    warmup: int
    total: int
    peak: float

    def rise(self, step: int) -> float:
        return step / self.warmup

    def progress(self, step: int) -> float:
        """From 0 at the end of the warmup to 1 at the end of the run."""
        return (step - self.warmup) / max(1, self.total - self.warmup)


def _cosine(cycles: float, progress: float) -> float:
    return 0.5 * (1.0 + math.cos(math.pi * 2.0 * cycles * progress))


def _above(floor: float, factor: float) -> float:
    """Map `factor`, which runs from 0 to 1, to the range from `floor` to 1."""
    return max(0.0, factor * (1.0 - floor) + floor)


def _constant(span: Span) -> Schedule:
    return lambda step: 1.0


def _linear(span: Span) -> Schedule:
    return lambda step: max(0.0, (span.total - step) / max(1, span.total - span.warmup))


def _waves(span: Span, num_cycles: float = 0.5) -> Schedule:
    return lambda step: max(0.0, _cosine(num_cycles, span.progress(step)))


def _restarts(span: Span, num_cycles: int = 1) -> Schedule:
    def factor(step: int) -> float:
        progress = span.progress(step)
        return 0.0 if progress >= 1.0 else max(0.0, _cosine(0.5, (num_cycles * progress) % 1.0))

    return factor


def _polynomial(span: Span, lr_end: float = 1e-7, power: float = 1.0) -> Schedule:
    if span.peak <= lr_end:
        raise ValueError(
            f"lr_scheduler_kwargs: lr_end={lr_end} is not below learning_rate={span.peak}. Choose a smaller lr_end."
        )

    def factor(step: int) -> float:
        remaining = 0.0 if step > span.total else 1 - span.progress(step)
        return ((span.peak - lr_end) * remaining**power + lr_end) / span.peak

    return factor


def _inverse_sqrt(span: Span, timescale: int | None = None) -> Schedule:
    scale = timescale or span.warmup or 10_000
    return lambda step: 1.0 / math.sqrt((step + scale - span.warmup) / scale)


def _floor(span: Span, min_lr: float | None, min_lr_rate: float | None) -> float:
    return min_lr_rate if min_lr is None else min_lr / span.peak


def _waves_to_a_floor(
    span: Span, num_cycles: float = 0.5, min_lr: float | None = None, min_lr_rate: float | None = None
) -> Schedule:
    floor = _floor(span, min_lr, min_lr_rate)
    return lambda step: _above(floor, _cosine(num_cycles, span.progress(step)))


def _waves_between_floors(
    span: Span,
    num_cycles: float = 0.5,
    min_lr: float | None = None,
    min_lr_rate: float | None = None,
    warmup_lr_rate: float | None = None,
) -> Schedule:
    """Counts steps from 1, so that the last step has the lowest rate."""
    floor = _floor(span, min_lr, min_lr_rate)

    def factor(step: int) -> float:
        if step >= span.warmup:
            return _above(floor, _cosine(num_cycles, span.progress(step + 1)))
        if warmup_lr_rate is None:
            return (step + 1) / span.warmup
        return warmup_lr_rate + (1.0 - warmup_lr_rate) * step / max(1, span.warmup - 1)

    return factor


_RISES = {
    "linear": lambda progress: progress,
    "cosine": lambda progress: 0.5 * (1.0 - math.cos(math.pi * progress)),
    "1-sqrt": lambda progress: 1.0 - math.sqrt(1.0 - progress),
}


def _warmup_stable_decay(
    span: Span,
    num_decay_steps: int,
    num_stable_steps: int | None = None,
    warmup_type: str = "linear",
    decay_type: str = "cosine",
    min_lr_ratio: float = 0.0,
    num_cycles: float = 0.5,
) -> Schedule:
    stable = span.total - span.warmup - num_decay_steps if num_stable_steps is None else num_stable_steps
    falls = {
        "linear": lambda progress: 1.0 - progress,
        "cosine": lambda progress: _cosine(num_cycles, progress),
        "1-sqrt": lambda progress: 1.0 - math.sqrt(progress),
    }

    def factor(step: int) -> float:
        if step < span.warmup:
            return _above(min_lr_ratio, _RISES[warmup_type](span.rise(step)))
        if step < span.warmup + stable:
            return 1.0
        falling = step - span.warmup - stable
        if falling < num_decay_steps:
            return _above(min_lr_ratio, falls[decay_type](falling / max(1, num_decay_steps)))
        return min_lr_ratio

    return factor


_SCHEDULES: dict[str, Callable[..., Schedule]] = {
    "linear": _linear,
    "cosine": _waves,
    "cosine_with_restarts": _restarts,
    "polynomial": _polynomial,
    "constant": _constant,
    "constant_with_warmup": _constant,
    "inverse_sqrt": _inverse_sqrt,
    "cosine_with_min_lr": _waves_to_a_floor,
    "cosine_warmup_with_min_lr": _waves_between_floors,
    "warmup_stable_decay": _warmup_stable_decay,
}
_RISE_THEMSELVES = {"cosine_warmup_with_min_lr", "warmup_stable_decay"}


def learning_rates(
    name: str, *, peak: float, warmup_steps: int, max_steps: int, kwargs: dict | None = None
) -> Schedule:
    """The schedule of this name: number of finished steps -> learning rate of the next step.

    Args:
        name: one of transformers' schedules, except those in ADAPTIVE. All but "constant" rise from 0 over
            `warmup_steps`.
        peak: the highest rate.
        max_steps: where the schedule ends.
        kwargs: the schedule's own arguments, as listed in `config.optimizers.SCHEDULES`.
    """
    span = Span(0 if name == "constant" else warmup_steps, max_steps, peak)
    factor = _SCHEDULES[name](span, **(kwargs or {}))

    def rate(step: int) -> float:
        rising = step < span.warmup and name not in _RISE_THEMSELVES
        return peak * (span.rise(step) if rising else factor(step))

    return rate
