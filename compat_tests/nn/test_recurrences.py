"""Recurrent layers computed in chunks against their recurrences in float64: values, states and gradients, on rows and
every form of packed rows."""

from __future__ import annotations

import functools
from collections.abc import Callable
from typing import NamedTuple

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from compat_tests.effort import usual
from compat_tests.nn.text_layouts import LAYOUTS, order_of
from trl_jax.nn.recurrent import delta_rule, delta_step, state_space, state_space_step

HEADS, GROUP, KEYS, VALUES = 2, 2, 8, 12
QUICKLY = {"xla_backend_optimization_level": 0}


class Recurrence(NamedTuple):
    """chunked, step: our functions. token: the formula for one token, (state, its arrays) to (state, output). drawn:
    random arrays of tokens `[rows, length, ...]`."""

    chunked: Callable
    step: Callable
    token: Callable
    drawn: Callable


def _keys_values(dice, *shape):
    """Two arrays of key heads, values, and log decays."""
    first, second = (dice.normal(size=(*shape, HEADS, KEYS)) for _ in "qk")
    values = dice.normal(size=(*shape, HEADS, GROUP, VALUES))
    return first, second, values, -np.exp(dice.normal(size=(*shape, HEADS, GROUP)) - 2)


def _drawn_delta(dice, *shape):
    q, k, v, g = _keys_values(dice, *shape)
    q, k = (x / np.linalg.norm(x, axis=-1, keepdims=True) for x in (q, k))
    return q, k, v, g, dice.uniform(size=g.shape)


def _delta_token(state, at):
    q, k, v, g, beta = at
    state = state * jnp.exp(g)[..., None, None]
    u = beta[..., None] * (v - jnp.einsum("kc,kgcv->kgv", k, state))
    state = state + jnp.einsum("kc,kgv->kgcv", k, u)
    return state, jnp.einsum("kc,kgcv->kgv", q, state)


def _state_space_token(state, at):
    C, B, x, g = at
    state = state * jnp.exp(g)[..., None, None] + jnp.einsum("kc,kgv->kgcv", B, x)
    return state, jnp.einsum("kc,kgcv->kgv", C, state)


RECURRENCES = {
    "delta rule": Recurrence(delta_rule, delta_step, _delta_token, _drawn_delta),
    "state space": Recurrence(state_space, state_space_step, _state_space_token, _keys_values),
}


@functools.cache
def case(kind, layout):
    """The layout's packed rows, texts and maximum length, random arrays of tokens, and output weights; float64."""
    packed, texts, length, longest = LAYOUTS[layout]()
    dice, rows = np.random.default_rng(3), 2 if packed is None else len(packed.first)
    given = RECURRENCES[kind].drawn(dice, rows, length)
    weight = dice.normal(size=(rows, length, HEADS, GROUP, VALUES))
    seen = np.zeros(weight.shape[:2], bool)
    for row, at in texts:
        seen[row, at] = True
    return packed, texts, longest, given, weight * seen[..., None, None, None]


def one_by_one(kind, given, texts, longest):
    """The outputs of each text alone, token by token."""
    out, state = jnp.zeros(given[2].shape), jnp.zeros((HEADS, GROUP, KEYS, VALUES))
    rows = np.asarray([row for row, _ in texts])[:, None]
    places = np.stack([np.pad(at, (0, longest - len(at)), mode="edge") for _, at in texts])
    real = np.arange(longest) < np.asarray([len(at) for _, at in texts])[:, None]
    alone = jax.vmap(lambda *text: jax.lax.scan(RECURRENCES[kind].token, state, text)[1])
    done = alone(*(x[rows, places] for x in given))
    return out.at[rows, np.where(real, places, out.shape[1])].set(done, mode="drop")


def gradients_and_outputs(outputs, count, weight):
    """A function of `count` arrays: the gradient of each, and the outputs."""

    def loss(*given):
        out = outputs(given)
        return jnp.sum(out * weight), out

    return jax.grad(loss, argnums=tuple(range(count)), has_aux=True)


def outputs(kind, order, given):
    """Our outputs, for rows or for texts in this order."""
    if order is None:
        return RECURRENCES[kind].chunked(*given)[0]
    return order.from_order(RECURRENCES[kind].chunked(*(order.to_order(x) for x in given), order)[0])


def ours(kind, packed, given, weight):
    take = gradients_and_outputs(functools.partial(outputs, kind, order_of(packed)), len(given), weight)
    return jax.jit(take, compiler_options=QUICKLY)(*given)


def singles(arrays):
    return [x.astype(np.float32) for x in arrays]


@usual("delta rule-a short row", "delta rule-branches", "state space-branches", "state space-a short row")
@pytest.mark.parametrize("layout", LAYOUTS)
@pytest.mark.parametrize("kind", RECURRENCES)
def test_the_recurrence_text_by_text(kind, layout):
    packed, texts, longest, given, weight = case(kind, layout)
    with jax.enable_x64(True):
        take = gradients_and_outputs(lambda given: one_by_one(kind, given, texts, longest), len(given), weight)
        gradients, out = jax.tree.map(np.asarray, jax.jit(take)(*given))
    found, mine = ours(kind, packed, singles(given), weight.astype(np.float32))
    real = np.asarray(weight != 0)
    for own, exact in zip((mine * real, *found), (out * real, *gradients), strict=True):
        np.testing.assert_allclose(own, exact, atol=3e-6 * np.abs(exact).max())


@pytest.mark.parametrize("kind", RECURRENCES)
def test_a_token_at_a_time_goes_on_from_the_state_of_a_row(kind):
    chunked, step, _, drawn = RECURRENCES[kind]
    chunked, step = jax.jit(chunked, compiler_options=QUICKLY), jax.jit(step)
    given = singles(drawn(np.random.default_rng(3), 2, 80))
    wanted, last = chunked(*given)
    _, state = chunked(*(x[:, :70] for x in given))
    for at in range(70, 80):
        out, state = step(*(x[:, at] for x in given), state)
        np.testing.assert_allclose(out, wanted[:, at], atol=1e-5)
    np.testing.assert_allclose(state, last, atol=1e-5)


@usual("delta rule-context_end", "state space-first", "state space-context_end", "state space-prompt")
@pytest.mark.parametrize("field", ["first", "context_end", "prompt"])
@pytest.mark.parametrize("kind", RECURRENCES)
def test_a_wrong_layout_is_noticed(kind, field):
    packed, _, _, given, weight = case(kind, "pairs" if field == "prompt" else "branches")
    wrong = packed._replace(**{field: getattr(packed, field) // 2})
    run = jax.jit(functools.partial(outputs, kind), compiler_options=QUICKLY)
    right, mutant = (run(order_of(each), singles(given)) * (weight != 0) for each in (packed, wrong))
    assert not np.abs(right - mutant).max() < 1e-2
