"""One pass over an evaluation set: a mean over pairs, and nothing asked of the device too early."""

from __future__ import annotations

from types import SimpleNamespace

import jax.numpy as jnp
import numpy as np
import pytest

from trl_jax.engine.evaluation import run_evaluation


def batches(*sizes):
    return [SimpleNamespace(arrays=np.float32(i), num_pairs=size) for i, size in enumerate(sizes)]


def evaluate_batch(number):
    return {"loss": jnp.float32(number)}, jnp.full((2,), number)


def test_the_loss_is_a_mean_over_pairs():
    done = run_evaluation(evaluate_batch, batches(4, 4, 2), lambda: None)
    assert (done.loss(), done.total_pairs, done.num_pairs) == (0.8, 10, [4, 4, 2])
    np.testing.assert_array_equal(done.scores, [[0, 0], [1, 1], [2, 2]])
    assert all(isinstance(scores, np.ndarray) for scores in done.scores)


def test_the_bar_moves_once_a_batch():
    moves = []
    run_evaluation(evaluate_batch, batches(4, 4, 2), lambda: moves.append(1))
    assert len(moves) == 3


def test_a_loss_that_is_no_number_stays_one():
    done = run_evaluation(lambda _: ({"loss": jnp.float32("nan")}, jnp.zeros(2)), batches(4), lambda: None)
    assert np.isnan(done.loss())


def test_no_batches():
    with pytest.raises(ValueError, match="^The evaluation set has no rows.$"):
        run_evaluation(evaluate_batch, [], lambda: None)
