"""Numbers per example, per text and per read: in each layout they are at their position on their axis, with zeros
elsewhere."""

from __future__ import annotations

import numpy as np
import pytest

from trl_jax.data.batch import IGNORED, Example, Extras, loss_batch
from trl_jax.data.loader import IndexedExample, StepLayout

SIZE = 4


def example(number: int) -> Example:
    """A pair with a common prefix. Its numbers identify what they belong to: the example, a text, or one of its
    targets."""
    dice = np.random.default_rng(number)
    prompt = dice.integers(1, 9, 5).tolist()
    texts = tuple(prompt + dice.integers(1, 9, dice.integers(1, 20)).tolist() for _ in range(2))
    labels = tuple([IGNORED] * 5 + text[5:] for text in texts)
    code = [1000 * number + 100 * text for text in range(2)]
    reads = [[at + place for place in range(len(text) - 5)] for at, text in zip(code, texts, strict=True)]
    of_reads = {"of_read": reads, "twice": [[2.0 * value for value in read] for read in reads]}
    return Example(texts, Extras({"own": number}, {"of_text": code}, of_reads), labels, weight=number / 8)


EXAMPLES = [example(number) for number in range(1, 8)]


def step(layout: str, examples=EXAMPLES, **options):
    return laid_out(layout, examples, **options).arrays


def laid_out(layout: str, examples=EXAMPLES, **options):
    indexed = [IndexedExample(one, number) for number, one in enumerate(examples)]
    groups = [indexed[:SIZE], indexed[SIZE:]]
    made = StepLayout(SIZE, pad_token_id=0, pad_to_multiple_of=None, layout=layout, accumulation=2, **options)
    return made.step(groups, 0)


in_every_layout = pytest.mark.parametrize("layout", ["padded", "packed", "shared"])
on_devices = pytest.mark.parametrize(
    "options", [{}, {"shards": 2}, {"whole_micro_batches": True}, {"shards": 2, "whole_micro_batches": True}], ids=str
)


@on_devices
@in_every_layout
def test_what_is_found_at_reads_goes_back_to_examples(layout, options):
    made = laid_out(layout, **options)
    found = made.values_by_row(made.arrays.extras.read["of_read"])
    assert sorted(found) == list(range(len(EXAMPLES)))
    for number, one in enumerate(EXAMPLES):
        for values, wanted in zip(found[number], one.extras.read["of_read"], strict=True):
            np.testing.assert_array_equal(values, wanted)


@on_devices
@in_every_layout
def test_each_number_is_where_it_belongs(layout, options):
    batch = step(layout, **options)
    examples, met = batch.weight.shape[-1], []
    for index in np.ndindex(batch.weight.shape[:-1]):
        own, real = batch.extras.example["own"][index], batch.weight[index] > 0
        np.testing.assert_array_equal(own, batch.weight[index] * 8)
        of_text = batch.extras.text["of_text"][index].reshape(2, examples)
        np.testing.assert_array_equal(of_text, np.where(real, 1000 * own + [[0], [100]], 0))
        of_read, read = batch.extras.read["of_read"][index], batch.targets[index] >= 0
        np.testing.assert_array_equal(batch.extras.read["twice"][index], 2 * of_read)
        assert not of_read[~read].any()
        code, place = np.divmod(of_read[read], 100)
        np.testing.assert_array_equal(100 * code, of_text.reshape(-1)[batch.text[index][read]])
        for number, at, target in zip(code.astype(int), place.astype(int), batch.targets[index][read], strict=True):
            assert EXAMPLES[number // 10 - 1].texts[number % 10][5 + at] == target
        met += of_read[read].tolist()
    assert sorted(met) == sorted(number for one in EXAMPLES for text in one.extras.read["of_read"] for number in text)


def test_an_evaluated_batch_has_those_of_examples_and_of_texts():
    batch = loss_batch(EXAMPLES[:2], 3)
    np.testing.assert_array_equal(batch.extras.example["own"], [1, 2, 0])
    np.testing.assert_array_equal(batch.extras.text["of_text"], [1000, 2000, 0, 1100, 2100, 0])
    np.testing.assert_array_equal(batch.weight, np.float32([1 / 8, 2 / 8, 0]))
    assert batch.extras.read == {}


def test_as_many_numbers_as_reads_are_wanted():
    extras = EXAMPLES[0].extras
    short = [extras.read["of_read"][0][:-1], extras.read["of_read"][1]]
    bad = EXAMPLES[0]._replace(extras=extras._replace(read=extras.read | {"of_read": short}))
    with pytest.raises(ValueError, match=r"extras.read\['of_read'\] has \d+ numbers for text 0, which has \d+ "):
        step("packed", [bad, *EXAMPLES[1:]])


@pytest.mark.parametrize("layout", ["padded", "shared"])
def test_numbers_of_reads_want_labels(layout):
    with pytest.raises(ValueError, match="has no labels and therefore no targets"):
        step(layout, [one._replace(labels=()) for one in EXAMPLES])


@on_devices
@in_every_layout
def test_micro_batches_count_alike_whatever_their_targets(layout, options):
    examples = [one._replace(weight=None) for one in EXAMPLES]
    batch, per = step(layout, examples, weighting="micro_batches", **options), SIZE // options.get("shards", 1)
    there = batch.weight > 0
    weights = dict(zip(batch.extras.example["own"][there].astype(int), batch.weight[there], strict=True))
    runs = [examples[at : at + per] for half in (examples[:SIZE], examples[SIZE:]) for at in range(0, len(half), per)]
    for run in runs:
        for one in run:
            wanted = 1 / (len(runs) * sum(other.num_targets for other in run))
            assert weights[int(one.extras.example["own"])] == pytest.approx(wanted), (layout, options)


@pytest.mark.parametrize("weight", [0.0, -1.0, float("nan")])
def test_a_weight_is_above_zero(weight):
    with pytest.raises(ValueError, match="has weight .*; it must be above 0"):
        step("packed", [EXAMPLES[0]._replace(weight=weight), *EXAMPLES[1:]])
