"""Surveys of a dataset and plans of packed rows: lengths, savings, and which length is used until another is
compiled."""

from __future__ import annotations

import numpy as np
import pytest
from datasets import Dataset
from hypothesis import given, settings
from hypothesis import strategies as st

from compat_tests.data.examples import COLUMNS, TEXTS, examples_of, row_of
from compat_tests.data.test_packed import laid_out
from compat_tests.effort import drawn
from trl_jax.data.layout_plan import EARLY, Buckets, plan_layout, survey
from trl_jax.data.loader import epoch_order

TWO = ("first", "second")


def of_two(lengths):
    """Examples of a text of each length, and one of a single token without a common prefix."""
    return Dataset.from_list([{"first": [1] * length, "second": [2]} for length in lengths])


def planned(dataset, columns=TWO, layout="shared", orders=None, **options):
    orders = orders or [np.arange(len(dataset))]
    options = {"batch_size": 1, "accumulation": 1, "bucket_cost": 0, "run_steps": len(dataset)} | options
    return plan_layout(dataset, columns, lambda epoch: orders[epoch % len(orders)], layout, **options)


@pytest.mark.parametrize("texts", TEXTS)
@settings(deadline=None, max_examples=drawn(30))
@given(st.data(), st.integers(1, 3), st.integers(1, 3))
def test_a_survey_counts_what_the_layouts_hold(texts, data, size, accumulation):
    examples = data.draw(st.lists(examples_of(texts), min_size=1, max_size=20))
    dataset = Dataset.from_list([row_of(example) for example in examples])
    order = epoch_order(len(examples), seed=1, epoch=0, shuffle=True)
    groups = [[examples[i] for i in order[start : start + size]] for start in range(0, len(order), size)]
    for layout in ("packed", "shared"):
        counted = survey(dataset, order, COLUMNS[texts].texts).steps(size, accumulation, layout)
        for number, step in enumerate(counted):
            group = groups[number * accumulation : (number + 1) * accumulation]
            longest = [max(example.longest for example in micro) for micro in group]
            assert step.padded == sum(texts * len(micro) * most for micro, most in zip(group, longest, strict=True))
            assert step.real == sum(example.tokens for micro in group for example in micro)
            assert step.text == max(longest)
            batch, _, _ = laid_out(group, size, accumulation, layout == "shared", accumulation)
            assert step.packed == max((batch.packed.first < batch.tokens.shape[2]).sum(axis=(1, 2)))
        assert len(counted) == -(-len(groups) // accumulation)


@pytest.mark.parametrize(
    ("texts", "real", "length"), [(1, 960, 512), (2, 960 + 812, 512), (3, 2 * 960 + 812, 1408)],
    ids=["one text", "two share 100 tokens", "three share none"],
)  # fmt: skip
def test_a_plan_says_what_it_saves(texts, real, length):
    """Four examples per packed row: texts of 120 tokens, the second one of 101 or 102."""
    names = ("first", "second", "third")[:texts]
    begin = [1] * 100
    rows = [
        {"first": begin + [2] * 20, "second": begin + [3] * (1 + i % 2), "third": begin + [4] * 20} for i in range(32)
    ]
    plan = planned(Dataset.from_list(rows), names, batch_size=4, accumulation=2, run_steps=4)
    assert (plan.padded, plan.real) == (8 * texts * 120, real)
    assert plan.buckets.lengths == (length,) and plan.computed == 2 * length


def test_a_plan_has_room_for_the_steps_of_later_epochs():
    """Two long examples are in the same step only in the second epoch."""
    plan = planned(
        of_two((900, 10, 900, 10)), orders=[np.array([0, 1, 2, 3]), np.array([0, 2, 1, 3])], batch_size=2, run_steps=4
    )
    assert plan.buckets.lengths == (64, 960, 1856)


def test_rows_are_as_long_as_steps_ask_for_where_a_run_pays_for_it():
    """One long text in fifty steps gets its own length, unless compiling costs more than padding all other rows."""
    dataset = Dataset.from_list([
        {"first": [1] * (4000 if i == 70 else 100), "second": [2] * 60} for i in range(200)
    ])  # fmt: skip
    options = {"layout": "packed", "batch_size": 4, "run_steps": 50, "by_rows": True}
    cheap, dear = (planned(dataset, bucket_cost=cost, **options).views for cost in (0, 10**6))
    assert cheap.shapes == ((640, 128), (4544, 4032)) and dear.shapes == ((4544, 4032),)
    assert cheap(600, 100) == (640, 128) and cheap(600, 200) == cheap(641, 10) == (4544, 4032)
    assert cheap(600, 5000) == (640, 8192) and cheap(5000, 10) == (Buckets()(5000), 256)


def test_nothing_compiles_late():
    """Except for the longest length, whose first step depends on the data."""
    lengths = [100] * 99 + [400] + [200, 900] * 50
    plan = planned(of_two(length - 1 for length in lengths))
    assert plan.buckets.lengths == (128, 448, 960)


def test_a_longer_run_pays_for_more_lengths():
    plans = [planned(of_two((900, 200)), bucket_cost=1500, run_steps=steps) for steps in (2, 20)]
    # The shorter run's length is a round number.
    assert [plan.buckets.lengths for plan in plans] == [(1024,), (256, 960)]


def served(lengths, **options):
    """The row lengths of steps with one example each, for a run that compiles in the background."""
    buckets = planned(of_two(length - 1 for length in lengths), **{"run_steps": 10**9} | options).buckets
    return buckets, [buckets(length, step) for step, length in enumerate(lengths)]


def test_the_next_longer_one_serves_until_a_length_is_compiled():
    """One length at a time is compiled, in the time of 1,000 tokens: the run waits for 960, has 256 at step 2 and 512
    at step 5."""
    lengths = [900, 200, 200, 500, 500, 500, 200, 900]
    buckets, found = served(lengths, bucket_cost=1000, at_once=1)
    assert buckets.lengths == (256, 512, 960) and found == [960, 960, 256, 960, 960, 512, 256, 960]
    # An evaluation has all lengths.
    assert [buckets(length) for length in lengths] == [960, 256, 256, 512, 512, 512, 256, 960]
    assert served(lengths, bucket_cost=1000, at_once=3)[1] == [960, 256, 256, 512, 512, 512, 256, 960]
    assert served(lengths, bucket_cost=1000)[0].serves_from == ()


def test_where_nothing_longer_is_compiled_a_step_waits():
    assert served([200, 900, 200, 900], bucket_cost=10**6, at_once=1)[1] == [256, 960, 256, 960]
    late = served([200] * EARLY + [900], at_once=1)
    assert late[1][-1] == 960 and late[0](2000, 0) == Buckets()(2000)


@given(st.lists(st.integers(1, 3000), min_size=1, max_size=40), st.integers(1, 4), st.integers(0, 5000))
def test_what_serves_has_been_compiled_or_is_waited_for(lengths, at_once, cost):
    """A step waits only for its own length, and only if no compiled length fits."""
    buckets, found = served([length + 1 for length in lengths], bucket_cost=cost, at_once=at_once)
    compiled = set()
    for step, (length, bucket) in enumerate(zip(lengths, found, strict=True)):
        own = buckets(length + 1)
        compiled |= {other for other, ready in zip(buckets.lengths, buckets.serves_from, strict=True) if ready < step}
        assert bucket == own or (bucket > own and own not in compiled)
        assert bucket in buckets.lengths and buckets.serves_from[buckets.lengths.index(bucket)] <= step
    assert not buckets.serves_from or max(buckets.serves_from) <= EARLY
