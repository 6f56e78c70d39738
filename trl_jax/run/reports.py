"""Metrics for people and for files, as transformers' Trainer prints and writes them."""

from __future__ import annotations

import datetime
import json
import time
from pathlib import Path
from typing import Any

import numpy as np

from trl_jax.core.files.whole_file import write_whole
from trl_jax.core.secrets import masked
from trl_jax.engine.checkpoints.plain_files import is_file
from trl_jax.run.state import RunState


def task_metrics(run: RunState, sums: list[dict[str, np.ndarray]], split: str) -> dict[str, float]:
    """The task's metrics, and where TRL logs it `num_tokens`, the real tokens of all steps so far."""
    task = run.task
    sums = [step for step in sums if step.keys() == sums[-1].keys()]  # before a resume, other arguments had others
    if run.rollout is not None:
        return run.rollout.logged(task.metrics(sums, split), run.state.global_step)
    metrics, tokens = task.metrics(sums, split), {"num_tokens": float(run.progress.tokens_seen)}
    if task.head == "score" or task.num_tokens_after not in metrics:
        return tokens | metrics
    names = list(metrics)
    behind = names[names.index(task.num_tokens_after) + 1 :]
    return {name: metrics[name] for name in names if name not in behind} | tokens | {n: metrics[n] for n in behind}


def metrics_format(metrics: dict[str, Any]) -> dict[str, Any]:
    """Times as h:mm:ss, bytes as MB, operations as GF, other numbers with four digits."""
    return {name: _readable(name, value) for name, value in metrics.items()}


def log_metrics(split: str, metrics: dict[str, Any]) -> None:
    """Print the metrics of "train", "eval" or "test" in columns, by name."""
    shown = metrics_format(metrics)
    names, values = (max(map(len, map(str, entries)), default=0) for entries in (shown, shown.values()))
    print(f"***** {split} metrics *****")
    for name in sorted(shown):
        print(f"  {name:<{names}} = {shown[name]:>{values}}")


def save_metrics(folder: Path, split: str, metrics: dict[str, Any], combined: bool = True) -> None:
    """Write `<split>_results.json` into the folder, and add to all_results.json there where `combined`."""
    _write(folder / f"{split}_results.json", metrics)
    if combined:
        path = folder / "all_results.json"
        _write(path, (_read(path) if is_file(path) else {}) | metrics)


def speed_metrics(prefix: str, start: float, num_samples: float, num_steps: float) -> dict[str, float]:
    """transformers' metrics of speed, since `start` of time.monotonic: the computer's clock may be set back."""
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
            f"{path} holds no metrics to add to ({error}): wanted an object of JSON. Move it away, or pass "
            "combined=False."
        ) from error


def _write(path: Path, metrics: dict[str, Any]) -> None:
    write_whole(path, json.dumps(masked(metrics), indent=4, sort_keys=True))
