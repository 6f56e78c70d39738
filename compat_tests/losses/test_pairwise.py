"""The pairwise loss against its formula in float64."""

from __future__ import annotations

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from trl_jax.losses.supervised import pairwise_loss

PAIRS = 7
chosen, rejected, margin = np.random.default_rng(0).normal(size=(3, PAIRS)).astype(np.float32) * 2
weight = np.random.default_rng(1).uniform(0.1, 1.0, PAIRS).astype(np.float32)


def formula(c, r, w, m=0.0, coefficient=0.0):
    c, r, w, m = (np.asarray(x, np.float64) for x in (c, r, w, m))
    return np.sum(w * (np.logaddexp(0.0, -(c - r - m)) + coefficient * (c + r) ** 2))


@pytest.mark.parametrize("coefficient", [None, 0.01, 0.7])
@pytest.mark.parametrize("with_margin", [False, True])
def test_value_and_gradient(with_margin, coefficient):
    m = margin if with_margin else None

    def loss(c, r):
        return pairwise_loss(c, r, weight=weight, margin=m, center_rewards_coefficient=coefficient)[0]

    shift, factor = (m if with_margin else 0.0), coefficient or 0.0
    value, gradients = jax.jit(jax.value_and_grad(loss, argnums=(0, 1)))(chosen, rejected)
    assert value.dtype == jnp.float32 and value.shape == ()
    assert float(value) == pytest.approx(formula(chosen, rejected, weight, shift, factor), rel=1e-6)
    lead = (chosen - rejected - shift).astype(np.float64)
    pull, center = -weight / (1 + np.exp(lead)), 2 * factor * weight * (chosen + rejected)
    np.testing.assert_allclose(gradients[0], pull + center, rtol=1e-5, atol=1e-7)
    np.testing.assert_allclose(gradients[1], -pull + center, rtol=1e-5, atol=1e-7)


@pytest.mark.parametrize("lead", [-200.0, -30.0, 0.0, 30.0, 200.0])
def test_far_leads_stay_exact(lead):
    value, _ = pairwise_loss(jnp.asarray([lead]), jnp.zeros(1), weight=jnp.ones(1))
    assert float(value) == pytest.approx(formula([lead], [0.0], [1.0]), rel=1e-6)


def test_without_centring_a_coefficient_of_zero_is_the_same():
    with_none, _ = pairwise_loss(chosen, rejected, weight=weight)
    with_zero, _ = pairwise_loss(chosen, rejected, weight=weight, center_rewards_coefficient=0.0)
    assert with_none == with_zero


def test_trls_mean_is_a_choice_of_weights():
    """Two micro-batches of 4 and 3 pairs: weights that give the mean of their means."""
    by_micro_batch = np.asarray([1 / 8] * 4 + [1 / 6] * 3, np.float32)
    value, _ = pairwise_loss(chosen, rejected, weight=by_micro_batch)
    means = [formula(chosen[s], rejected[s], np.ones(PAIRS)[s]) / len(chosen[s]) for s in (slice(4), slice(4, 7))]
    assert float(value) == pytest.approx(np.mean(means), rel=1e-6)


def test_sums_and_counts():
    c, r = np.asarray([1.0, -2.0, 0.5, 3.0]), np.asarray([0.0, 1.0, 0.5, -1.0])
    _, sums = pairwise_loss(c, r, weight=np.full(4, 0.25))
    wanted = {
        "pairs": 4,
        "correct": 2,
        "margin_sum": 2.0,
        "reward_sum": 3.0,
        "reward_min": -2.0,
        "reward_max": 3.0,
    }
    assert {name: float(value) for name, value in sums.items()} == wanted
    assert {value.dtype for value in sums.values()} == {jnp.dtype("float32")}


@pytest.mark.parametrize("filler", [0.0, 1e4, -1e4])
def test_pairs_that_only_fill_the_shape_change_nothing(filler):
    """Neither the loss, nor a sum, an extreme or a gradient."""

    def padded(x, value):
        return np.concatenate([x, np.full(3, value, np.float32)])

    how = {"margin": padded(margin, 0.0), "weight": padded(weight, 0.0), "center_rewards_coefficient": 0.1}
    bare = {"margin": margin, "weight": weight, "center_rewards_coefficient": 0.1}
    run = jax.jit(jax.value_and_grad(pairwise_loss, has_aux=True))
    (value, sums), gradient = run(padded(chosen, filler), padded(rejected, -filler / 2), **how)
    (wanted, wanted_sums), wanted_gradient = run(chosen, rejected, **bare)
    assert float(value) == pytest.approx(float(wanted), rel=1e-6)
    for name, total in wanted_sums.items():
        assert float(sums[name]) == pytest.approx(float(total), rel=1e-6), name
    np.testing.assert_allclose(gradient, padded(np.asarray(wanted_gradient), 0.0), rtol=1e-6)


def test_bfloat16_scores_are_compared_in_float32():
    c, r = jnp.asarray(chosen, jnp.bfloat16), jnp.asarray(rejected, jnp.bfloat16)
    value, sums = pairwise_loss(c, r, weight=weight, center_rewards_coefficient=0.1)
    assert value.dtype == sums["margin_sum"].dtype == jnp.float32
    exact = formula(np.asarray(c, np.float32), np.asarray(r, np.float32), weight, 0.0, 0.1)
    assert float(value) == pytest.approx(exact, rel=1e-6)


def test_nan_is_not_hidden():
    value, _ = pairwise_loss(jnp.asarray([jnp.nan, 1.0]), jnp.zeros(2), weight=jnp.full(2, 0.5))
    assert np.isnan(value)
