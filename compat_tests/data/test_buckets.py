"""How long streams are: what steps ask for, what a compilation costs, and what serves until one is made."""

from __future__ import annotations

import numpy as np
from datasets import Dataset
from hypothesis import given
from hypothesis import strategies as st

from trl_jax.core.packed import BLOCK
from trl_jax.data.layout.plan import EARLY, Buckets, fitted, plan_layout


@given(st.integers(1, 100_000))
def test_the_ladder_without_a_survey(tokens):
    bucket = Buckets()(tokens)
    assert tokens <= bucket < max(tokens + 128, 1.06 * tokens + 128) and bucket % BLOCK == 0
    assert Buckets()(bucket) == bucket


@given(st.lists(st.integers(1, 9000), min_size=1, max_size=60), st.integers(0, 20_000))
def test_a_fitted_ladder_holds_every_length_and_no_single_rung_is_cheaper(lengths, cost):
    buckets = fitted(lengths, cost)
    assert all(length <= buckets(length) and buckets(length) in buckets.buckets for length in lengths)
    spent = sum(map(buckets, lengths)) + cost * len(buckets.buckets)
    assert spent <= len(lengths) * buckets(max(lengths)) + cost
    blocks = [-(-length // BLOCK) for length in lengths]
    assert spent <= BLOCK * sum(blocks) + cost * len(set(blocks))
    assert buckets(max(lengths) + 5000) >= max(lengths) + 5000


def test_a_plan_says_what_it_saves():
    found = [{"chosen_ids": [1] * 100 + [2] * 20, "rejected_ids": [1] * 100 + [3] * (1 + i % 2)} for i in range(32)]
    how = {"batch_size": 4, "accumulation": 2, "bucket_cost": 0, "run_steps": 4}
    plan = plan_layout(Dataset.from_list(found), lambda epoch: np.arange(32), "shared", **how)
    assert (plan.padded, plan.real) == (8 * 2 * 120, 8 * 120 + 4 * (101 + 102))
    assert plan.buckets.buckets == (512,) and plan.computed == 1024


def test_a_plan_has_room_for_the_steps_of_later_epochs():
    """Two long pairs meet in the second epoch only."""
    found = [{"chosen_ids": [1] * length, "rejected_ids": [2]} for length in (900, 10, 900, 10)]
    orders = [np.array([0, 1, 2, 3]), np.array([0, 2, 1, 3])]
    how = {"batch_size": 2, "accumulation": 1, "bucket_cost": 0, "run_steps": 4}
    plan = plan_layout(Dataset.from_list(found), lambda epoch: orders[epoch % 2], "shared", **how)
    assert plan.buckets.buckets == (64, 960, 1856)


def test_rows_are_as_long_as_steps_ask_for_where_a_run_pays_for_it():
    """One long text in fifty steps: it has rows of its own, unless compiling costs more than all the copying."""
    found = [{"chosen_ids": [1] * (4000 if i == 70 else 100), "rejected_ids": [2] * 60} for i in range(200)]
    how = {"batch_size": 4, "accumulation": 1, "run_steps": 50, "by_rows": True}
    planned = [
        plan_layout(Dataset.from_list(found), lambda epoch: np.arange(200), "packed", bucket_cost=cost, **how).shapes
        for cost in (0, 10**6)
    ]
    assert [plan.pairs for plan in planned] == [((640, 128), (4544, 4032)), ((4544, 4032),)]
    rare = planned[0]
    assert rare(600, 100) == (640, 128) and rare(600, 200) == rare(641, 10) == (4544, 4032)
    assert rare(600, 5000) == (640, 8192) and rare(5000, 10) == (Buckets()(5000), 256)


def test_nothing_compiles_late():
    """But for the longest: where it comes is where the data has it."""
    lengths = [100] * 99 + [400] + [200, 900] * 50
    found = Dataset.from_list([{"chosen_ids": [1] * (length - 1), "rejected_ids": [2]} for length in lengths])
    how = {"batch_size": 1, "accumulation": 1, "bucket_cost": 0, "run_steps": len(lengths)}
    plan = plan_layout(found, lambda epoch: np.arange(len(lengths)), "shared", **how)
    assert plan.buckets.buckets == (128, 448, 960)


def test_a_longer_run_pays_for_more_lengths():
    found = [{"chosen_ids": [1] * length, "rejected_ids": [2]} for length in (900, 200)]
    how = {"batch_size": 1, "accumulation": 1, "bucket_cost": 1500}
    buckets = [
        plan_layout(
            Dataset.from_list(found), lambda epoch: np.arange(2), "shared", run_steps=steps, **how
        ).buckets.buckets
        for steps in (2, 20)
    ]
    assert buckets == [(960,), (256, 960)]


def served(lengths, **how):
    """What steps of one pair each, all of its tokens its own, are as long as, when its run compiles beside them."""
    pairs = Dataset.from_list([{"chosen_ids": [1] * (length - 1), "rejected_ids": [2]} for length in lengths])
    how = {"batch_size": 1, "accumulation": 1, "run_steps": 10**9} | how
    buckets = plan_layout(pairs, lambda epoch: np.arange(len(lengths)), "shared", **how).buckets
    return buckets, [buckets(length, step) for step, length in enumerate(lengths)]


def test_the_next_longer_one_serves_until_a_length_is_made():
    """One at a time is made, in the time of 1,000 tokens: 960 waited for, 256 there at step 2, 512 at step 5."""
    lengths = [900, 200, 200, 500, 500, 500, 200, 900]
    buckets, found = served(lengths, bucket_cost=1000, at_once=1)
    assert buckets.buckets == (256, 512, 960) and found == [960, 960, 256, 960, 960, 512, 256, 960]
    assert [buckets(length) for length in lengths] == [960, 256, 256, 512, 512, 512, 256, 960]  # in an evaluation
    assert served(lengths, bucket_cost=1000, at_once=3)[1] == [960, 256, 256, 512, 512, 512, 256, 960]
    assert served(lengths, bucket_cost=1000)[0].ready == ()


def test_where_nothing_longer_is_made_a_step_waits():
    assert served([200, 900, 200, 900], bucket_cost=10**6, at_once=1)[1] == [256, 960, 256, 960]
    late = served([200] * EARLY + [900], bucket_cost=0, at_once=1)
    assert late[1][-1] == 960 and late[0](2000, 0) == Buckets()(2000)


@given(st.lists(st.integers(1, 3000), min_size=1, max_size=40), st.integers(1, 4), st.integers(0, 5000))
def test_what_serves_has_been_made_or_is_waited_for(lengths, at_once, cost):
    """A step waits for a length of its own alone, and only where none was there that it fits on."""
    buckets, found = served([length + 1 for length in lengths], bucket_cost=cost, at_once=at_once)
    made = set()
    for step, (length, bucket) in enumerate(zip(lengths, found, strict=True)):
        own = buckets(length + 1)
        made |= {other for other, ready in zip(buckets.buckets, buckets.ready, strict=True) if ready < step}
        assert bucket == own or (bucket > own and own not in made)
        assert bucket in buckets.buckets and buckets.ready[buckets.buckets.index(bucket)] <= step
    assert not buckets.ready or max(buckets.ready) <= EARLY
