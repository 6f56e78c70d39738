"""Steps whose loss or gradient is no number: told of at once, and the end of the run when they do not stop."""

from __future__ import annotations

import logging
from collections.abc import Callable
from typing import Any

import jax
import numpy as np

logger = logging.getLogger(__name__)

PATIENCE = 3  # such steps in a row that end a run


class NonFiniteGuard:
    """Looks at each step while the device is at the next one; after a bad one it waits for each.

    A bad step left weights and moments as they were (`engine.step`), so `explain` still finds what went wrong.

    Args:
        first: number of the first step that will be seen.
        explain: a bad step's batch -> a sentence on where the first value that is no number arises.
        patience: how many such steps in a row end the run.
    """

    def __init__(self, first: int, explain: Callable[[Any], str], patience: int = PATIENCE):
        self._step, self._explain, self._patience = first - 1, explain, patience
        self._pending: tuple[Any, dict[str, Any]] | None = None
        self._bad: list[int] = []

    def see(self, batch: Any, metrics: dict[str, Any]) -> None:
        """A step that has been handed to the device; `batch.rows` are its examples.

        Raises:
            FloatingPointError: it, or the one before, was the last of `patience` bad ones in a row.
        """
        self.settle()
        self._pending = (batch, metrics)
        if self._bad:
            self.settle()

    def settle(self) -> None:
        """Wait for the step that has not been looked at."""
        if self._pending is None:
            return
        (batch, metrics), self._pending = self._pending, None
        self._step += 1
        loss, norm = (float(value) for value in jax.device_get((metrics["loss"], metrics["grad_norm"])))
        if np.isfinite(loss) and np.isfinite(norm):
            self._bad = []
            return
        self._bad.append(self._step)
        what = f"Step {self._step}: loss {loss}, grad_norm {norm}, on rows {_some(batch.rows)} of train_dataset."
        if len(self._bad) < self._patience:
            logger.warning("%s Its update was left out; %d such steps in a row end the run.", what, self._patience)
            return
        raise FloatingPointError(
            f"{what} Steps {_some(self._bad)} in a row gave no number. {self._explain(batch)} The weights are those "
            f"from before step {self._bad[0]}, and every checkpoint is good: lower learning_rate or max_grad_norm, or "
            "look at these rows, and resume."
        )


def _some(numbers: list[int], most: int = 16) -> str:
    shown = ", ".join(map(str, numbers[:most]))
    return shown + (f" and {len(numbers) - most:,} more" if len(numbers) > most else "")
