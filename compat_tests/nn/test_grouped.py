"""Products of groups of rows with one matrix each, as the experts of a mixture compute them on a CPU."""

from __future__ import annotations

import jax
import jax.numpy as jnp
import numpy as np

from trl_jax.nn.linear import BLOCK, grouped_dot


def test_a_gradient_in_bfloat16_is_rounded_once():
    dice, rows = np.random.default_rng(0), 64 * BLOCK
    x, pull = (jnp.asarray(dice.normal(size=(rows, 8)), jnp.bfloat16) for _ in range(2))
    weight, sizes = jnp.zeros((2, 8, 8), jnp.bfloat16), jnp.array([rows, 0])
    found = jax.grad(lambda w: jnp.sum((grouped_dot(x, w, sizes) * pull).astype(jnp.float32)))(weight)
    exact = np.asarray(pull, np.float64).T @ np.asarray(x, np.float64)
    rounded = np.asarray(jnp.asarray(exact, jnp.bfloat16), np.float64)
    assert found.dtype == jnp.bfloat16 and not found[1].any()
    assert np.abs(np.asarray(found[0], np.float64) - exact).max() <= 1.1 * np.abs(rounded - exact).max()
