"""Padded rows: every token of every text once at its position, read where transformers reads."""

from __future__ import annotations

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from compat_tests.data.examples import PAD, steps
from trl_jax.data.batch import Example, Extras, last_real_token, padded_length
from trl_jax.data.packed import pad_examples


def padded(groups, size=4, count=3, multiple=None):
    return pad_examples(groups, examples=size, count=count, pad_token_id=PAD, pad_to_multiple_of=multiple)


@settings(deadline=None)
@given(steps, st.integers(0, 2), st.sampled_from([None, "auto", 1, 8]))
def test_every_text_is_there_once_and_at_its_place(step, more, multiple):
    size, groups = step
    count, texts = len(groups) + more, len(groups[0][0].texts)
    batch = padded(groups, size, count, multiple)
    length = batch.tokens.shape[2]
    tokens, lengths = np.full_like(batch.tokens, PAD), np.ones_like(batch.lengths)
    for m, group in enumerate(groups):
        for i, example in enumerate(group):
            for number, ids in enumerate(example.texts):
                row = number * size + i
                tokens[m, row, : len(ids)], lengths[m, row] = ids, len(ids)
                assert divmod(batch.reads[m, row], length) == (row, last_real_token(ids, PAD))
    np.testing.assert_array_equal(batch.tokens, tokens)
    np.testing.assert_array_equal(batch.lengths, lengths)
    longest = max(example.longest for group in groups for example in group)
    assert batch.tokens.shape == (count, texts * size, padded_length(longest, multiple))
    np.testing.assert_array_equal(batch.positions, np.broadcast_to(np.arange(length), tokens.shape))
    np.testing.assert_array_equal(batch.reads // length, np.tile(np.arange(texts * size), (count, 1)))


@settings(deadline=None)
@given(steps, st.integers(0, 2))
def test_weights_are_those_of_a_mean_over_micro_batches_of_means_over_examples(step, more):
    size, groups = step
    batch = padded(groups, size, len(groups) + more)
    wanted = np.zeros_like(batch.weight)
    for m, group in enumerate(groups):
        wanted[m, : len(group)] = 1 / len(groups) / len(group)
    np.testing.assert_allclose(batch.weight, wanted, rtol=1e-6)
    assert batch.weight.sum() == pytest.approx(1, rel=1e-5)


@settings(deadline=None)
@given(steps, st.integers(0, 2))
def test_extras_are_those_of_their_examples(step, more):
    size, groups = step
    batch = padded(groups, size, len(groups) + more)
    assert list(batch.extras.example) == ["margin", "label"]
    for name, values in batch.extras.example.items():
        wanted = np.zeros_like(batch.weight)
        for m, group in enumerate(groups):
            wanted[m, : len(group)] = [example.extras.example[name] for example in group]
        np.testing.assert_array_equal(values, wanted)


@pytest.mark.parametrize("texts", [1, 2, 3])
def test_types_and_shapes(texts):
    batch = padded([[Example(([2, 3], [1], [5, 6])[:texts], Extras({"margin": 1.0}))]], size=2, count=1)
    arrays = {name: array for name, array in (batch._asdict() | batch.extras.example).items() if array is not None}
    assert list(arrays.pop("extras").example) == ["margin"]
    assert {name: (array.dtype, array.shape) for name, array in arrays.items()} == {
        "tokens": (np.int32, (1, 2 * texts, 2)),
        "positions": (np.int32, (1, 2 * texts, 2)),
        "reads": (np.int32, (1, 2 * texts)),
        "router_token_count": (np.int16, (1, 2 * texts, 2)),
        "lengths": (np.int32, (1, 2 * texts)),
        "weight": (np.float32, (1, 2)),
        "micro_batch": (np.bool_, (1, 1, 2)),
        "margin": (np.float32, (1, 2)),
    }


def test_without_numbers_there_are_no_extras():
    assert padded([[Example(([1], [2, 3]))]]).extras == Extras()


def test_the_examples_given_are_left_as_they_are():
    example = Example(([1, 2], [3]), Extras({"margin": 1.0}))
    padded([[example]])
    assert example == Example(([1, 2], [3]), Extras({"margin": 1.0}))


@pytest.mark.parametrize(
    ("ids", "at"),
    [([1, 2, 3], 2), ([1, PAD, 3], 2), ([1, 2, PAD], 1), ([PAD, PAD, 1, PAD], 2), ([PAD, PAD], 0), ([1], 0)],
)
def test_the_token_that_is_read(ids, at):
    assert last_real_token(ids, PAD) == at


def test_the_token_that_is_read_is_transformers(checkpoint):
    """Compared through the score of a real model, for padding on the right, inside and at the end, and only padding."""
    torch = pytest.importorskip("torch")
    from transformers import AutoModelForSequenceClassification

    model = AutoModelForSequenceClassification.from_pretrained(checkpoint()).eval()
    pad = model.config.pad_token_id
    texts = [[5, 6, 9, 8], [5, pad, 9], [5, 6, pad], [pad, 9, pad], [pad, pad]]
    batch = torch.tensor([ids + [pad] * (6 - len(ids)) for ids in texts])
    with torch.no_grad():
        scores = model(input_ids=batch).logits[:, 0]
        everywhere = model.score(model.model(input_ids=batch).last_hidden_state)[..., 0]
    found = [int(torch.argmin((row - score).abs())) for row, score in zip(everywhere, scores, strict=True)]
    assert found[:4] == [last_real_token(ids, pad) for ids in texts[:4]]
    assert scores[4] == everywhere[4, last_real_token(texts[4], pad)]


@given(st.integers(1, 100_000))
def test_a_length_is_little_more_than_what_is_needed(longest):
    length = padded_length(longest, "auto")
    assert longest <= length < max(longest + 32, 1.25 * longest + 1)
    assert length % 32 == 0 and padded_length(length, "auto") == length
    assert length <= padded_length(longest + 1, "auto")


def test_a_run_meets_few_lengths():
    assert len({padded_length(longest, "auto") for longest in range(1, 1025)}) == 16
    assert len({padded_length(longest, "auto") for longest in range(1025, 2049)}) == 4


@pytest.mark.parametrize(
    ("longest", "multiple", "length"),
    [(13, None, 13), (13, 8, 16), (16, 8, 16), (13, 1, 13), (1, 64, 64), (1, "auto", 32)],
)
def test_multiples(longest, multiple, length):
    assert padded_length(longest, multiple) == length


@pytest.mark.parametrize("num_primary_texts", [None, 1])
def test_tokens_of_texts_that_count(num_primary_texts):
    groups = [[Example(([1, 2, 3], [4]), num_primary_texts=num_primary_texts)]]
    batch = pad_examples(groups, examples=2, count=1, pad_token_id=PAD, pad_to_multiple_of=None)
    other = [0, 0, 0] if num_primary_texts else [1, 0, 0]
    assert batch.router_token_count.tolist() == [[[1, 1, 1], [0, 0, 0], other, [0, 0, 0]]]
