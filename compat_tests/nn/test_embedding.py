"""Embedding lookup and its gradient."""

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from trl_jax.nn.linear import rows

WIDTH, VOCABULARY, TOKENS, LAYERS = 64, 8192, 512, 16


@pytest.fixture
def table():
    return jax.random.normal(jax.random.key(0), (50, 8))


def taken(table, ids):
    return jnp.take(table, ids, axis=0, mode="clip")


@pytest.mark.parametrize("shape", [(40,), (3, 7), (1, 1)])
def test_the_gradient_is_that_of_taking_rows_to_the_bit(table, shape):
    """Including repeated ids and one beyond the table."""
    ids = jax.random.randint(jax.random.key(1), shape, 0, 60)
    weight = jax.random.normal(jax.random.key(2), (*shape, 8))

    def gradient(rows):
        return jax.jit(jax.grad(lambda table: jnp.sum(jnp.sin(rows(table, ids)) * weight)))(table)

    np.testing.assert_array_equal(rows(table, ids), taken(table, ids))
    found, wanted = gradient(rows), gradient(taken)
    np.testing.assert_array_equal(np.asarray(found).view(np.int32), np.asarray(wanted).view(np.int32))


def test_a_step_does_not_hold_the_tables_zeros_beside_what_layers_keep():
    """On a CPU, according to the compiler's memory analysis; `taken` shows the difference."""
    layers = jax.ShapeDtypeStruct((LAYERS, WIDTH, WIDTH), jnp.float32)
    table = jax.ShapeDtypeStruct((VOCABULARY, WIDTH), jnp.float32)
    ids = jax.ShapeDtypeStruct((TOKENS,), jnp.int32)

    def scratch(rows):
        def loss(weights, ids):
            table, layers = weights
            h, _ = jax.lax.scan(lambda h, layer: (jnp.tanh(h @ layer) + h, None), rows(table, ids), layers)
            return jnp.sum(jnp.square(h))

        def step(weights, ids):
            gradients = jax.grad(loss)(weights, ids)
            size = sum(jnp.sum(jnp.square(gradient)) for gradient in gradients)
            return jax.tree.map(lambda weight, gradient: weight - gradient / size, weights, gradients)

        compiled = jax.jit(step, donate_argnums=0).lower((table, layers), ids).compile()
        return compiled.memory_analysis().temp_size_in_bytes

    assert scratch(rows) < scratch(taken) - 0.75 * table.size * 4
