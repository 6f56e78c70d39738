"""What a scan over layers saves for the backward pass."""

from __future__ import annotations

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from trl_jax.models.decoder import checkpointed


@pytest.mark.parametrize("remat", [True, "offloaded"])
def test_a_layer_recomputed_has_the_same_gradient(remat):
    def total(weights, h, remat):
        body = checkpointed(lambda h, weight: (h + jnp.tanh(h @ weight), None), remat=remat, length=2)
        return jnp.sum(jax.lax.scan(body, h, weights)[0])

    dice = np.random.default_rng(0)
    weights, h = (jnp.asarray(dice.normal(size=size), jnp.float32) for size in ((3, 4, 4), (5, 4)))
    gradient = jax.grad(total)
    program = str(jax.make_jaxpr(gradient, static_argnums=2)(weights, h, remat))
    # Residuals are moved to the host and back; on CPU the compiler removes the copies.
    assert ("<host>" in program) == (remat == "offloaded")
    found, wanted = (jax.jit(gradient, static_argnums=2)(weights, h, how) for how in (remat, False))
    np.testing.assert_allclose(found, wanted, rtol=1e-5, atol=1e-6)
