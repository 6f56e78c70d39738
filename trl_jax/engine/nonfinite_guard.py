"""Reports steps that were left out because a number in them was not finite, and ends a run that makes no others."""

from __future__ import annotations

import logging
from collections.abc import Callable
from typing import Any

import jax
import numpy as np

logger = logging.getLogger(__name__)

PATIENCE = 3  # such steps in a row that end a run
_OF_FINITE_GRADIENTS = (
    "The gradient is finite, and what the optimizer makes of it is not: learning_rate is too high, or adam_epsilon "
    "lets it divide by zero."
)


class NonFiniteGuard:
    """Looks at the metrics of each step while the device computes the next one; after a bad step it waits for each.

    A bad step left weights and moments as they were (`engine.step`), so `explain` can still find the cause.

    Args:
        first_step: number of the first step that will be checked.
        explain: a bad step's batch -> a sentence on where the first value arises that is not finite.
        patience: number of bad steps in a row that end the run.
    """

    def __init__(self, first_step: int, explain: Callable[[Any], str], patience: int = PATIENCE):
        self._step, self._explain, self._patience = first_step - 1, explain, patience
        self._pending: tuple[Any, dict[str, Any]] | None = None
        self._bad_steps: list[int] = []

    def check(self, batch: Any, metrics: dict[str, Any]) -> None:
        """Check the step before this one, which has been handed to the device; `batch.rows` are its rows.

        Raises:
            FloatingPointError: this step, or the one before, was the last of `patience` bad ones in a row.
        """
        self.settle()
        self._pending = (batch, metrics)
        if self._bad_steps:
            self.settle()

    def settle(self) -> None:
        """Wait for the step that has not been checked, and check it."""
        if self._pending is None:
            return
        (batch, metrics), self._pending = self._pending, None
        self._step += 1
        loss, norm, updated = jax.device_get([metrics[name] for name in ("loss", "grad_norm", "updated")])
        if updated:
            self._bad_steps = []
            return
        self._bad_steps.append(self._step)
        finite = bool(np.isfinite(loss) and np.isfinite(norm))
        values = f"loss {float(loss)}, grad_norm {float(norm)}{', update not finite' if finite else ''}"
        what = f"Step {self._step}: {values}, on rows {_some(batch.rows)} of train_dataset."
        if len(self._bad_steps) < self._patience:
            logger.warning("%s Its update was left out; %d such steps in a row end the run.", what, self._patience)
            return
        raise FloatingPointError(
            f"{what} Steps {_some(self._bad_steps)} in a row gave no number. "
            f"{_OF_FINITE_GRADIENTS if finite else self._explain(batch)} The weights are those from before step "
            f"{self._bad_steps[0]}, and every checkpoint is good: lower learning_rate or max_grad_norm, or look at "
            "these rows, and resume."
        )


def _some(numbers: list[int], shown: int = 16) -> str:
    listed = ", ".join(map(str, numbers[:shown]))
    return listed + (f" and {len(numbers) - shown:,} more" if len(numbers) > shown else "")
