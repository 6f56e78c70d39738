"""Decides which checkpoint is the best so far."""

from __future__ import annotations

from typing import Any

from transformers.trainer_callback import TrainerState
from transformers.trainer_utils import SaveStrategy


def is_new_best(metrics: dict[str, float], args: Any, state: TrainerState) -> bool:
    """Whether `metric_for_best_model` beats every earlier value; remembers it in `state` if so. A metric that is
    NaN, or None because nothing was measured, never does.

    Raises:
        KeyError: the evaluation did not report that metric; the message lists those it did.
    """
    if args.metric_for_best_model is None:
        return False
    name = args.metric_for_best_model
    name = name if name.startswith("eval_") else f"eval_{name}"
    if name not in metrics:
        raise KeyError(
            f"metric_for_best_model={args.metric_for_best_model!r} asks for {name}, which the evaluation does not "
            f"report. Reported: {', '.join(metrics)}."
        )
    worst = float("-inf") if args.greater_is_better else float("inf")
    value, best = metrics[name], worst if state.best_metric is None else state.best_metric
    if value is None or not (value > best if args.greater_is_better else value < best):
        return False
    state.best_metric = value
    if args.save_strategy != SaveStrategy.NO:
        state.best_global_step = state.global_step
    return True
