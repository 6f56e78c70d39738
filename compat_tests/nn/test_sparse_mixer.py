"""Experts, weights and gradients of the sparse mixer match transformers, given the same random numbers."""

from __future__ import annotations

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from compat_tests.models.torch_draws import TorchDraws
from trl_jax.nn.moe import SparseMixer

torch = pytest.importorskip("torch")

SCORES = np.random.default_rng(0).normal(size=(400, 6)).astype(np.float32)
PULL = np.random.default_rng(1).normal(size=(400, 2)).astype(np.float32)
KEY = jax.random.key(5)


def ours(mixer, key, scores=SCORES):
    """Weights, experts, and the gradient of the scores."""

    def pulled(scores):
        weights, selected = mixer(scores, key)
        return jnp.sum(weights * PULL[: len(scores)]), (weights, selected)

    gradient, found = jax.grad(pulled, has_aux=True)(jnp.asarray(scores))
    return *map(np.asarray, found), np.asarray(gradient)


def theirs(mixer, training):
    from transformers.models.phimoe.modeling_phimoe import sparsemixer

    scores = torch.tensor(SCORES, requires_grad=True)
    weights, selected = sparsemixer(scores, mixer.jitter, training)
    (weights * torch.tensor(PULL)).sum().backward()
    return weights.detach().numpy(), selected.numpy(), scores.grad.numpy()


def assert_same(found, wanted):
    np.testing.assert_array_equal(found[1], wanted[1])
    np.testing.assert_allclose(found[0], wanted[0], rtol=1e-6)
    np.testing.assert_allclose(found[2], wanted[2], rtol=1e-4, atol=1e-7)


@pytest.mark.parametrize("jitter", [0.0, 0.01, 0.3])
def test_evaluation(jitter):
    mixer = SparseMixer(jitter, 0.0)
    assert_same(ours(mixer, None), theirs(mixer, training=False))


@pytest.mark.parametrize("jitter", [0.0, 0.01, 0.3])
def test_training(jitter, monkeypatch):
    mixer = SparseMixer(jitter, 0.0)
    draws = TorchDraws(monkeypatch)
    draws.of_sparse_mixer(KEY, SCORES.shape)
    found, wanted = ours(mixer, KEY), theirs(mixer, training=True)
    assert draws.used_up
    assert_same(found, wanted)
    calm = ours(mixer, None)
    assert np.any(found[1] != calm[1]) == (jitter > 0)  # experts are sampled if there are several candidates
    assert np.any(found[0] < calm[0].min()) == (jitter > 0)  # and some weights are scaled down
    assert np.any(found[2]) == (jitter > 0)


def test_how_often_candidates_are_drawn():
    """The first expert by its probability, the second by its probability among the remaining ones."""
    scores = np.tile(np.float32([1.0, 1.6, 1.9, -3.0]), (40_000, 1))
    weights, selected = map(np.asarray, SparseMixer(0.3, 0.0)(jnp.asarray(scores), KEY))
    chance = np.exp(scores[0, :3]) / np.exp(scores[0, :3]).sum()
    for expert, wanted in enumerate(chance):
        first = selected[:, 0] == expert
        assert abs(first.mean() - wanted) < 0.01
        others = [other for other in range(3) if other != expert]
        for other in others:
            share = chance[other] / sum(chance[others])
            assert abs((selected[first, 1] == other).mean() - share) < 0.015
    whole = chance[selected[:, 0]]
    # The most likely expert's weight is never scaled down.
    assert np.allclose(weights[selected[:, 0] == 2, 0], chance[2])
    scaled = np.isclose(weights[:, 0], 0.3333 * whole)
    assert abs(scaled[selected[:, 0] != 2].mean() - 0.75) < 0.01


def test_the_input_is_multiplied_twice():
    mixer, ones = SparseMixer(0.0, 0.1), jnp.ones((500, 64))
    factors = np.asarray(mixer.jittered(ones, KEY))
    assert 0.81 <= factors.min() < 0.83 and 1.18 < factors.max() <= 1.21
    once = 0.2**2 / 12  # variance of one of the two factors
    assert abs(factors.var() - (2 * once + once**2)) < 0.02 * once and abs(factors.mean() - 1) < 1e-3
    np.testing.assert_array_equal(SparseMixer(0.1, 0.0).jittered(ones, KEY), ones)
