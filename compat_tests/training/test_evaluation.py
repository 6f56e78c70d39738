"""One pass over an evaluation set: a mean over examples, and no early waiting for the device."""

from __future__ import annotations

from types import SimpleNamespace

import jax.numpy as jnp
import numpy as np
import pytest

from trl_jax.training.evaluate import run_batches, run_evaluation


class EvalChunk:
    """A chunk of a single pass with one batch; the outputs of all its examples are the chunk's number."""

    def __init__(self, number, examples):
        self.passes = [(np.float32(number), None)]
        self.batches = [SimpleNamespace(num_examples=examples, divisor=examples)]

    @property
    def rows(self):
        return [[7]]

    def restored(self, outputs):
        return list(outputs)


def chunks(*sizes):
    return [EvalChunk(number, size) for number, size in enumerate(sizes)]


def run(given, after_each=lambda: None):
    def measure(outputs, batch):
        return {"loss": outputs[0], "count": outputs[0] + batch.num_examples}

    return run_evaluation(lambda number: jnp.full((2,), number), measure, given, after_each)


def test_the_loss_is_a_mean_over_examples():
    done = run(chunks(4, 4, 2))
    assert (done.loss(), done.num_examples) == (0.8, 10)
    found = [(batch.num_examples, batch.rows, batch.sums["count"]) for batch in done.batches]
    assert found == [(4, [7], 4), (4, [7], 5), (2, [7], 4)]
    np.testing.assert_array_equal([batch.outputs for batch in done.batches], [[0, 0], [1, 1], [2, 2]])
    assert all(isinstance(batch.outputs, np.ndarray) for batch in done.batches)


def test_a_scripts_own_batches_are_averaged_alike():
    """Batch by batch; outputs may have any structure."""

    def evaluate(number):
        return {"loss": jnp.float32(number)}, {"logits": jnp.full(2, number)}

    batches = [SimpleNamespace(arrays=i, num_examples=size, rows=[i]) for i, size in enumerate((4, 4, 2))]
    done = run_batches(evaluate, batches, lambda: None)
    assert (done.loss(), done.num_examples) == (0.8, 10)
    found = [(batch.rows, batch.outputs["logits"].tolist()) for batch in done.batches]
    assert found == [([0], [0, 0]), ([1], [1, 1]), ([2], [2, 2])]


def test_the_bar_moves_once_a_batch():
    moves = []
    run(chunks(4, 4, 2), lambda: moves.append(1))
    assert len(moves) == 3


def test_a_loss_that_is_no_number_stays_one():
    assert np.isnan(run([EvalChunk(np.nan, 4)]).loss())


def test_no_batches():
    with pytest.raises(ValueError, match="^The evaluation set has no rows."):
        run([])
    with pytest.raises(ValueError, match="^The evaluation set has no rows."):
        run_batches(None, [], lambda: None)
