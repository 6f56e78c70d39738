"""Packed rows: every token of every text once at the right position, and a mapping back to the texts."""

from __future__ import annotations

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from compat_tests.data.examples import PAD, ids, steps
from trl_jax.data.batch import Example, last_real_token
from trl_jax.data.layout_plan import Buckets
from trl_jax.data.packed import (
    PackingSpec,
    RowViewShape,
    fullest_row,
    greedy_bins,
    longest_in_batch,
    pack_examples,
    place,
    shared_tokens,
    step_slots,
)

layouts = pytest.mark.parametrize("share", [False, True], ids=["packed", "shared"])


def laid_out(groups, size, count, share, rows=2, view=None):
    placed = place(groups, examples=size, share_prefix=share)
    into = greedy_bins([one.tokens for one in placed], rows)
    spec = PackingSpec(PAD, share, Buckets()(fullest_row(placed, into)), view)
    slots, longest = step_slots(rows, count, size), longest_in_batch(placed, size)
    return pack_examples(placed, into, spec, micro_batch=slots, longest_texts=longest), placed, into


def visible(batch, row, place):
    """The positions in the row that a token attends to, according to its own fields, in the order of the text."""
    run = range(batch.packed.first[row, 0, place], batch.packed.end[row, 0, place])
    return sorted(run, key=lambda other: batch.positions[row, 0, other])


def slots_of(batch, slot, texts):
    """The indices of the outputs of an example's texts."""
    return [number * batch.weight.shape[1] + slot for number in range(texts)]


@layouts
@settings(deadline=None)
@given(steps, st.integers(0, 2))
def test_every_text_comes_back_from_what_its_last_token_sees(share, step, more):
    """Up to the token that is read."""
    size, groups = step
    batch, placed, into = laid_out(groups, size, len(groups) + more, share)
    for one, row in zip(placed, into, strict=True):
        texts = one.example.texts
        slots = slots_of(batch, one.slot, len(texts))
        found = [batch.tokens[row, 0, visible(batch, row, int(at))].tolist() for at in batch.reads[row, slots]]
        assert found == [text[: last_real_token(text, PAD) + 1] for text in texts]
        assert batch.lengths[row, slots].tolist() == list(map(len, texts))


@layouts
@settings(deadline=None)
@given(steps)
def test_every_token_sees_its_own_text_up_to_itself_and_nothing_else(share, step):
    """Not only the token that is read: position p attends to p + 1 tokens of its own text."""
    size, groups = step
    batch, placed, into = laid_out(groups, size, len(groups), share)
    filled = [0] * len(batch.tokens)
    for one, row in zip(placed, into, strict=True):
        texts = one.example.texts
        own = [len(texts[0]), *(len(text) - one.shared for text in texts[1:])]
        belongs = np.repeat(range(len(texts)), own)
        assert len(belongs) == one.tokens
        for at, number in enumerate(belongs, start=filled[row]):
            position, seen = int(batch.positions[row, 0, at]), visible(batch, row, at)
            assert batch.tokens[row, 0, seen].tolist() == texts[number][: position + 1]
            assert batch.positions[row, 0, seen].tolist() == list(range(position + 1))
        filled[row] += one.tokens
    for row, end in enumerate(filled):
        assert (batch.tokens[row, 0, end:] == PAD).all()
        assert all(not visible(batch, row, at) for at in range(end, batch.tokens.shape[2]))


@layouts
@settings(deadline=None)
@given(steps)
def test_texts_stand_as_rows_too(share, step):
    """In both directions, token by token; a shared prefix is in the rows of both texts."""
    size, groups = step
    longest = max(example.longest for group in groups for example in group)
    view = RowViewShape(sum(map(len, groups)), longest + 3)
    batch, placed, into = laid_out(groups, size, len(groups), share, view=view)
    places, back = (leaf[:, 0] for leaf in batch.packed.texts)
    found = [0] * len(batch.tokens)
    assert places.shape[1:] == (len(placed[0].example.texts) * len(placed), longest + 3)
    reached = np.zeros(back.shape, bool)
    for one, row in zip(placed, into, strict=True):
        for text in one.example.texts:
            number = found[row]
            of_text, behind = np.split(places[row, number], [len(text)])
            assert batch.tokens[row, 0, of_text].tolist() == text and (behind == back.shape[2]).all()
            assert batch.positions[row, 0, of_text].tolist() == list(range(len(text)))
            for at, place_ in enumerate(of_text):
                side = back[row, :, place_].tolist().index(number * places.shape[2] + at)
                reached[row, side, place_] = True
            found[row] += 1
    assert all((places[row, count:] == back.shape[2]).all() for row, count in enumerate(found))
    assert (back[~reached] == places[0].size).all()


@layouts
@settings(deadline=None)
@given(steps, st.integers(0, 2))
def test_weights_extras_and_micro_batches_are_trls_whichever_row_examples_are_in(share, step, more):
    size, groups = step
    count = len(groups) + more
    batch, _, _ = laid_out(groups, size, count, share)
    weight = np.zeros((count, size), np.float32)
    extras = {name: np.zeros_like(weight) for name in ("margin", "label")}
    for m, group in enumerate(groups):
        weight[m, : len(group)] = 1 / (len(groups) * len(group))
        for name, values in extras.items():
            values[m, : len(group)] = [example.extras.example[name] for example in group]
    np.testing.assert_allclose(batch.weight.sum(axis=0).reshape(count, size), weight, rtol=1e-6)
    assert list(batch.extras.example) == list(extras)
    for name, values in extras.items():
        np.testing.assert_array_equal(batch.extras.example[name].sum(axis=0).reshape(count, size), values)
    assert ((batch.weight > 0).sum(axis=0) <= 1).all(), "an example is in one row"
    for m in range(count):
        of_micro_batch = batch.micro_batch[0, m].reshape(count, size).all(axis=1)
        np.testing.assert_array_equal(of_micro_batch, np.arange(count) == m)


@settings(deadline=None)
@given(steps)
def test_the_longest_text_is_that_of_the_micro_batch(step):
    size, groups = step
    batch, placed, into = laid_out(groups, size, len(groups), True)
    for one, row in zip(placed, into, strict=True):
        longest = max(example.longest for example in groups[one.slot // size])
        slots = slots_of(batch, one.slot, len(one.example.texts))
        assert (batch.packed.longest[row, 0, batch.reads[row, slots]] == longest).all()


@given(ids, ids)
def test_each_of_two_texts_keeps_its_last_token(first, second):
    shared = shared_tokens([first, second])
    assert 0 <= shared < min(len(first), len(second)) and first[:shared] == second[:shared]
    longer = first[: shared + 1] == second[: shared + 1]
    assert not longer or shared + 1 == min(len(first), len(second))


@pytest.mark.parametrize("texts", [1, 3, 4])
@given(text=ids)
def test_others_than_two_texts_share_nothing(texts, text):
    assert shared_tokens([text] * texts) == 0
    [one] = place([[Example((text,) * texts)]], examples=1, share_prefix=True)
    assert (one.shared, one.tokens) == (0, texts * len(text))
    batch, _, _ = laid_out([[one.example]], 1, 1, True, rows=1)
    assert (batch.packed.first[0, 0] < batch.tokens.shape[2]).sum() == texts * len(text)


@layouts
@pytest.mark.parametrize("texts", [([1, 2, 3], [1, 2, 3]), ([1, 2, 3], [4], [1, 2, 3])])
def test_a_text_that_is_the_first_once_more_is_read_at_the_same_place(share, texts):
    batch, _, _ = laid_out([[Example(texts)]], 1, 1, share, rows=1)
    first, *_, last = batch.reads[0]
    assert first == last and batch.tokens[0, 0, visible(batch, 0, int(first))].tolist() == [1, 2, 3]


@given(st.lists(st.integers(1, 300), min_size=1, max_size=30), st.integers(1, 5))
def test_rows_are_about_as_full_as_each_other(costs, rows):
    """The fullest has at most one example more than the average."""
    filled = np.bincount(greedy_bins(costs, rows), costs, minlength=rows)
    assert filled.sum() == sum(costs) and filled.max() <= sum(costs) / rows + max(costs)


@given(st.lists(st.integers(1, 300), min_size=1, max_size=30), st.integers(2, 5), st.integers(0, 3))
def test_no_row_has_more_examples_than_it_may(costs, rows, more):
    most = -(-len(costs) // rows) + more
    assert np.bincount(greedy_bins(costs, rows, most)).max() <= most


@layouts
@pytest.mark.parametrize("num_primary_texts", [None, 1])
@settings(deadline=None)
@given(steps)
def test_how_many_texts_that_count_a_token_belongs_to(share, num_primary_texts, step):
    """A shared token counts for both texts; if only the first text is primary, only its tokens count, once."""
    size, groups = step
    groups = [[example._replace(num_primary_texts=num_primary_texts) for example in group] for group in groups]
    batch, placed, into = laid_out(groups, size, len(groups), share)
    wanted, filled = np.zeros_like(batch.router_token_count), [0] * len(batch.tokens)
    for one, row in zip(placed, into, strict=True):
        own = wanted[row, 0, filled[row] : filled[row] + one.tokens]
        first = len(one.example.texts[0])
        own[:first], own[first:] = 1, num_primary_texts is None
        own[first - one.shared : first] += num_primary_texts is None
        filled[row] += one.tokens
    np.testing.assert_array_equal(batch.router_token_count, wanted)
