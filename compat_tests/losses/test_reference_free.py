"""ORPO and CPO losses against their formulas in float64, including gradients."""

from __future__ import annotations

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from trl_jax.losses.reference_free import ContrastiveLoss, odds_ratio

CHOSEN, REJECTED = np.array([-0.05, -0.6, -2.3, -7.1]), np.array([-1.4, -0.7, -0.01, -6.9])


def slope(of, at, step=1e-6):
    """The derivative of each value in float64, by central differences."""
    return (of(at + step) - of(at - step)) / (2 * step)


def log_sigmoid(values):
    return -np.log1p(np.exp(-values))


def odds(logps):
    p = np.exp(logps)
    return np.log(p / (1 - p))


def of_orpo(chosen, rejected):
    return log_sigmoid(odds(chosen) - odds(rejected))


def test_the_ratio_of_odds():
    ratio, log_odds = odds_ratio(jnp.asarray(CHOSEN, jnp.float32), jnp.asarray(REJECTED, jnp.float32))
    np.testing.assert_allclose(log_odds, odds(CHOSEN) - odds(REJECTED), rtol=2e-6, atol=1e-6)
    np.testing.assert_allclose(ratio, of_orpo(CHOSEN, REJECTED), rtol=2e-6, atol=1e-6)
    pull = jax.grad(lambda chosen, rejected: odds_ratio(chosen, rejected)[0].sum(), (0, 1))
    found = pull(jnp.asarray(CHOSEN, jnp.float32), jnp.asarray(REJECTED, jnp.float32))
    np.testing.assert_allclose(found[0], slope(lambda at: of_orpo(at, REJECTED), CHOSEN), rtol=1e-4)
    np.testing.assert_allclose(found[1], slope(lambda at: of_orpo(CHOSEN, at), REJECTED), rtol=1e-4)


def test_odds_that_are_even_have_a_slope():
    at = jnp.asarray([-np.log(2), -50.0], jnp.float32)
    slopes = jax.grad(lambda logps: odds_ratio(logps, logps - 1)[1].sum())(at)
    assert np.isfinite(slopes).all()


def of_cpo(name, chosen, rejected, beta, smoothing, gamma, alpha):
    score = (lambda logps: logps) if alpha == 0 else (lambda logps: (1 - np.exp(logps) ** -alpha) / alpha)
    delta = score(chosen) - score(rejected)
    if name == "hinge":
        return np.maximum(0, 1 - beta * delta)
    if name == "ipo":
        return (delta - 1 / (2 * beta)) ** 2
    delta = delta - gamma / beta if name == "simpo" else delta
    return -(1 - smoothing) * log_sigmoid(beta * delta) - smoothing * log_sigmoid(-beta * delta)


@pytest.mark.parametrize("alpha", [0.0, 0.25])
@pytest.mark.parametrize("name", ["sigmoid", "hinge", "ipo", "simpo"])
def test_contrastive_losses(name, alpha):
    loss = ContrastiveLoss(name, beta=0.3, label_smoothing=0.1, gamma=0.7, alpha=alpha)

    def ours(chosen, rejected):
        return loss(loss.score(chosen), loss.score(rejected))

    given = jnp.asarray(CHOSEN, jnp.float32), jnp.asarray(REJECTED, jnp.float32)
    np.testing.assert_allclose(ours(*given), of_cpo(name, CHOSEN, REJECTED, 0.3, 0.1, 0.7, alpha), rtol=3e-6, atol=1e-6)
    found = jax.grad(lambda chosen: ours(chosen, given[1]).sum())(given[0])
    wanted = slope(lambda at: of_cpo(name, at, REJECTED, 0.3, 0.1, 0.7, alpha), CHOSEN)
    np.testing.assert_allclose(found, wanted, rtol=1e-4, atol=1e-5)
    assert loss.of_mean_token == (name in ("ipo", "simpo"))
