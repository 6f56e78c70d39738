"""The losses of desirable and undesirable answers by hand in NumPy, and their gradients."""

from __future__ import annotations

import jax
import numpy as np
import pytest

from trl_jax.losses.kto import UnpairedLoss, kl_estimate

RATIO = np.asarray([0.7, -1.2, 2.0, 0.1], np.float32)
DESIRABLE = np.asarray([True, False, False, True])
WEIGHT = np.asarray([1 / 3, 1 / 3, 1 / 3, 0], np.float32)  # the last one is padding


def sigmoid(x):
    return 1 / (1 + np.exp(-x))


@pytest.mark.parametrize(
    ("name", "losses"),
    [
        ("kto", [1 - sigmoid(0.2 * (0.7 - 0.3)), 1 - sigmoid(0.2 * (0.3 + 1.2)), 1 - sigmoid(0.2 * (0.3 - 2.0))]),
        ("apo_zero_unpaired", [1 - sigmoid(0.2 * 0.7), sigmoid(0.2 * -1.2), sigmoid(0.2 * 2.0)]),
    ],
)
def test_the_formulas(name, losses):
    loss = UnpairedLoss(name, beta=0.2, desirable_weight=2.0, undesirable_weight=0.5)
    assert loss.estimates_kl == (name == "kto")
    wanted = np.dot([2.0, 0.5, 0.5], losses) / 3
    np.testing.assert_allclose(loss(RATIO, DESIRABLE, 0.3 if loss.estimates_kl else 0.0, WEIGHT), wanted, rtol=1e-6)


def test_the_divergence_is_a_mean_of_real_answers_no_less_than_0_without_gradient():
    assert kl_estimate(RATIO, WEIGHT > 0) == pytest.approx(0.5)
    assert kl_estimate(-RATIO, WEIGHT > 0) == kl_estimate(RATIO, WEIGHT > 1) == 0
    assert not jax.grad(lambda ratio: kl_estimate(ratio, WEIGHT > 0))(RATIO).any()
