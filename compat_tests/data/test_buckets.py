"""How long packed rows are: what steps ask for, and what a compilation costs."""

from __future__ import annotations

from hypothesis import given
from hypothesis import strategies as st

from trl_jax.core.packed import BLOCK
from trl_jax.data.layout.buckets import Buckets, fitted


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
