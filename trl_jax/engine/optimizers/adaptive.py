"""Learning rates that follow a metric of the evaluation; their state is part of checkpoints."""

from __future__ import annotations

import math
from collections import deque
from typing import Any


class Plateau:
    """torch's ReduceLROnPlateau: `factor` times the rate after more than `patience` evaluations that were no better.

    A call returns the rate of the next step, whatever its number; `observe` takes the metric of each evaluation.
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
        if self.best is None:
            return not math.isnan(metric) and abs(metric) != math.inf
        if self._relative:
            return self._sign * metric < self._sign * self.best * (1.0 - self._sign * self._threshold)
        return self._sign * metric < self._sign * self.best - self._threshold

    def state(self) -> dict[str, Any]:
        """The state, which JSON can hold."""
        return {name: value for name, value in vars(self).items() if not name.startswith("_")}

    def restore(self, state: dict[str, Any]) -> None:
        vars(self).update(state)


class Greedy(Plateau):
    """GreedyLR (arXiv:2512.14527): Plateau that also divides the rate by `factor` after more than `patience`
    evaluations that were better.

    After `reset_start` more lowerings at `min_lr` it starts again from the first rate. With `smooth` it compares means
    of the last `window_size` metrics.
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
