"""Lengths of packed rows: what steps need against what compilations cost."""

from __future__ import annotations

from hypothesis import given
from hypothesis import strategies as st

from trl_jax.core.outputs import BLOCK
from trl_jax.data.layout_plan import Buckets, fitted, rounded


@given(st.integers(1, 100_000))
def test_buckets_without_a_survey(tokens):
    bucket = Buckets()(tokens)
    assert tokens <= bucket < max(tokens + 128, 1.06 * tokens + 128) and bucket % BLOCK == 0
    assert Buckets()(bucket) == bucket


@given(st.lists(st.integers(1, 9000), min_size=1, max_size=60), st.integers(0, 20_000))
def test_fitted_buckets_hold_every_length_and_no_single_one_is_cheaper(lengths, cost):
    buckets = fitted(lengths, cost)
    assert all(length <= buckets(length) and buckets(length) in buckets.lengths for length in lengths)
    spent = sum(map(buckets, lengths)) + cost * len(buckets.lengths)
    assert spent <= len(lengths) * buckets(max(lengths)) + cost
    blocks = [-(-length // BLOCK) for length in lengths]
    assert spent <= BLOCK * sum(blocks) + cost * len(set(blocks))
    assert buckets(max(lengths) + 5000) >= max(lengths) + 5000


@given(st.lists(st.integers(1, 9000), min_size=1, max_size=60), st.integers(0, 20_000))
def test_rounded_buckets_hold_every_length_for_a_quarter_of_a_compilation_each(lengths, cost):
    buckets = fitted(lengths, cost)
    round_ones = rounded(buckets, lengths, cost)
    assert len(round_ones.lengths) <= len(buckets.lengths)
    assert all(length <= round_ones(length) and round_ones(length) % BLOCK == 0 for length in lengths)
    further = sum(map(round_ones, lengths)) - sum(map(buckets, lengths))
    assert 0 <= further <= cost / 4 * len(buckets.lengths)


def test_buckets_of_short_runs_are_those_of_other_texts():
    """Programs for 1,024 and 1,536 are likely cached from other datasets. A long run wastes no tokens, and long rows
    are never rounded up."""
    short = [rounded(Buckets((length,)), [length] * 3, 10_000).lengths for length in (832, 960, 1024, 1088, 1472, 2112)]
    assert short == [(1024,), (1024,), (1024,), (1536,), (1536,), (2112,)]
    assert rounded(Buckets((960,)), [960] * 100, 10_000).lengths == (960,)
    assert rounded(Buckets((960, 1024)), [960, 1024], 10_000).lengths == (1024,)
