"""Padded pairs: every token of every pair once and at its place, read where transformers reads."""

from __future__ import annotations

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from trl_jax.data.layout.batch import pad_pairs, padded_length, scored_token

PAD = 7
ids = st.lists(st.integers(0, 9), min_size=1, max_size=40)
rows = st.fixed_dictionaries({"chosen_ids": ids, "rejected_ids": ids, "margin": st.floats(-2, 2, width=32)})
steps = st.integers(1, 4).flatmap(
    lambda pairs: st.tuples(
        st.just(pairs), st.lists(st.lists(rows, min_size=1, max_size=pairs), min_size=1, max_size=3)
    )
)


def padded(groups, pairs=4, count=3, multiple=None):
    return pad_pairs(groups, pairs=pairs, count=count, pad_token_id=PAD, pad_to_multiple_of=multiple)


@settings(deadline=None)
@given(steps, st.integers(0, 2), st.sampled_from([None, "auto", 1, 8]))
def test_every_token_is_there_once_and_at_its_place(step, more, multiple):
    pairs, groups = step
    count = len(groups) + more
    batch = padded(groups, pairs, count, multiple)
    tokens = np.full_like(batch.tokens, PAD)
    for m, group in enumerate(groups):
        for i, row in enumerate(group):
            for place, side in ((i, row["chosen_ids"]), (pairs + i, row["rejected_ids"])):
                tokens[m, place, : len(side)] = side
                assert batch.at[m, place] == scored_token(side, PAD)
            assert batch.margin[m, i] == np.float32(row["margin"])
    np.testing.assert_array_equal(batch.tokens, tokens)
    longest = max(
        len(row[side]) for group in groups for row in group for side in ("chosen_ids", "rejected_ids")
    )
    assert batch.tokens.shape == (count, 2 * pairs, padded_length(longest, multiple))
    np.testing.assert_array_equal(batch.positions, np.broadcast_to(np.arange(tokens.shape[2]), tokens.shape))


@settings(deadline=None)
@given(steps, st.integers(0, 2))
def test_weights_are_those_of_a_mean_over_micro_batches_of_means_over_pairs(step, more):
    pairs, groups = step
    batch = padded(groups, pairs, len(groups) + more)
    wanted = np.zeros_like(batch.weight)
    for m, group in enumerate(groups):
        wanted[m, : len(group)] = 1 / len(groups) / len(group)
    np.testing.assert_allclose(batch.weight, wanted, rtol=1e-6)
    assert batch.weight.sum() == pytest.approx(1, rel=1e-5)


def test_types_and_shapes():
    batch = padded([[{"chosen_ids": [1], "rejected_ids": [2, 3]}]], pairs=2, count=1)
    shapes = {
        name: (array.dtype, array.shape) for name, array in batch._asdict().items() if array is not None
    }
    assert shapes == {
        "tokens": (np.int32, (1, 4, 2)),
        "positions": (np.int32, (1, 4, 2)),
        "at": (np.int32, (1, 4)),
        "lengths": (np.int32, (1, 4)),
        "weight": (np.float32, (1, 2)),
        "member": (np.bool_, (1, 1, 2)),
    }
    assert batch.margin is None and batch.packed is None


def test_the_rows_given_are_left_as_they_are():
    group = [{"chosen_ids": [1, 2], "rejected_ids": [3]}]
    padded([group])
    assert group == [{"chosen_ids": [1, 2], "rejected_ids": [3]}]


@pytest.mark.parametrize(
    ("ids", "at"),
    [([1, 2, 3], 2), ([1, PAD, 3], 2), ([1, 2, PAD], 1), ([PAD, PAD, 1, PAD], 2), ([PAD, PAD], 0), ([1], 0)],
)
def test_the_token_that_is_read(ids, at):
    assert scored_token(ids, PAD) == at


def test_the_token_that_is_read_is_transformers(checkpoint):
    """By the score of a real model: pads to the right, pads inside, pads at the end, nothing but pads."""
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
    assert found[:4] == [scored_token(ids, pad) for ids in texts[:4]]
    assert scores[4] == everywhere[4, scored_token(texts[4], pad)]


@given(st.integers(1, 100_000))
def test_the_ladder_of_lengths(longest):
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
