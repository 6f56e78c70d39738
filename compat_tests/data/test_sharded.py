"""A step's examples on several devices: each once, with the same weight as on a single device."""

from __future__ import annotations

import jax
import numpy as np
import pytest
from datasets import Dataset

from compat_tests.data.loaders import example_loader
from trl_jax.data.batch import Columns, last_real_token
from trl_jax.data.layout_plan import ViewBuckets
from trl_jax.data.loader import EvalChunks
from trl_jax.data.packed import by_shard, filled

PAD, SHARDS = 0, 4
TEXTS = ("first", "second", "third")

every_number_of_texts = pytest.mark.parametrize("texts", [1, 2, 3])
every_layout = pytest.mark.parametrize("layout", ["padded", "packed", "shared"])


def table(examples):
    """Texts with common prefixes, sometimes ending in padding, and two numbers."""
    dice, rows = np.random.default_rng(1), []
    for number in range(examples):
        begin = dice.integers(1, 9, dice.integers(1, 20)).tolist()
        texts = {name: begin + dice.integers(0, 9, dice.integers(2, 40)).tolist() for name in TEXTS}
        rows.append(texts | {"margin": number / 2, "label": number + 1.0})
    return Dataset.from_list(rows)


def loader(data, texts=2, *, shards=SHARDS, **options):
    columns = Columns(TEXTS[:texts], ("margin", "label"))
    options = {"batch_size": 8, "pad_token_id": PAD, "pad_to_multiple_of": None} | options
    return example_loader(data, columns, shards=shards, **options)


def text_read_at(batch, read):
    """The ids up to a flat index into one device's part of a pass, in the order of the text."""
    row, at = divmod(int(read), batch.tokens.shape[1])
    if batch.packed is None:
        return batch.tokens[row, : at + 1].tolist()
    run = slice(batch.packed.first[row, at], batch.packed.end[row, at])
    return batch.tokens[row, run][np.argsort(batch.positions[row, run])].tolist()


@every_layout
@every_number_of_texts
@pytest.mark.parametrize("accumulation", [1, 3])
def test_every_example_once_with_its_texts_and_its_weight(layout, texts, accumulation):
    """The last step is filled with the first examples, as in TRL's ranks: 13 examples, micro-batches of 4 x 2, 2 per
    step."""
    data = table(13)
    steps = list(loader(data, texts, layout=layout, accumulation=accumulation))
    assert [row for step in steps for row in step.rows] == [*range(13), 0, 1, 2]
    assert sum(step.num_micro_batches for step in steps) == 2
    for step in steps:
        arrays, found = step.arrays, []
        assert arrays.tokens.shape[:2] == arrays.weight.shape[:2] == (accumulation, SHARDS)
        kept = arrays.weight > 0
        for place, slot in zip(*np.nonzero(kept.reshape(-1, kept.shape[2])), strict=True):
            own = jax.tree.map(lambda leaf, place=place: leaf[divmod(place, SHARDS)], arrays)
            reads, lengths = (leaf.reshape(texts, -1)[:, slot] for leaf in (own.reads, own.lengths))
            row = int(own.extras.example["label"][slot]) - 1
            assert row in step.passes[place] and own.extras.example["margin"][slot] == row / 2
            ids = [data[row][name] for name in TEXTS[:texts]]
            assert [text_read_at(own, read) for read in reads] == [
                text[: last_real_token(text, PAD) + 1] for text in ids
            ]
            assert lengths.tolist() == list(map(len, ids))
            found.append(row)
        assert sorted(found) == sorted(step.rows) and len(found) == step.num_examples
        np.testing.assert_allclose(arrays.weight[kept], 1 / step.num_examples)
        # Each example belongs to one micro-batch, which has 8 examples over all shards.
        of_micro_batches = (arrays.micro_batch & kept[:, :, None]).sum(axis=(0, 1, 3))
        assert of_micro_batches[: step.num_micro_batches].tolist() == [8] * step.num_micro_batches
        tokens = arrays.lengths.reshape(*kept.shape[:2], texts, -1) * kept[:, :, None]
        assert tokens.sum() == step.num_tokens
        assert [len(own) for own in step.passes] == kept.sum(axis=-1).reshape(-1).tolist()


@pytest.mark.parametrize("shards", [1, SHARDS])
@pytest.mark.parametrize("views", [None, ViewBuckets()])
def test_a_pass_has_one_micro_batch_where_the_loss_wants_it_whole(shards, views):
    """13 examples in micro-batches of 8: first eight, then the other five, on the same devices as TRL's ranks."""
    options = {"layout": "shared", "accumulation": 3, "whole_micro_batches": True, "views": views, "fill_last": False}
    [step] = loader(table(13), shards=shards, **options)
    member = step.arrays.micro_batch.reshape(3 * shards, 3, 8 // shards)
    kept = step.arrays.weight.reshape(3 * shards, 1, 8 // shards) > 0
    counts = (member & kept).sum(axis=-1)
    of_second = [5] if shards == 1 else [2, 1, 1, 1]
    assert counts[:shards, 0].tolist() == [8 // shards] * shards
    assert counts[shards : 2 * shards, 1].tolist() == of_second
    assert counts.sum() == 13 and step.passes[0] == list(range(8 // shards))
    total = step.arrays.pass_weight.reshape(3 * shards, -1).sum(axis=-1)
    np.testing.assert_allclose(total, np.repeat([1 / (2 * shards), 0], [2 * shards, shards]), rtol=1e-6)


@pytest.mark.parametrize("layout", ["packed", "shared"])
@every_number_of_texts
def test_nothing_is_shared_but_what_two_texts_begin_with(layout, texts):
    [step] = loader(table(8), texts, layout=layout)
    computed = int((step.arrays.packed.first < step.arrays.tokens.shape[-1]).sum())
    assert (computed < step.num_tokens) == (layout == "shared" and texts == 2)
    assert computed <= step.num_tokens


@every_number_of_texts
def test_texts_of_every_device_stand_as_rows_too(texts):
    [step] = loader(table(8), texts, layout="shared", views=ViewBuckets())
    tokens, places = step.arrays.tokens[0, :, 0], step.arrays.packed.texts.places[0, :, 0]
    length = tokens.shape[1]
    found = [tokens[shard, row[row < length]].tolist() for shard in range(SHARDS) for row in places[shard]]
    wanted = [ids for name in TEXTS[:texts] for ids in table(8)[name]]
    assert sorted(filter(None, found)) == sorted(wanted)


@pytest.mark.parametrize("layout", ["padded", "shared"])
@every_number_of_texts
def test_a_run_that_filled_nothing_goes_on_so(layout, texts):
    """Five examples remain for four devices: two for the first, and each has the same weight as on one device."""
    step, alone = (
        next(iter(loader(table(13), texts, shards=shards, layout=layout, accumulation=2, fill_last=False)))
        for shards in (SHARDS, 1)
    )
    assert step.rows == alone.rows == list(range(13))
    assert (step.num_examples, step.num_tokens) == (alone.num_examples, alone.num_tokens)
    for ours in (step, alone):
        np.testing.assert_allclose(np.sort(ours.arrays.weight.ravel())[-13:], [1 / 16] * 8 + [1 / 10] * 5)
    of_micro_batches = step.arrays.micro_batch & (step.arrays.weight > 0)[:, :, None]
    assert of_micro_batches.sum(axis=(0, 1, 3)).tolist() == [8, 5]


@every_layout
@every_number_of_texts
def test_chunks_have_no_example_that_is_not_there(layout, texts):
    data = table(11)
    [chunk] = EvalChunks(loader(data, texts, layout=layout, fill_last=False), sort=layout == "padded")
    examples = np.concatenate([slots[slots >= 0] for _, slots in chunk.passes])
    assert sorted(examples.tolist()) == list(range(11))
    assert [batch.num_examples for batch in chunk.batches] == [8, 3]
    outputs = []
    for batch, _ in chunk.passes:
        shares = [jax.tree.map(lambda leaf, shard=shard: leaf[shard], batch) for shard in range(SHARDS)]
        outputs.append(np.array([[sum(text_read_at(own, read)) for read in own.reads] for own in shares]))
    for number, found in enumerate(chunk.restored(outputs)):
        rows = data[number * 8 : (number + 1) * 8]
        for part, name in zip(found.reshape(texts, 8), TEXTS, strict=False):
            assert part[: len(rows[name])].tolist() == list(map(sum, rows[name]))


def test_an_epoch_is_begun_again_until_it_comes_out_even():
    assert filled(np.arange(3), 8).tolist() == [0, 1, 2, 0, 1, 2, 0, 1]
    assert filled(np.arange(4), 2).tolist() == [0, 1, 2, 3]


def test_the_first_shards_have_one_more():
    assert by_shard([[0, 1, 2, 3, 4], [5]], 4) == [[0, 1], [2], [3], [4], [5], [], [], []]
