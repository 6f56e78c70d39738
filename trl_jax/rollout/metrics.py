"""Metrics of generations, in TRL's names and order: collected one by one, logged as means."""

from __future__ import annotations

import math
from collections.abc import Iterator, Sequence
from typing import Any

import numpy as np


class Collected:
    """Numbers by name since the last log, in the order in which names came."""

    def __init__(self, values: dict[str, list[float]] | None = None):
        self.values: dict[str, list[float]] = {} if values is None else values

    def add(self, metrics: Iterator[tuple[str, float]]) -> None:
        for name, value in metrics:
            self.values.setdefault(name, []).append(value)

    def set(self, name: str, value: float) -> None:
        """A number of which the last one is logged."""
        self.values[name] = [value]

    def taken(self) -> dict[str, float | None]:
        """The means of the numbers that are not NaN, None without any; and begin anew."""
        values, self.values = self.values, {}
        real = {name: [value for value in found if not math.isnan(value)] for name, found in values.items()}
        return {name: sum(found) / len(found) if found else None for name, found in real.items()}


def length_metrics(lengths: Sequence[int], truncated: np.ndarray) -> Iterator[tuple[str, float]]:
    """Of completions with so many tokens each, and whether they were broken off, bool `[B]`."""
    lengths = np.asarray(lengths, np.float32)
    yield from _spread("completions", "length", lengths)
    yield "completions/clipped_ratio", float(np.mean(truncated, dtype=np.float32))
    ended = lengths[~truncated]
    yield from _spread("completions", "terminated_length", ended if len(ended) else np.zeros(1, np.float32))


def _spread(group: str, name: str, values: np.ndarray) -> Iterator[tuple[str, float]]:
    for kind, function in (("mean", np.mean), ("min", np.min), ("max", np.max)):
        yield f"{group}/{kind}_{name}", float(function(values))


def reward_metrics(names: Sequence[str], rewards: np.ndarray, advantages: Any) -> Iterator[tuple[str, float]]:
    """Of rewards float32 `[B, F]` of functions with these names, and the `Advantages` that came of them."""
    for name, values in zip(names, rewards.T, strict=True):
        yield f"rewards/{name}/mean", _mean(values)
        yield f"rewards/{name}/std", _std(values)
    yield "reward", _mean(advantages.rewards)
    yield "reward_std", _std(advantages.rewards)
    yield "frac_reward_zero_std", float(np.mean(advantages.zero_std, dtype=np.float32))


def _mean(values: np.ndarray) -> float:
    real = values[~np.isnan(values)]
    return float(real.mean()) if len(real) else math.nan


def _std(values: np.ndarray) -> float:
    """With n - 1; NaN of fewer than two numbers. As in TRL, an infinite number is infinitely far from the others."""
    real = values[~np.isnan(values)]
    if len(real) < 2:
        return math.nan
    with np.errstate(invalid="ignore"):
        squares = np.square(real - real.mean())
    squares = squares[~np.isnan(squares)]
    return float(np.sqrt(squares.mean() * (len(real) / (len(real) - 1)))) if len(squares) else math.nan
