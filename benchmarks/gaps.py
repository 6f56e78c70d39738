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


def gaps(ours, theirs) -> dict[str, float]:
    """The largest gaps over all steps, of the weights, and of evaluation and predictions if both runs have them."""
    largest = worst(steps_of(ours.logs), steps_of(theirs.logs))
    assert not [key for key in ("num_tokens", "step", "learning_rate", "epoch") if largest[key]], largest
    result = {key: largest[key] for key in ("loss", "grad_norm", "margin")}
    result["rewards"] = max(largest[key] for key in LEVELS)
    result["rewards less mean"] = max(
        abs(_spread(our_step, key) - _spread(their_step, key))
        for our_step, their_step in zip(steps_of(ours.logs), steps_of(theirs.logs), strict=True)
        for key in LEVELS
    )
    assert ours.weights.keys() == theirs.weights.keys(), sorted(ours.weights.keys() ^ theirs.weights.keys())
    result["weights"] = max(float(_gap(ours, theirs, name).max()) for name in theirs.weights)
    result["weights but gauge"] = max(float(_gap(ours, theirs, name, GAUGE).max()) for name in theirs.weights)
    if ours.predictions is None or theirs.predictions is None:
        return result
    our_metrics, their_metrics = ours.evaluate_metrics, timeless(theirs.evaluate_metrics)
    compared = their_metrics.keys() - {f"eval_{key}" for key in LEVELS}
    result["evaluation"] = max(abs(our_metrics[key] - their_metrics[key]) for key in compared)
    predicted = ours.predictions - theirs.predictions
    result["predictions"] = float(np.abs(predicted).max())
    result["predictions less mean"] = float(np.abs(predicted - predicted.mean()).max())
    return result


def beyond(
    result: dict[str, float], ours, theirs, gradients: Callable[[], dict[str, np.ndarray]]
) -> dict[str, list[str]]:
    """The gaps that exceed the parity tolerances: names of numbers, and tensors with the number of such elements. If
    the model has gauge biases, gaps that these can cause are excluded. Tensors whose exceeding elements all have an
    exact first gradient below Adam's eps are listed separately; `gradients` is only called if a weight exceeds its
    tolerance."""
    drifting = any(GAUGE.search(name) or name.endswith(FUSED) for name in theirs.weights)
    compared = [key for key in result if key not in (DRIFTS if drifting else DRIFTS.values()) and key not in WEIGHTS]
    exceeding = [key for key in compared if not result[key] <= (Marks.loss if key == "loss" else Marks.rewards)]
    elements_beyond = {name: ~(_gap(ours, theirs, name, GAUGE) <= Marks.rewards) for name in theirs.weights}
    elements_beyond = {name: elements for name, elements in elements_beyond.items() if elements.any()}
    exact, slight = gradients() if elements_beyond else {}, []
    for name, elements in elements_beyond.items():
        text = f"{name} ({elements.sum()} of {elements.size}"
        largest = np.abs(exact[name][elements]).max() if name in exact else np.inf
        (slight if largest < EPS else exceeding).append(f"{text}, whose first gradient is up to {largest:.1e})")
    return {"beyond": exceeding, "below eps": slight}


def _spread(log: dict, key: str) -> float:
    return log[key] - log["mean_reward"]


def _gap(ours, theirs, name: str, gauge: re.Pattern | None = None) -> np.ndarray:
    gap = np.abs(ours.weights[name] - theirs.weights[name])
    if gauge is not None and gauge.search(name):
        return np.zeros_like(gap)
    if gauge is not None and name.endswith(FUSED):
        gap.reshape(-1, 3, gap.size // 12)[:, 1] = 0  # tiny models have four heads
    return gap
