"""Metrics: of a step or an evaluation, of memory and speed, as files, and those that a script logs itself."""

from __future__ import annotations

import datetime
import json
import sys
import time
from collections import defaultdict
from pathlib import Path
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np

from trl_jax.config.base import BaseConfig
from trl_jax.core.files import write_whole
from trl_jax.core.secrets import masked
from trl_jax.tasks.policy import means
from trl_jax.tasks.task import STEP_SUMS, Task, joined
from trl_jax.training.devices import run_device

try:
    import resource
except ImportError:  # Windows
    resource = None


def memory(stage: str, args: BaseConfig) -> dict[str, int]:
    """Peak memory in bytes of this process on the host and on its device, where the system and JAX report it."""
    if args.skip_memory_metrics:
        return {}
    metrics = {}
    if resource is not None:
        unit = 1 if sys.platform == "darwin" else 1024
        metrics[f"{stage}_mem_cpu_peak"] = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss * unit
    on_device = run_device(args).memory_stats() or {}
    if "peak_bytes_in_use" in on_device:
        metrics[f"{stage}_mem_gpu_peak"] = on_device["peak_bytes_in_use"]
    return metrics


# Metrics as transformers' Trainer prints them and writes them to files.


def task_metrics(
    task: Task,
    objective: Any,
    sums: list[dict[str, np.ndarray]],
    split: str,
    *,
    tokens_seen: int,
) -> dict[str, float]:
    """The metrics of the objective, with `num_tokens`, the real tokens of all steps so far, where TRL logs it.

    Args:
        objective: the task, or the user-defined loss that replaces it.
    """
    sums = with_same_names(sums) if any(USER_METRIC in step for step in sums) else sums
    sums = [step for step in sums if step.keys() == sums[-1].keys()]  # steps before a resume may have other sums
    custom = objective is task and sums and USER_METRIC in sums[-1]
    metrics = user_metrics(task, sums, split) if custom else objective.metrics(sums, split)
    tokens = {"num_tokens": float(tokens_seen)}
    if task.head == "score" or task.num_tokens_after not in metrics:
        return tokens | metrics
    in_order = {}
    for name, value in metrics.items():
        in_order[name] = value
        if name == task.num_tokens_after:
            in_order |= tokens
    return in_order


def metrics_format(metrics: dict[str, Any]) -> dict[str, Any]:
    """Format times as h:mm:ss, bytes as MB, FLOPs as GF, and other numbers with four decimals."""
    return {name: _readable(name, value) for name, value in metrics.items()}


def log_metrics(split: str, metrics: dict[str, Any]) -> None:
    """Print the metrics of "train", "eval" or "test" in columns, sorted by name."""
    formatted = metrics_format(metrics)
    names, values = (max(map(len, map(str, entries)), default=0) for entries in (formatted, formatted.values()))
    print(f"***** {split} metrics *****")
    for name in sorted(formatted):
        print(f"  {name:<{names}} = {formatted[name]:>{values}}")


def save_metrics(folder: Path, split: str, metrics: dict[str, Any], combined: bool = True) -> None:
    """Write `<split>_results.json` into the folder, and with `combined` also update all_results.json there."""
    _write(folder / f"{split}_results.json", metrics)
    if combined:
        path = folder / "all_results.json"
        exists = path.exists() and not path.is_symlink()  # a link is replaced, not followed
        _write(path, (_read(path) if exists else {}) | metrics)


def speed_metrics(prefix: str, start: float, num_samples: float, num_steps: float) -> dict[str, float]:
    """transformers' speed metrics since `start`, from time.monotonic(), as the system clock may be set back."""
    seconds = time.monotonic() - start
    metrics = {f"{prefix}_runtime": round(seconds, 4)}
    if seconds > 0:
        metrics |= {f"{prefix}_samples_per_second": round(num_samples / seconds, 3)}
        metrics |= {f"{prefix}_steps_per_second": round(num_steps / seconds, 3)}
    return metrics


def _readable(name: str, value: Any) -> Any:
    if "_mem_" in name:
        return f"{value >> 20}MB"
    if "_runtime" in name:
        whole, rest = divmod(value, 1)
        return f"{datetime.timedelta(seconds=int(whole))}.{int(rest * 100):02d}"
    if name == "total_flos":
        return f"{int(value) >> 30}GF"
    return round(value, 4) if isinstance(value, float) else value


def _read(path: Path) -> dict[str, Any]:
    try:
        metrics = json.loads(path.read_text(encoding="utf-8"))
        return {**metrics}
    except (OSError, ValueError, TypeError, RecursionError) as error:
        raise ValueError(
            f"{path} holds no metrics to add to ({error}): expected a JSON object. Move it away, or pass "
            "combined=False."
        ) from error


def _write(path: Path, metrics: dict[str, Any]) -> None:
    write_whole(path, json.dumps(masked(metrics), indent=4, sort_keys=True))


# Metrics that a script logs, in its loss or elsewhere.


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
        prefixes = dict.fromkeys(self, before) | {name: prefix for name, (prefix, _) in self._held.items()}
        computed = {prefixes[name] + name: float(sum(values) / len(values)) for name, values in self.items() if values}
        if clashes := sorted(name for name in self._appended if before + name in computed.keys() & logs.keys()):
            raise _appended_error(clashes[0])
        self.clear()
        self._appended.clear()
        self._held.clear()
        return computed


def _appended_error(name: str) -> ValueError:
    return ValueError(
        f"A script appended to _metrics[mode][{name!r}] outside of its loss, and trl_jax logs {name!r} itself. Use "
        "another name, or replace it: self._metrics[mode][name] = [value]."
    )


USER_METRIC = "script/"  # prefix of the sums that a user-defined loss logs
_PARTS = "parts/"


def user_metrics(task: Task, sums: list[dict[str, np.ndarray]], split: str) -> dict[str, float | None]:
    """The task's metrics, if its loss was computed, and the user's own from `user_sums`, each averaged over the
    micro-batches that logged it (NaN means not logged)."""
    names = [name for name in (sums[0] if sums else ()) if name.startswith(USER_METRIC)]
    of_task = [{name: value for name, value in step.items() if name not in names} for step in sums]
    metrics = task.metrics(of_task, split) if of_task and of_task[0].keys() - STEP_SUMS else {}
    if not names:
        return metrics
    logged = [name for name in names if name != USER_METRIC]
    parts = [  # for each metric, the parts of micro-batches (one per device) in which it was logged
        step | {_PARTS + name: np.where(np.isnan(step[name]), 0, step[USER_METRIC]) for name in logged} for step in sums
    ]
    totals = joined(parts, dict.fromkeys([*names, *(_PARTS + name for name in logged)], np.nansum), count=USER_METRIC)
    with np.errstate(invalid="ignore"):  # 0 / 0 if it was logged in no part
        shares = {name.removeprefix(USER_METRIC): totals[name] / totals[_PARTS + name] for name in logged}
    return metrics | means(shares)


def with_same_names(sums: list[dict[str, Any]]) -> list[dict[str, Any]]:
    """Give all dicts the same names, with NaN for metrics that were not logged."""
    names = dict.fromkeys(name for step in sums for name in step if name.startswith(USER_METRIC))

    def missing(step: dict[str, Any], name: str) -> np.ndarray:
        return np.full(np.shape(step.get(USER_METRIC, 0)), 0 if name == USER_METRIC else np.nan, np.float32)

    return [{name: missing(step, name) for name in names if name not in step} | step for step in sums]


def user_sums(metrics: dict[str, list[Any]], members: jax.Array) -> dict[str, jax.Array]:
    """The metrics that a user-defined loss logged, as sums over micro-batches.

    Args:
        members: bool `[M]`, whether the pass belongs to each micro-batch; a scalar if the pass is a micro-batch itself.
    """
    sums = {USER_METRIC: members.astype(jnp.float32)}
    for name, values in metrics.items():
        value = jnp.mean(jnp.stack([jnp.asarray(value, jnp.float32).reshape(()) for value in values]))
        sums[USER_METRIC + name] = jnp.where(members, jax.lax.stop_gradient(value), 0)
    return sums
