"""Finds and counts tokens that differ between two runs because two candidates were almost equal.

The sampled token has the largest p / q. If the second largest differs from it by less than the logits' rounding error,
either may be sampled.
"""

from __future__ import annotations

import numpy as np

from trl_jax.core.torch_random import TorchGenerator

ROUNDING = 2e-5  # of the difference of two logits, between implementations of a model


def flips(found: np.ndarray, expected: np.ndarray, scores: list[np.ndarray], seed: int | None) -> int:
    """How many rows differ, each starting at a near tie.

    Args:
        found, expected: ids `[B, N]` of new tokens.
        scores: of each step, float32 `[B, V]`, from which `expected` was sampled.
        seed: of the sampling; None for greedy decoding.

    Raises:
        AssertionError: a row differs where the two candidates were not a near tie.
    """
    assert found.shape[0] == expected.shape[0]
    width = min(found.shape[1], expected.shape[1])
    if found.shape == expected.shape and (found == expected).all():
        return 0
    weights = weights_of(scores, seed)
    differing = [row for row in range(len(found)) if (found[row, :width] != expected[row, :width]).any()]
    assert differing, f"the runs are {found.shape[1]} and {expected.shape[1]} tokens long, but equal as far as both go"
    for row in differing:
        step = int(np.flatnonzero(found[row, :width] != expected[row, :width])[0])
        ours, theirs = (weights[step][row, ids[row, step]] for ids in (found, expected))
        assert theirs - ours < ROUNDING, (
            f"row {row}, step {step}: {found[row, step]} for {expected[row, step]}, which led by {theirs - ours:.1e}"
        )
    return len(differing)


def weights_of(scores: list[np.ndarray], seed: int | None) -> list[np.ndarray]:
    """log(p / q) of each step up to a constant: the largest is sampled."""
    if seed is None:
        return list(scores)
    generator = TorchGenerator(seed)
    return [step - np.log(generator.exponential(step.size).reshape(step.shape)) for step in scores]


def least_margin(scores: list[np.ndarray], seed: int | None) -> float:
    """The smallest lead of a sampled token over the second candidate."""
    tops = [np.partition(step, -2, axis=1)[:, -2:] for step in weights_of(scores, seed)]
    return min(float((top[:, 1] - top[:, 0]).min()) for top in tops)
