"""Batches of a step: rows in order, counts of real examples and tokens, and streams that restart each epoch."""

from __future__ import annotations

import jax
import numpy as np
import pytest
from datasets import Dataset, IterableDataset

from compat_tests.data.loaders import example_loader
from trl_jax.data.batch import Columns, Extras
from trl_jax.data.loader import epoch_order

PAD = 0
TEXTS = ("first", "second", "third")


def rows(n, **numbers):
    """Row i: texts of i % 3 + 1, 2 and 4 tokens i + 1, and the number i / 2 under each name."""
    return [
        {"first": [i + 1] * (i % 3 + 1), "second": [i + 1] * 2, "third": [i + 1] * 4, "other": "text"}
        | {name: factor * i / 2 for name, factor in numbers.items()}
        for i in range(n)
    ]


def table(n, **numbers):
    return Dataset.from_list(rows(n, **numbers))


def stream(n):
    return IterableDataset.from_generator(lambda: iter(rows(n)))


def loader(dataset, texts=2, **options):
    columns = Columns(TEXTS[:texts], ("margin", "label"))
    options = {"batch_size": 2, "pad_token_id": PAD, "pad_to_multiple_of": None} | options
    return example_loader(dataset, columns, **options)


def order(batches):
    """The rows in their order in the batches, without padding."""
    found = []
    for batch in batches:
        real = batch.arrays.weight > 0
        found += (batch.arrays.tokens[:, : real.shape[1], 0][real] - 1).tolist()
    return found


both = pytest.mark.parametrize("form", [table, stream])


@both
@pytest.mark.parametrize("texts", [1, 2, 3])
def test_rows_come_in_order(form, texts):
    assert order(loader(form(7), texts, accumulation=2)) == list(range(7))


def test_shuffled_rows_come_in_the_order_of_their_epoch():
    batches = loader(table(9), shuffle=True, seed=3)
    for epoch in (0, 2):
        batches.set_epoch(epoch)
        assert order(batches) == epoch_order(9, seed=3, epoch=epoch, shuffle=True).tolist()
        assert order(batches) == order(batches)


@both
def test_what_is_counted(form):
    """7 rows, 2 per micro-batch, 3 micro-batches per step: the last step has a single example."""
    first, last = loader(form(7), accumulation=3)
    assert (first.num_micro_batches, first.num_examples, first.num_tokens) == (3, 6, 6 * 2 + 2 * (1 + 2 + 3))
    assert (last.num_micro_batches, last.num_examples, last.num_tokens) == (1, 1, 3)
    assert first.num_padded_tokens == 4 * 2 + 4 * 3 + 4 * 3 and last.num_padded_tokens == 2 * 2
    assert first.arrays.weight.shape == last.arrays.weight.shape == (3, 2)
    np.testing.assert_allclose(first.arrays.weight, 1 / 6)
    np.testing.assert_allclose(last.arrays.weight, [[1, 0], [0, 0], [0, 0]])


def test_tokens_of_the_first_texts_alone_may_count():
    columns = Columns(TEXTS[:2], num_primary_texts=1)
    [step] = example_loader(table(3), columns, batch_size=3, pad_token_id=PAD, pad_to_multiple_of=None)
    assert (step.num_tokens, step.num_primary_tokens, step.num_padded_tokens) == (6 + 6, 6, 9)


@pytest.mark.parametrize("layout", ["padded", "packed", "shared"])
@pytest.mark.parametrize(("texts", "tokens", "padded"), [(1, 12, 2 * 2 + 2 * 3 + 2 * 3), (3, 48, 6 * 4 * 3)])
def test_what_is_counted_of_other_numbers_of_texts(texts, tokens, padded, layout):
    """Each text counts fully, because no prefix is shared."""
    [step] = loader(table(6), texts, accumulation=3, layout=layout)
    assert (step.num_examples, step.num_tokens, step.num_padded_tokens) == (6, tokens, padded)
    assert step.num_places == step.arrays.tokens.size and (step.arrays.tokens != PAD).sum() == tokens
    assert sorted(row for own in step.passes for row in own) == step.rows == list(range(6))
    held = (step.arrays.weight > 0)[:, None] * step.arrays.lengths.reshape(3, texts, -1)
    assert held.sum() == tokens


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


def test_a_stream_goes_on_behind_rows_of_the_same_digest_alone():
    batches = loader(stream(8))
    first, second, *_ = batches
    batches.set_epoch(0, 4, second.rows_digest)
    assert order(batches) == [4, 5, 6, 7]
    batches.set_epoch(0, 4, first.rows_digest)
    with pytest.raises(ValueError, match="not the stream that the checkpoint was trained on: its first 4 rows"):
        next(iter(batches))


@pytest.mark.parametrize("numbers", [{}, {"label": -1}, {"margin": 1, "label": -1}])
def test_extras_are_those_numbers_that_the_rows_have(numbers):
    [batch] = loader(table(2, **numbers))
    assert list(batch.arrays.extras.example) == list(numbers)
    for name, factor in numbers.items():
        np.testing.assert_array_equal(batch.arrays.extras.example[name], [[0.0, factor / 2]])


def test_a_task_may_make_other_examples_of_its_rows():
    columns = Columns(("first",))
    batches = example_loader(
        table(2), columns, lambda row: columns.example(row)._replace(extras=Extras({"length": len(row["first"])})),
        batch_size=2, pad_token_id=PAD, pad_to_multiple_of=None,
    )  # fmt: skip
    [batch] = batches
    np.testing.assert_array_equal(batch.arrays.extras.example["length"], [[1, 2]])


def test_a_step_is_laid_out_without_a_dataset():
    """Examples from elsewhere only need the layout, and are identified by their own indices."""
    steps = loader(table(4, margin=1, label=-1), accumulation=2, layout="packed")
    [wanted] = steps
    group = [[indexed._replace(index=indexed.index + 10) for indexed in batch] for batch in next(iter(steps.groups()))]
    made = steps.step_layout.step(group, 0)
    assert made.rows == [10, 11, 12, 13]
    jax.tree.map(np.testing.assert_array_equal, made.arrays, wanted.arrays)
