"""Batches of a step: the rows in order, real pairs and tokens counted, streams begun anew each epoch."""

from __future__ import annotations

import numpy as np
import pytest
from datasets import Dataset, IterableDataset

from trl_jax.data.loader import PreferenceLoader
from trl_jax.data.order import epoch_order

PAD = 0


def rows(n, margin=False):
    """Row i: i + 1 in every place, i % 3 + 1 chosen tokens and 2 rejected ones."""
    made = [
        {"chosen_ids": [i + 1] * (i % 3 + 1), "rejected_ids": [i + 1] * 2, "other": "text"} for i in range(n)
    ]
    return [row | {"margin": i / 2} for i, row in enumerate(made)] if margin else made


def table(n, **how):
    return Dataset.from_list(rows(n, **how))


def stream(n):
    return IterableDataset.from_generator(lambda: iter(rows(n)))


def loader(dataset, **how):
    return PreferenceLoader(
        dataset, **({"batch_size": 2, "pad_token_id": PAD, "pad_to_multiple_of": None} | how)
    )


def order(batches):
    """The rows in the order in which they stand in the batches, pads left out."""
    found = []
    for batch in batches:
        real = batch.arrays.weight > 0
        found += (batch.arrays.tokens[:, : real.shape[1], 0][real] - 1).tolist()
    return found


both = pytest.mark.parametrize("form", [table, stream])


@both
def test_rows_come_in_order(form):
    assert order(loader(form(7), accumulation=2)) == list(range(7))


def test_shuffled_rows_come_in_the_order_of_their_epoch():
    batches = loader(table(9), shuffle=True, seed=3)
    for epoch in (0, 2):
        batches.set_epoch(epoch)
        assert order(batches) == epoch_order(9, seed=3, epoch=epoch, shuffle=True).tolist()
        assert order(batches) == order(batches)


@both
def test_what_is_counted(form):
    """7 rows, 2 a micro-batch, 3 micro-batches a step: the last step is one pair."""
    first, last = loader(form(7), accumulation=3)
    assert (first.num_micro_batches, first.num_pairs, first.num_tokens) == (
        3,
        6,
        6 * 2 + 1 + 2 + 3 + 1 + 2 + 3,
    )
    assert (last.num_micro_batches, last.num_pairs, last.num_tokens) == (1, 1, 3)
    assert first.num_padded_tokens == 4 * 2 + 4 * 3 + 4 * 3 and last.num_padded_tokens == 2 * 2
    assert first.arrays.weight.shape == last.arrays.weight.shape == (3, 2)
    np.testing.assert_allclose(first.arrays.weight, 1 / 6)
    np.testing.assert_allclose(last.arrays.weight, [[1, 0], [0, 0], [0, 0]])


@both
@pytest.mark.parametrize(("n", "kept"), [(7, 6), (6, 6), (1, 0)])
def test_drop_last(form, n, kept):
    assert order(loader(form(n), drop_last=True)) == list(range(kept))


@pytest.mark.parametrize("n", [1, 2, 6, 7, 12])
@pytest.mark.parametrize("accumulation", [1, 2, 3])
@pytest.mark.parametrize("drop_last", [True, False])
def test_the_length_is_the_number_of_steps(n, accumulation, drop_last):
    batches = loader(table(n), accumulation=accumulation, drop_last=drop_last)
    assert len(batches) == len(list(batches))


def test_a_stream_has_no_length():
    with pytest.raises(TypeError):
        len(loader(stream(4)))


def test_a_stream_begins_again_and_is_told_the_epoch():
    source = stream(64).shuffle(seed=1, buffer_size=64)
    batches = loader(source)
    found = []
    for epoch in (0, 1, 0):
        batches.set_epoch(epoch)
        found.append(order(batches))
    assert sorted(found[0]) == sorted(found[1]) == list(range(64))
    assert found[0] == found[2] != found[1]


def test_margins_and_other_columns():
    [batch] = loader(table(2, margin=True))
    np.testing.assert_array_equal(batch.arrays.margin, [[0.0, 0.5]])
    [batch] = loader(table(2))
    assert batch.arrays.margin is None
