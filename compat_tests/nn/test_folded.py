"""A linear map and its adapter folded into one matrix give the same outputs."""

from __future__ import annotations

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from trl_jax.nn.linear import Linear, Lora

IN, OUT, RANK = 12, 20, 3


def drawn(seed: int, *shape: int) -> jax.Array:
    return jnp.asarray(np.random.default_rng(seed).normal(size=shape), jnp.float32)


def linear(bias: bool, adapter: dict[str, jax.Array] | None) -> Linear:
    made = Linear(IN, OUT, bias=bias)
    made.weight[...] = drawn(0, OUT, IN)
    if bias:
        made.bias[...] = drawn(1, OUT)
    if adapter is not None:
        made.lora = Lora({"a": drawn(2, RANK, IN), "b": drawn(3, OUT, RANK), "scale": jnp.float32(0.7)} | adapter)
    return made


ADAPTERS = {
    "none": None,
    "plain": {},
    "its own bias": {"bias": drawn(4, OUT)},
    "dora": {"magnitude": jnp.abs(drawn(5, OUT)), "exists": jnp.asarray(True)},
    "dora with its own bias": {"magnitude": drawn(5, OUT), "exists": jnp.asarray(True), "bias": drawn(4, OUT)},
    "a layer without one": {"magnitude": drawn(5, OUT), "exists": jnp.asarray(False), "bias": drawn(4, OUT)},
}


@pytest.mark.parametrize("adapter", ADAPTERS.values(), ids=ADAPTERS)
@pytest.mark.parametrize("bias", [False, True])
def test_folded(bias, adapter):
    made, x = linear(bias, adapter), drawn(6, 5, IN)
    weight, added = made.folded()
    np.testing.assert_allclose(x @ weight.T + (0 if added is None else added), made(x), rtol=1e-5, atol=1e-5)
