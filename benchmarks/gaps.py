"""The differences of two runs, and which of them can be explained by rounding.

A bias that shifts the scores of both answers of a pair (of a score head or the last norm) or all scores of a softmax
(of the keys) has no exact gradient: its computed gradient is rounding noise, which Adam normalizes to full-size
updates. "but gauge" excludes these parameters. They shift all rewards equally, so "less mean" subtracts each run's mean
reward.

The second exception is a weight whose first gradient is below Adam's eps: its first update is proportional to the
gradient, rounding errors included, whereas other weights' first updates have size 1. Exact gradients, computed with TRL
in float64, tell which weights these are.
"""

from __future__ import annotations

import re
from collections.abc import Callable

import numpy as np

from compat_tests.parity.marks import Marks, steps_of, timeless, worst

GAUGE = re.compile(r"key\.bias|k_proj\.bias|k_lin\.bias|(classifier|score|out_proj)\.bias|final_layer_norm\.bias")
FUSED = "query_key_value.bias"  # for each head: query, key, value
LEVELS = ("min_reward", "mean_reward", "max_reward")
WEIGHTS = ("weights", "weights but gauge")
EPS = 1e-8  # default of adam_epsilon
DRIFTS = {"rewards": "rewards less mean", "weights": "weights but gauge", "predictions": "predictions less mean"}


def gaps(mine, other) -> dict[str, float]:
    """The largest gaps over all steps, of the weights, and of evaluation and predictions if both runs have them."""
    every = worst(steps_of(mine.logs), steps_of(other.logs))
    assert not [key for key in ("num_tokens", "step", "learning_rate", "epoch") if every[key]], every
    found = {key: every[key] for key in ("loss", "grad_norm", "margin")}
    found["rewards"] = max(every[key] for key in LEVELS)
    found["rewards less mean"] = max(
        abs(_spread(ours, key) - _spread(theirs, key))
        for ours, theirs in zip(steps_of(mine.logs), steps_of(other.logs), strict=True)
        for key in LEVELS
    )
    assert mine.weights.keys() == other.weights.keys(), sorted(mine.weights.keys() ^ other.weights.keys())
    found["weights"] = max(float(_gap(mine, other, name).max()) for name in other.weights)
    found["weights but gauge"] = max(float(_gap(mine, other, name, GAUGE).max()) for name in other.weights)
    if mine.predictions is None or other.predictions is None:
        return found
    theirs = timeless(other.evaluate_metrics)
    levels = [f"eval_{key}" for key in LEVELS]
    found["evaluation"] = max(abs(mine.evaluate_metrics[key] - theirs[key]) for key in theirs if key not in levels)
    predicted = mine.predictions - other.predictions
    found["predictions"] = float(np.abs(predicted).max())
    found["predictions less mean"] = float(np.abs(predicted - predicted.mean()).max())
    return found


def beyond(
    found: dict[str, float], mine, other, gradients: Callable[[], dict[str, np.ndarray]]
) -> dict[str, list[str]]:
    """The gaps that exceed the parity tolerances: names of numbers, and tensors with the number of such elements. If
    the model has gauge biases, gaps that these can cause are excluded. Tensors whose exceeding elements all have an
    exact first gradient below Adam's eps are listed separately; `gradients` is only called if a weight exceeds its
    tolerance."""
    drifting = any(GAUGE.search(name) or name.endswith(FUSED) for name in other.weights)
    left = [key for key in found if key not in (DRIFTS if drifting else DRIFTS.values()) and key not in WEIGHTS]
    past = [key for key in left if not found[key] <= (Marks.loss if key == "loss" else Marks.rewards)]
    over = {name: ~(_gap(mine, other, name, GAUGE) <= Marks.rewards) for name in other.weights}
    over = {name: elements for name, elements in over.items() if elements.any()}
    exact, slight = gradients() if over else {}, []
    for name, elements in over.items():
        said = f"{name} ({elements.sum()} of {elements.size}"
        largest = np.abs(exact[name][elements]).max() if name in exact else np.inf
        (slight if largest < EPS else past).append(f"{said}, whose first gradient is up to {largest:.1e})")
    return {"beyond": past, "below eps": slight}


def _spread(log: dict, key: str) -> float:
    return log[key] - log["mean_reward"]


def _gap(mine, other, name: str, gauge: re.Pattern | None = None) -> np.ndarray:
    gap = np.abs(mine.weights[name] - other.weights[name])
    if gauge is not None and gauge.search(name):
        return np.zeros_like(gap)
    if gauge is not None and name.endswith(FUSED):
        gap.reshape(-1, 3, gap.size // 12)[:, 1] = 0  # tiny models have four heads
    return gap
