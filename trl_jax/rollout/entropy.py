"""The coefficient of the entropy bonus, fixed or adapted after each step."""

from __future__ import annotations

import math
from dataclasses import dataclass, field
from typing import Any

import numpy as np

from trl_jax.losses.policy_gradient import next_entropy_coef


@dataclass
class EntropyBonus:
    """coef: of the next step. target: an entropy in nats; the coefficient acts where that of the last step is at most
    this, and is then raised by `delta`, else lowered, within `least` and `most`. None: it is fixed."""

    coef: float
    target: float | None = None
    delta: float = 0.005
    least: float = 0.0
    most: float = 1.0
    entropy: float = math.inf  # of the last step
    logged: list[float] = field(default_factory=list)  # after each step since the last log
    _metrics: dict[str, Any] | None = None

    def next(self) -> float:
        """The coefficient of the step that comes: 0 where an adaptive one rests."""
        self._adapt()
        return self.coef if self.target is None or self.entropy <= self.target else 0.0

    @property
    def now(self) -> float:
        """The coefficient, after all steps so far."""
        self._adapt()
        return self.coef

    def stepped(self, metrics: dict[str, Any]) -> None:
        self._metrics = metrics

    def _adapt(self) -> None:
        """Fetch what the last step measured, only now that it is needed."""
        if self._metrics is None:
            return
        total, tokens = (np.asarray(self._metrics[f"bonus_{name}"], np.float64).sum() for name in ("entropy", "tokens"))
        self._metrics, self.entropy = None, float(total / max(tokens, 1))
        if self.target is not None:
            bounds = {"delta": self.delta, "least": self.least, "most": self.most}
            self.coef = next_entropy_coef(self.coef, self.entropy, target=self.target, **bounds)
        self.logged.append(self.coef)

    def taken(self) -> list[float]:
        """The coefficients after the steps since the last call."""
        self._adapt()
        logged, self.logged = self.logged, []
        return logged

    def state(self) -> dict[str, Any]:
        """For `restore`, as JSON has it."""
        self._adapt()
        return {"coef": self.coef, "entropy": None if math.isinf(self.entropy) else self.entropy, "logged": self.logged}

    def restore(self, state: dict[str, Any]) -> None:
        entropy = state["entropy"]
        self.coef, self.entropy, self.logged = state["coef"], math.inf if entropy is None else entropy, state["logged"]
