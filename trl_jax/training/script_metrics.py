"""Metrics that a script logs, in its loss or elsewhere."""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Callable
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np

from trl_jax.tasks.policy import means
from trl_jax.tasks.task import STEP_SUMS, Task, joined
from trl_jax.training.state import Setup


class ScriptMetrics(defaultdict):
    """Lists of numbers by name, as in TRL's trainers: what a script logs outside of its loss and, while a user-defined
    `log` runs, the trainer's own metrics."""

    def __init__(self):
        super().__init__(list)
        self._appended = set()
        self._held: dict[str, tuple[str, list]] = {}  # of the trainer's own metrics: the prefix in logs, and the list

    def __missing__(self, name: str) -> list:
        self._appended.add(name)
        return super().__missing__(name)

    def hold(self, metrics: dict[str, float], before: str) -> None:
        """Add the trainer's own metrics, as lists of one number, until `release`. `taken` gives their names the prefix
        `before`. Lists that the script has set stay.

        Raises:
            ValueError: a number was appended to one of these metrics.
        """
        for name, value in metrics.items():
            if self.get(name) and name in self._appended:
                raise _appended_error(name)
            self._appended.discard(name)
            if not self.get(name):
                self[name] = [value]
            self._held[name] = before, self[name]

    def release(self) -> None:
        """Remove the trainer's own metrics, which `taken` has removed already if the script called `super().log`."""
        for name, (_, values) in self._held.items():
            if self.get(name) is values:
                del self[name]
        self._held.clear()

    def taken(self, logs: dict[str, Any], before: str) -> dict[str, float]:
        """Return the mean of each list, its name prefixed with `before`, and clear the lists.

        Raises:
            ValueError: a number was appended to a metric that `logs` already contains, or that the trainer logs.
        """
        if longer := sorted(name for name, (_, held) in self._held.items() if self.get(name) is held and held[1:]):
            raise _appended_error(longer[0])
        prefixes = dict.fromkeys(self, before) | {name: own for name, (own, _) in self._held.items()}
        found = {prefixes[name] + name: float(sum(values) / len(values)) for name, values in self.items() if values}
        if own := sorted(name for name in self._appended if before + name in found.keys() & logs.keys()):
            raise _appended_error(own[0])
        self.clear()
        self._appended.clear()
        self._held.clear()
        return found


def _appended_error(name: str) -> ValueError:
    return ValueError(
        f"A script appended to _metrics[mode][{name!r}] outside of its loss, and trl_jax logs {name!r} itself. Use "
        "another name, or replace it: self._metrics[mode][name] = [value]."
    )


OWN_METRIC = "script/"  # prefix of the sums that a user-defined loss logs
_PARTS = "parts/"


def own_metrics(task: Task, sums: list[dict[str, np.ndarray]], split: str) -> dict[str, float | None]:
    """The task's metrics, if its loss was computed, and the user's own from `own_sums`, each averaged over the
    micro-batches that logged it (NaN means not logged)."""
    names = [name for name in (sums[0] if sums else ()) if name.startswith(OWN_METRIC)]
    of_task = [{name: value for name, value in step.items() if name not in names} for step in sums]
    found = task.metrics(of_task, split) if of_task and of_task[0].keys() - STEP_SUMS else {}
    if not names:
        return found
    logged = [name for name in names if name != OWN_METRIC]
    parts = [  # for each metric, the parts of micro-batches (one per device) in which it was logged
        step | {_PARTS + name: np.where(np.isnan(step[name]), 0, step[OWN_METRIC]) for name in logged} for step in sums
    ]
    totals = joined(parts, dict.fromkeys([*names, *(_PARTS + name for name in logged)], np.nansum), count=OWN_METRIC)
    with np.errstate(invalid="ignore"):  # 0 / 0 if it was logged in no part
        shares = {name.removeprefix(OWN_METRIC): totals[name] / totals[_PARTS + name] for name in logged}
    return found | means(shares)


def with_same_names(sums: list[dict[str, Any]]) -> list[dict[str, Any]]:
    """Give all dicts the same names, with NaN for metrics that were not logged."""
    names = dict.fromkeys(name for one in sums for name in one if name.startswith(OWN_METRIC))

    def missing(one: dict[str, Any], name: str) -> np.ndarray:
        return np.full(np.shape(one.get(OWN_METRIC, 0)), 0 if name == OWN_METRIC else np.nan, np.float32)

    return [{name: missing(one, name) for name in names if name not in one} | one for one in sums]


def own_sums(metrics: dict[str, list[Any]], members: jax.Array) -> dict[str, jax.Array]:
    """The metrics that a user-defined loss logged, as sums over micro-batches.

    Args:
        members: bool `[M]`, whether the pass belongs to each micro-batch; a scalar if the pass is a micro-batch itself.
    """
    own = {OWN_METRIC: members.astype(jnp.float32)}
    for name, values in metrics.items():
        value = jnp.mean(jnp.stack([jnp.asarray(value, jnp.float32).reshape(()) for value in values]))
        own[OWN_METRIC + name] = jnp.where(members, jax.lax.stop_gradient(value), 0)
    return own


class OwnMetrics:
    """Metrics that a user-defined DPO or KTO loss logs; the loss itself is computed by `UserLoss`.

    current: the `BoundModel` of the loss that is being traced; None outside of tracing.
    """

    def __init__(self, setup: Callable[[], Setup]):
        self._setup, self.current = setup, None

    def values(self) -> tuple:
        return ()

    def finish(self, results: dict[str, Any]) -> dict[str, Any]:
        """Return a step's results unchanged: they are already complete."""
        return results

    def loss(self, outputs: Any, batch: Any) -> tuple[jax.Array, dict[str, jax.Array]]:
        """The task's loss, used to locate the first non-finite value."""
        return self._setup().task.loss(outputs, batch)

    def metrics(self, sums: list[dict[str, np.ndarray]], split: str) -> dict[str, float | None]:
        return own_metrics(self._setup().task, sums, split)
