"""Evaluation chunks: every example is computed once, and its outputs return to its position in its batch."""

from __future__ import annotations

import jax
import numpy as np
import pytest
from datasets import Dataset

from compat_tests.data.loaders import example_loader
from trl_jax.core.outputs import BLOCK
from trl_jax.data import loader as eval_chunks
from trl_jax.data.batch import Columns
from trl_jax.data.loader import EvalChunks

PAD, SIZE = 0, 3
TEXTS = ("first", "second", "third")


def table(examples, seed=0):
    """Texts with common prefixes and different ends, and two numbers."""
    dice = np.random.default_rng(seed)
    rows = []
    for number in range(examples):
        prompt = dice.integers(1, 9, dice.integers(0, 40)).tolist()
        texts = {name: prompt + dice.integers(1, 9, dice.integers(1, 30)).tolist() for name in TEXTS}
        rows.append(texts | {"margin": number / 2, "label": -number})
    return Dataset.from_list(rows)


def loader(data, texts=2, **options):
    columns = Columns(TEXTS[:texts], ("margin", "label"))
    options = {"batch_size": SIZE, "pad_token_id": PAD, "pad_to_multiple_of": None} | options
    return example_loader(data, columns, **options)


def total(ids):
    """A number that distinguishes texts."""
    return float(np.dot(ids, np.arange(1, len(ids) + 1)))


def outputs_of(batch):
    """For each slot, the total of the text that the token read there attends to."""
    batch = jax.tree.map(lambda leaf: leaf[0], batch)
    rows, at = np.divmod(batch.reads, batch.tokens.shape[1])
    if batch.packed is None:
        return np.array([total(batch.tokens[row, : end + 1]) for row, end in zip(rows, at, strict=True)])
    seen, order = batch.packed, batch.positions[0]
    texts = (slice(seen.first[0, place], seen.end[0, place]) for place in at)
    return np.array([total(batch.tokens[0, text][np.argsort(order[text])]) for text in texts])


LAYOUTS = [("padded", False), ("padded", True), ("packed", False), ("shared", False)]


@pytest.mark.parametrize("examples", [1, 3, 11, 20])
@pytest.mark.parametrize("texts", [1, 2, 3])
@pytest.mark.parametrize(("layout", "sort"), LAYOUTS)
def test_every_example_once_and_in_its_place(layout, sort, texts, examples, monkeypatch):
    monkeypatch.setattr(eval_chunks, "CHUNK_BATCHES", 4)
    data = table(examples)
    found, computed, tokens = [], 0, 0
    for chunk in EvalChunks(loader(data, texts, layout=layout), sort=sort):
        computed += sum(int((slots >= 0).sum()) for _, slots in chunk.passes)
        tokens += sum(int((batch.tokens != PAD).sum()) for batch, _ in chunk.passes)
        outputs = chunk.restored([outputs_of(batch) for batch, _ in chunk.passes])
        found += zip(outputs, chunk.batches, chunk.rows, strict=True)
    assert computed == examples
    if texts != 2 or layout != "shared":
        assert tokens == sum(len(ids) for name in TEXTS[:texts] for ids in data[name])
    counts = [batch.num_examples for _, batch, _ in found]
    assert counts == [min(SIZE, examples - start) for start in range(0, examples, SIZE)]
    for number, (outputs, batch, places) in enumerate(found):
        rows, count = data[number * SIZE : (number + 1) * SIZE], batch.num_examples
        assert places == list(range(number * SIZE, number * SIZE + count)) and outputs.shape == (texts * SIZE,)
        for part, name in zip(outputs.reshape(texts, SIZE), TEXTS, strict=False):
            assert part[:count].tolist() == [total(ids) for ids in rows[name]]
        np.testing.assert_allclose(batch.weight, [1 / count] * count + [0] * (SIZE - count), rtol=1e-6)
        assert {name: values[:count].tolist() for name, values in batch.extras.example.items()} == {
            name: rows[name] for name in ("margin", "label")
        }


@pytest.mark.parametrize("shards", [1, 2])
@pytest.mark.parametrize("layout", ["padded", "packed", "shared"])
def test_a_pass_has_one_batch_where_it_is_wanted_whole(layout, shards):
    """With several devices, each has its part of the batch."""
    batches = loader(table(10), layout=layout, batch_size=4, shards=shards, fill_last=False)
    [chunk] = EvalChunks(batches, sort=True, whole=True)
    found = [own[own >= 0].tolist() for _, slots in chunk.passes for own in slots.reshape(shards, -1)]
    size = 4 // shards
    assert [part for part in found if part] == [list(range(at, min(at + size, 10))) for at in range(0, 10, size)]


@pytest.mark.parametrize("texts", [1, 2, 3])
def test_packed_rows_are_full_and_of_one_length(texts):
    batches = loader(table(300), texts, layout="shared")
    passes = [batch for chunk in EvalChunks(batches, sort=False) for batch, _ in chunk.passes]
    length = passes[0].tokens.shape[-1]
    assert {batch.tokens.shape for batch in passes} == {(1, 1, length)} and length % BLOCK == 0
    filled = sum(int((batch.packed.first < length).sum()) for batch in passes)
    assert filled / (length * len(passes)) > 0.9


def test_sorted_rows_are_padded_less():
    places = {
        sort: sum(batch.tokens.size for chunk in EvalChunks(loader(table(60)), sort=sort) for batch, _ in chunk.passes)
        for sort in (False, True)
    }
    assert places[True] < 0.85 * places[False]


@pytest.mark.parametrize("texts", [1, 2, 3])
def test_the_longest_text_is_that_of_trls_batch(texts):
    data = table(20)
    for chunk in EvalChunks(loader(data, texts, layout="shared"), sort=False):
        for batch, slots in chunk.passes:
            for slot, example in enumerate(slots[slots >= 0]):
                rows = data[example // SIZE * SIZE : (example // SIZE + 1) * SIZE]
                longest = max(len(ids) for name in TEXTS[:texts] for ids in rows[name])
                assert batch.packed.longest[0, 0, batch.reads[0, slot]] == longest
