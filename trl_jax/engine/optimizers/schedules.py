"""Learning rates as functions of the step, in Python floats: what TRL logs, to the last digit."""

from __future__ import annotations

import math
from collections.abc import Callable
from dataclasses import dataclass

Schedule = Callable[[int], float]


@dataclass(frozen=True)
class Span:
    """A schedule's numbers of steps, in its warmup and in all, and its highest rate."""

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
    """Counts steps from 1, so that its last step is the lowest."""
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
    """The schedule of this name: finished steps -> learning rate of the next step.

    Args:
        name: one of transformers' schedules, except those of `engine.adaptive`. All but constant rise from 0 over
            `warmup_steps`.
        peak: the highest rate.
        max_steps: where a schedule reaches its end.
        kwargs: the schedule's own arguments, as `core.arguments.optimizer_rules.SCHEDULES` lists them.
    """
    span = Span(0 if name == "constant" else warmup_steps, max_steps, peak)
    factor = _SCHEDULES[name](span, **(kwargs or {}))

    def rate(step: int) -> float:
        rising = step < span.warmup and name not in _RISE_THEMSELVES
        return peak * (span.rise(step) if rising else factor(step))

    return rate
