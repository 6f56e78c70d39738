"""Short convolutions along rows and every form of packed rows, against each text alone."""

from __future__ import annotations

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from compat_tests.nn.text_layouts import BEFORE, LAYOUTS, order_of
from trl_jax.nn.attention.inputs import AttentionInputs
from trl_jax.nn.recurrent import silu_convolved

CHANNELS = 5


def convolved(order, x, weight):
    """Our outputs, in the order of the packed rows."""
    out, _ = silu_convolved(x if order is None else order.to_order(x), weight, None, AttentionInputs(1.0, order=order))
    return out if order is None else order.from_order(out)


@pytest.mark.parametrize("layout", LAYOUTS)
def test_the_convolution_text_by_text(layout):
    """Each text alone, preceded by zeros; gradients are those of the sum."""
    packed, texts, length, _ = LAYOUTS[layout]()
    dice = np.random.default_rng(4)
    x = dice.normal(size=(2 if packed is None else len(packed.first), length, CHANNELS)).astype(np.float32)
    weight = dice.normal(size=(CHANNELS, BEFORE + 1)).astype(np.float32)
    wanted, seen = np.zeros_like(x), np.zeros((*x.shape[:2], 1), np.float32)
    for row, at in texts:
        behind = np.pad(x[row, at], ((BEFORE, 0), (0, 0)))
        wanted[row, at] = sum(behind[place : place + len(at)] * weight[:, place] for place in range(BEFORE + 1))
        seen[row, at] = 1
    wanted = wanted / (1 + np.exp(-wanted))
    order = order_of(packed)

    def loss(weight, scale):
        out = convolved(order, x * scale, weight)
        return jnp.sum(seen * jnp.square(out)), out

    (by_weight, by_scale), found = jax.jit(jax.grad(loss, argnums=(0, 1), has_aux=True))(weight, jnp.float32(1))
    np.testing.assert_allclose(found * seen, wanted * seen, atol=1e-5)
    # Inputs and weights are multiplied, so scaling either has the same effect.
    np.testing.assert_allclose(by_scale, np.sum(by_weight * weight), rtol=1e-4)
