"""Streams: every token of every pair once and where it should be, and a way back to the pairs."""

from __future__ import annotations

import numpy as np
import pytest
from datasets import Dataset
from hypothesis import given, settings
from hypothesis import strategies as st

from trl_jax.data.layout.batch import scored_token
from trl_jax.data.layout.packed import Form, Rows, greedy_bins, place, shared_tokens, stream_pairs
from trl_jax.data.layout.plan import Buckets, survey
from trl_jax.data.order import epoch_order

PAD = 7
ids = st.lists(st.integers(0, 9), min_size=1, max_size=12)
rows = st.builds(
    lambda prompt, chosen, rejected, margin: {
        "chosen_ids": prompt + chosen, "rejected_ids": prompt + rejected, "margin": margin
    },
    st.lists(st.integers(0, 9), max_size=9), ids, ids, st.floats(-2, 2, width=32),
)  # fmt: skip
steps = st.integers(1, 4).flatmap(
    lambda pairs: st.tuples(
        st.just(pairs), st.lists(st.lists(rows, min_size=1, max_size=pairs), min_size=1, max_size=3)
    )
)
layouts = pytest.mark.parametrize("share", [False, True], ids=["packed", "shared"])


def laid_out(groups, pairs, count, share, streams=2, rows=None):
    placed = place(groups, pairs=pairs, share=share)
    into = greedy_bins([pair.tokens for pair in placed], streams)
    form = Form(PAD, share, Buckets(), rows)
    return stream_pairs(placed, into, form, pairs=pairs, count=count, streams=streams), placed, into


def what_is_seen(batch, stream, place):
    """The places that a token sees, from its own numbers alone, in the order of the text."""
    run = range(batch.packed.first[stream, 0, place], batch.packed.end[stream, 0, place])
    return sorted(run, key=lambda other: batch.positions[stream, 0, other])


def texts_of(batch, stream, slot):
    """The inverse of a layout: both texts of a pair, from its last tokens alone, up to the one that is read."""
    slots = batch.weight.shape[1]
    places = (int(batch.at[stream, place]) for place in (slot, slots + slot))
    return [batch.tokens[stream, 0, what_is_seen(batch, stream, place)].tolist() for place in places]


@layouts
@settings(deadline=None, max_examples=60)
@given(steps, st.integers(0, 2))
def test_every_text_comes_back_from_what_its_last_token_sees(share, step, more):
    pairs, groups = step
    batch, placed, into = laid_out(groups, pairs, len(groups) + more, share)
    for pair, own in zip(placed, into, strict=True):
        chosen, rejected = pair.row["chosen_ids"], pair.row["rejected_ids"]
        read = [ids[: scored_token(ids, PAD) + 1] for ids in (chosen, rejected)]
        assert texts_of(batch, own, pair.slot) == read
        slots = batch.weight.shape[1]
        assert batch.lengths[own, [pair.slot, slots + pair.slot]].tolist() == [len(chosen), len(rejected)]


@layouts
@settings(deadline=None, max_examples=60)
@given(steps)
def test_every_token_sees_its_own_text_up_to_itself_and_nothing_else(share, step):
    """Not only where it is read: position p sees p + 1 tokens, those of the text it belongs to."""
    pairs, groups = step
    batch, placed, into = laid_out(groups, pairs, len(groups), share)
    found = [0] * len(batch.tokens)
    for pair, own in zip(placed, into, strict=True):
        texts = {"chosen": pair.row["chosen_ids"], "rejected": pair.row["rejected_ids"]}
        start = found[own]
        found[own] += pair.tokens
        for at in range(start, found[own]):
            side = "chosen" if at < start + len(texts["chosen"]) else "rejected"
            position = int(batch.positions[own, 0, at])
            seen = what_is_seen(batch, own, at)
            assert batch.tokens[own, 0, seen].tolist() == texts[side][: position + 1]
            assert batch.positions[own, 0, seen].tolist() == list(range(position + 1))
    for own, filled in enumerate(found):
        assert (batch.tokens[own, 0, filled:] == PAD).all()
        assert all(not what_is_seen(batch, own, at) for at in range(filled, batch.tokens.shape[2]))


@layouts
@settings(deadline=None, max_examples=60)
@given(steps)
def test_texts_stand_as_rows_too(share, step):
    """Token by token, and back: what two texts begin with is in both of their rows."""


    def shape(tokens, longest):
        return Buckets()(tokens), longest + 3

    pairs, groups = step
    batch, placed, into = laid_out(groups, pairs, len(groups), share, rows=Rows(sum(map(len, groups)), shape))
    places, back = (leaf[:, 0] for leaf in batch.packed.texts)
    longest, found = max(pair.longest for pair in placed), [0] * len(batch.tokens)
    assert places.shape[2] == longest + 3
    reached = np.zeros(back.shape, bool)
    for pair, own in zip(placed, into, strict=True):
        for ids in (pair.row["chosen_ids"], pair.row["rejected_ids"]):
            row, number = places[own, found[own]], found[own]
            row, behind = np.split(row, [len(ids)])
            assert batch.tokens[own, 0, row].tolist() == ids and (behind == back.shape[2]).all()
            assert batch.positions[own, 0, row].tolist() == list(range(len(ids)))
            for at, place_ in enumerate(row):
                side = back[own, :, place_].tolist().index(number * places.shape[2] + at)
                reached[own, side, place_] = True
            found[own] += 1
    assert all((places[own, count:] == back.shape[2]).all() for own, count in enumerate(found))
    assert (back[~reached] == places[0].size).all()


@settings(deadline=None, max_examples=60)
@given(steps, st.integers(0, 2))
def test_weights_and_micro_batches_are_trls_however_pairs_are_dealt(step, more):
    pairs, groups = step
    count = len(groups) + more
    batch, _, _ = laid_out(groups, pairs, count, True)
    weight, margin = np.zeros((count, pairs), np.float32), np.zeros((count, pairs), np.float32)
    for m, group in enumerate(groups):
        weight[m, : len(group)] = 1 / (len(groups) * len(group))
        margin[m, : len(group)] = [row["margin"] for row in group]
    np.testing.assert_allclose(batch.weight.sum(axis=0).reshape(count, pairs), weight, rtol=1e-6)
    np.testing.assert_array_equal(batch.margin.sum(axis=0).reshape(count, pairs), margin)
    assert ((batch.weight > 0).sum(axis=0) <= 1).all(), "a pair is in one stream"
    for m in range(count):
        np.testing.assert_array_equal(batch.member[0, m].reshape(count, pairs).all(axis=1), np.arange(count) == m)


@settings(deadline=None)
@given(steps)
def test_the_longest_text_is_that_of_the_micro_batch(step):
    pairs, groups = step
    batch, placed, into = laid_out(groups, pairs, len(groups), True)
    for pair, own in zip(placed, into, strict=True):
        group = groups[pair.slot // pairs]
        longest = max(len(row[side]) for row in group for side in ("chosen_ids", "rejected_ids"))
        assert batch.packed.longest[own, 0, batch.at[own, pair.slot]] == longest


@given(ids, ids)
def test_each_answer_keeps_its_last_token(chosen, rejected):
    shared = shared_tokens(chosen, rejected)
    assert 0 <= shared < min(len(chosen), len(rejected)) and chosen[:shared] == rejected[:shared]
    longer = chosen[: shared + 1] == rejected[: shared + 1]
    assert not longer or shared + 1 == min(len(chosen), len(rejected))


@given(st.lists(st.integers(1, 300), min_size=1, max_size=30), st.integers(1, 5))
def test_streams_are_balanced(costs, streams):
    """The longest is at most a pair longer than the mean."""
    filled = np.bincount(greedy_bins(costs, streams), costs, minlength=streams)
    assert filled.sum() == sum(costs) and filled.max() <= sum(costs) / streams + max(costs)


@settings(deadline=None, max_examples=30)
@given(st.lists(rows, min_size=1, max_size=20), st.integers(1, 3), st.integers(1, 3))
def test_a_survey_counts_what_the_layouts_hold(found, pairs, accumulation):
    dataset, order = Dataset.from_list(found), epoch_order(len(found), seed=1, epoch=0, shuffle=True)
    groups = [[found[i] for i in order[start : start + pairs]] for start in range(0, len(order), pairs)]
    for layout in ("packed", "shared"):
        counted = survey(dataset, order).steps(pairs, accumulation, layout)
        for number, (padded, real, stream, text) in enumerate(counted):
            group = groups[number * accumulation : (number + 1) * accumulation]
            sides = [[len(row[side]) for row in micro for side in ("chosen_ids", "rejected_ids")] for micro in group]
            assert padded == sum(len(micro) * max(micro) for micro in sides) and real == sum(map(sum, sides))
            assert text == max(map(max, sides))
            batch, _, _ = laid_out(group, pairs, accumulation, layout == "shared", accumulation)
            assert stream == max((batch.packed.first < batch.tokens.shape[2]).sum(axis=(1, 2)))
