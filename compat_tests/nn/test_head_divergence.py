"""The divergence between two heads' distributions against float64, with gradients; chunks, padding, frozen weights."""

from __future__ import annotations

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from compat_tests.effort import only_thorough
from trl_jax.nn import head
from trl_jax.nn.head import HeadInputs, divergences

ROWS, PLACES, VOCABULARY = 8, 21, 50
TARGETS = np.where(np.arange(PLACES) < 17, 1, -1).astype(np.int32)  # the last four are padding


@pytest.fixture(autouse=True)
def small_chunks(monkeypatch):
    monkeypatch.setattr(head, "LOGITS_PER_CHUNK", {"cpu": ROWS * VOCABULARY})
    monkeypatch.setattr(head, "MIN_ROWS_PER_CHUNK", {"cpu": ROWS})


def of_noise(seed: int, width: int, *, bias: bool, scale: float, softcap: float | None) -> HeadInputs:
    dice = np.random.default_rng(seed)
    hidden, weight, own = (dice.normal(size=s).astype(np.float32) for s in ((PLACES, width), (VOCABULARY, width), 50))
    return HeadInputs(hidden, weight, own if bias else None, scale, softcap)


STUDENT = of_noise(0, 12, bias=True, scale=0.7, softcap=4.0)
TEACHER = of_noise(1, 20, bias=False, scale=1.0, softcap=None)
WEIGHTS = np.random.default_rng(2).normal(size=PLACES).astype(np.float32)


def in_float64(student: HeadInputs, teacher: HeadInputs, beta: float, temperature: float) -> tuple:
    """By the formula; for beta 0 and 1, where it is 0, the limits."""

    def log_probs(head: HeadInputs):
        z = jnp.asarray(head.hidden, float) @ jnp.asarray(head.weight, float).T
        z = (z if head.bias is None else z + jnp.asarray(head.bias, float)) * head.scale
        z = z if head.softcap is None else head.softcap * jnp.tanh(z / head.softcap)
        return jax.nn.log_softmax(z / temperature)

    own, other = log_probs(student), log_probs(teacher)
    if beta in (0, 1):
        found = jnp.sum(jnp.exp(own) * (own - other) if beta else jnp.exp(other) * (other - own), axis=1)
    else:
        mixed = jnp.log((1 - beta) * jnp.exp(own) + beta * jnp.exp(other))
        found = beta * jnp.sum(jnp.exp(other) * (other - mixed), axis=1)
        found += (1 - beta) * jnp.sum(jnp.exp(own) * (own - mixed), axis=1)
    counts = TARGETS >= 0
    return jnp.where(counts, found, 0), jnp.where(counts, -jnp.sum(jnp.exp(own) * own, axis=1), 0)


def with_arrays(head: HeadInputs, hidden, weight, bias) -> HeadInputs:
    return HeadInputs(hidden, weight, bias, head.scale, head.softcap)


@pytest.mark.parametrize("temperature", [1.0, 0.6])
@pytest.mark.parametrize("beta", [0.0, 0.3, 1.0])
def test_values_and_gradients(beta, temperature):
    arrays = STUDENT.hidden, STUDENT.weight, STUDENT.bias

    def ours(*arrays):
        found = divergences(with_arrays(STUDENT, *arrays), TEACHER, TARGETS, beta=beta, temperature=temperature)
        return jnp.sum(found.divergence * WEIGHTS), found

    def wanted(*arrays):
        found = in_float64(with_arrays(STUDENT, *arrays), TEACHER, beta, temperature)
        return jnp.sum(found[0] * WEIGHTS), found

    with jax.enable_x64(True):
        doubles = tuple(jnp.asarray(array, float) for array in arrays)
        expected, exact = jax.grad(wanted, argnums=(0, 1, 2), has_aux=True)(*doubles)
        expected, exact = jax.tree.map(np.asarray, (expected, exact))
    gradients, found = jax.jit(jax.grad(ours, argnums=(0, 1, 2), has_aux=True))(*arrays)
    np.testing.assert_allclose(found.divergence, exact[0], rtol=1e-5, atol=2e-6)
    np.testing.assert_allclose(found.entropy, exact[1], rtol=1e-5, atol=2e-6)
    for mine, other in zip(gradients, expected, strict=True):
        np.testing.assert_allclose(mine, other, rtol=1e-4, atol=5e-6)


def test_nothing_goes_to_the_teacher_and_nothing_from_the_entropy():
    def loss(student, teacher):
        found = divergences(student, teacher, TARGETS, beta=0.5)
        return jnp.sum(found.divergence), jnp.sum(found.entropy)

    _, of_teacher = jax.grad(lambda *heads: loss(*heads)[0], argnums=(0, 1))(STUDENT, TEACHER)
    of_entropy = jax.grad(lambda student: loss(student, TEACHER)[1])(STUDENT)
    assert not any(np.any(leaf) for leaf in jax.tree.leaves((of_teacher, of_entropy)))


def test_a_frozen_head_gives_the_same_gradient_to_hidden_states():
    def of(hidden, weight):
        found = divergences(with_arrays(STUDENT, hidden, weight, STUDENT.bias), TEACHER, TARGETS, beta=1.0)
        return jnp.sum(found.divergence * WEIGHTS)

    both = jax.jit(jax.grad(of, argnums=(0, 1)))
    alone = jax.jit(jax.grad(lambda hidden: of(hidden, STUDENT.weight)))
    whole, _ = both(STUDENT.hidden, STUDENT.weight)
    np.testing.assert_allclose(alone(STUDENT.hidden), whole, rtol=1e-5, atol=1e-7)
    lowered = alone.lower(STUDENT.hidden), both.lower(STUDENT.hidden, STUDENT.weight)
    products, all_products = (one.as_text().count("dot_general") for one in lowered)
    assert products == all_products - 1  # the weight's gradient is not computed


@pytest.mark.parametrize("beta", [0.0, 0.5, 1.0])
def test_equal_models_are_not_apart(beta):
    def of(hidden):
        found = divergences(with_arrays(TEACHER, hidden, TEACHER.weight, None), TEACHER, TARGETS, beta=beta)
        return jnp.sum(found.divergence)

    value, gradient = jax.value_and_grad(of)(TEACHER.hidden)
    assert abs(value) < 2e-5 and np.abs(gradient).max() < 1e-5


@only_thorough
def test_sixteen_bits_are_summed_in_float32():
    """Logits are not rounded to 16 bits, which would change a divergence by a hundredth."""
    coarse = jax.tree.map(lambda leaf: jnp.asarray(leaf, jnp.bfloat16), (STUDENT, TEACHER))
    found = divergences(*coarse, TARGETS, beta=1.0)
    exact = in_float64(*jax.tree.map(lambda leaf: leaf.astype(jnp.float32), coarse), 1.0, 1.0)
    np.testing.assert_allclose(found.divergence, exact[0], rtol=1e-4, atol=1e-4)
