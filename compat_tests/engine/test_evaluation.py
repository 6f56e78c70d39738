"""One pass over an evaluation set: a mean over pairs, and nothing asked of the device too early."""

from __future__ import annotations

from types import SimpleNamespace

import jax.numpy as jnp
import numpy as np
import pytest

from trl_jax.engine.evaluation import run_evaluation


class Window:
    """A window of one pass, which scores with its number every pair of its one batch."""

    def __init__(self, number, pairs):
        self.passes, self.batches = [(np.float32(number), None)], [SimpleNamespace(num_pairs=pairs)]

    @property
    def rows(self):
        return [[7]]

    def restored(self, scores):
        return list(scores)


def windows(*sizes):
    return [Window(number, size) for number, size in enumerate(sizes)]


def run(given, after_each=lambda: None):
    def measure(scores, batch):
        return {"loss": scores[0]}

    return run_evaluation(lambda number: jnp.full((2,), number), measure, given, after_each)


def test_the_loss_is_a_mean_over_pairs():
    done = run(windows(4, 4, 2))
    assert (done.loss(), done.total_pairs, done.num_pairs) == (0.8, 10, [4, 4, 2])
    np.testing.assert_array_equal(done.scores, [[0, 0], [1, 1], [2, 2]])
    assert all(isinstance(scores, np.ndarray) for scores in done.scores)


def test_the_bar_moves_once_a_batch():
    moves = []
    run(windows(4, 4, 2), lambda: moves.append(1))
    assert len(moves) == 3


def test_a_loss_that_is_no_number_stays_one():
    assert np.isnan(run([Window(np.nan, 4)]).loss())


def test_no_batches():
    with pytest.raises(ValueError, match="^The evaluation set has no rows.$"):
        run([])
