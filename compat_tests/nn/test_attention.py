"""Attention against its formula in float64, its masks, and its dropout."""

from __future__ import annotations

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from trl_jax.nn.attention import Dropout, attend

QUICKLY = {"xla_backend_optimization_level": 0}


def formula(q, k, v, scale, seen):
    """Softmax attention row by row and head by head; `seen` [R, T, S]."""
    k, v = (np.repeat(x.astype(np.float64), q.shape[2] // x.shape[2], axis=2) for x in (k, v))
    scores = np.einsum("rthc,rshc->rhts", q.astype(np.float64), k) * scale
    scores = np.where(seen[:, None], scores, -np.inf)
    weights = np.exp(scores - scores.max(axis=-1, keepdims=True))
    return np.einsum("rhts,rshc->rthc", weights / weights.sum(axis=-1, keepdims=True), v)


def inputs(length, rows=2, heads=4, key_heads=2, channels=8):
    draw = np.random.default_rng(length).normal
    sizes = heads, key_heads, key_heads
    return [draw(size=(rows, length, count, channels)).astype(np.float32) for count in sizes]


@pytest.mark.parametrize("window", [None, 5, 140])
@pytest.mark.parametrize("length", [1, 20, 150])
def test_the_formula(length, window):
    """One block of queries and more than one; windows that cut within a block and across."""
    q, k, v = inputs(length)
    valid = np.random.default_rng(0).random((2, length)) < 0.8
    distance = np.arange(length)[:, None] - np.arange(length)
    causal = (distance >= 0) & (distance < (window or length))
    seen = causal & (valid[:, None] | (distance == 0))
    how = {"scale": 0.3, "window": None if window is None else jnp.int32(window)}
    with jax.disable_jit():
        np.testing.assert_allclose(
            attend(q, k, v, valid=valid, **how), formula(q, k, v, 0.3, seen), atol=1e-6
        )
        free = np.broadcast_to(causal, seen.shape)
        np.testing.assert_allclose(attend(q, k, v, **how), formula(q, k, v, 0.3, free), atol=1e-6)


def ones_seen(length, rate, seed=0, rows=16):
    """What each query keeps of values that are all one: 1 on average, with dropout or without."""
    q, k, _ = inputs(length, rows=rows, heads=8)
    v = np.ones_like(k)
    dropout = None if rate is None else Dropout(rate, jax.random.key(seed))
    run = jax.jit(lambda *qkv: attend(*qkv, scale=0.01, dropout=dropout), compiler_options=QUICKLY)
    return np.asarray(run(q, k, v))


def test_dropout_keeps_the_mean():
    kept = ones_seen(150, 0.25)[:, 20:]
    assert kept.mean() == pytest.approx(1.0, abs=0.01)
    assert kept.std() > 0.02


@pytest.mark.parametrize("rate", [0.1, 0.5])
def test_dropout_drops_at_its_rate(rate):
    """The first query sees one key: it has all of it, scaled, or nothing."""
    first = ones_seen(2, rate, rows=500)[:, 0, :, 0]
    np.testing.assert_allclose(np.unique(first), [0.0, 1 / (1 - rate)], rtol=1e-6)
    assert (first == 0).mean() == pytest.approx(rate, abs=0.03)


def test_dropout_follows_its_key():
    np.testing.assert_array_equal(ones_seen(20, 0.3, seed=1), ones_seen(20, 0.3, seed=1))
    assert not np.array_equal(ones_seen(20, 0.3, seed=1), ones_seen(20, 0.3, seed=2))


def test_blocks_of_queries_drop_differently():
    kept = ones_seen(256, 0.5, rows=2)
    assert not np.array_equal(kept[:, 1:128] == 0, kept[:, 129:] == 0)
    assert not np.allclose(kept[:, 100], kept[:, 228])


def test_without_dropout_nothing_is_dropped():
    np.testing.assert_allclose(ones_seen(20, None), 1.0, rtol=1e-6)
