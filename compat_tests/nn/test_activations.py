"""Activations against numpy in float64, and dropout of everything."""

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from trl_jax.nn.layers import tanh
from trl_jax.nn.linear import Dropout

SPREAD = np.concatenate([np.linspace(-20, 20, 200_001), np.logspace(-30, 30, 10_001), [0.0]]).astype(np.float32)


@pytest.mark.parametrize(("least", "numbers"), [(0, 4.5), (0.55, 1.5), (2, 0.6)])
def test_tanh_is_the_nearest_number_where_it_is_near_one(least, numbers):
    x = SPREAD[np.abs(SPREAD) >= least]
    exact, found = np.tanh(x.astype(np.float64)), np.asarray(jax.jit(tanh)(x), np.float64)
    assert np.max(np.abs(found - exact) / np.spacing(np.abs(exact).astype(np.float32) + 1e-45)) < numbers


def test_tanhs_gradient_is_that_of_the_number_found():
    """Of the computed value, not of its rounded square: near 1 that would be off by as much as the next float."""
    slope = np.asarray(jax.jit(jax.vmap(jax.grad(tanh)))(SPREAD), np.float64)
    t = np.asarray(jax.jit(tanh)(SPREAD), np.float64)
    np.testing.assert_allclose(slope, (1 - t) * (1 + t), rtol=2e-7)


def test_tanh_of_what_is_no_number_and_of_bfloat16():
    assert np.isnan(tanh(jnp.float32(np.nan))) and tanh(jnp.float32(-np.inf)) == -1.0
    x = jnp.linspace(-4, 4, 999, dtype=jnp.bfloat16)
    assert tanh(x).dtype == jnp.bfloat16
    np.testing.assert_allclose(tanh(x).astype(float), np.tanh(np.asarray(x, float)), rtol=2**-8)


def test_dropping_everything_has_no_gradient():
    def total(x):
        return jnp.sum(Dropout(1.0, jax.random.key(0))(x))

    assert total(jnp.ones(4)) == 0.0 and not jax.grad(total)(jnp.ones(4)).any()
