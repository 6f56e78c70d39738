"""The state space of Mamba-2 in chunks against its recurrence in float64: values, states and gradients, on rows and on
every form of packed rows."""

from __future__ import annotations

import functools

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from compat_tests.nn.test_delta_rule import BEFORE, GROUP, HEADS, KEYS, LAYOUTS, QUICKLY, VALUES
from trl_jax.nn.ssd import state_space, state_space_step
from trl_jax.nn.text_order import text_order

GRAD = {"argnums": (0, 1, 2, 3), "has_aux": True}


def drawn(rows, length):
    """C, B, inputs and logarithms of decays, and weights of the outputs; float64."""
    dice = np.random.default_rng(5)
    C, B = (dice.normal(size=(rows, length, HEADS, KEYS)) for _ in "CB")
    x, weight = (dice.normal(size=(rows, length, HEADS, GROUP, VALUES)) for _ in "xw")
    return C, B, x, -np.exp(dice.normal(size=(rows, length, HEADS, GROUP)) - 2), weight


def one_by_one(C, B, x, g, texts, longest):
    """The outputs of each text alone, token by token."""
    out = jnp.zeros_like(x)

    @jax.jit
    def alone(C, B, x, g):
        def token(state, at):
            C, B, x, g = at
            state = state * jnp.exp(g)[..., None, None] + jnp.einsum("kc,kgv->kgcv", B, x)
            return state, jnp.einsum("kc,kgcv->kgv", C, state)

        return jax.lax.scan(token, jnp.zeros((HEADS, GROUP, KEYS, VALUES)), (C, B, x, g))[1]

    for row, at in texts:
        places = np.pad(at, (0, longest - len(at)), mode="edge")
        done = alone(*(y[row, places] for y in (C, B, x, g)))
        out = out.at[row, np.where(np.arange(longest) < len(at), places, out.shape[1])].set(done, mode="drop")
    return out


@functools.cache
def case(name):
    packed, texts, length, longest = LAYOUTS[name]()
    *given, weight = drawn(2, length)
    seen = np.zeros(weight.shape[:2], bool)
    for row, at in texts:
        seen[row, at] = True
    return packed, texts, longest, given, weight * seen[..., None, None, None]


def ours(packed, given, weight):
    order = None if packed is None else text_order(jax.tree.map(jnp.asarray, packed._replace(texts=None)), BEFORE)

    def loss(*given):
        if order is None:
            out, _ = state_space(*given)
        else:
            out = order.restored(state_space(*(order.ordered(y) for y in given), order)[0])
        return jnp.sum(out * weight), out

    return jax.jit(jax.grad(loss, **GRAD), compiler_options=QUICKLY)(*given)


@pytest.mark.parametrize("name", LAYOUTS)
def test_the_recurrence_text_by_text(name):
    packed, texts, longest, given, weight = case(name)

    def theirs(*given):
        out = one_by_one(*given, texts, longest)
        return jnp.sum(out * weight), out

    with jax.enable_x64(True):
        gradients, out = jax.tree.map(np.asarray, jax.grad(theirs, **GRAD)(*given))
    given = [y.astype(np.float32) for y in given]
    found, mine = ours(packed, given, weight.astype(np.float32))
    real = np.asarray(weight != 0)
    for own, exact in zip((mine * real, *found), (out * real, *gradients), strict=True):
        np.testing.assert_allclose(own, exact, atol=3e-6 * np.abs(exact).max())


def test_a_token_at_a_time_goes_on_from_the_state_of_a_row():
    *given, _ = (y.astype(np.float32) for y in drawn(2, 80))
    wanted, last = state_space(*given)
    _, state = state_space(*(y[:, :70] for y in given))
    for at in range(70, 80):
        out, state = state_space_step(*(y[:, at] for y in given), state)
        np.testing.assert_allclose(out, wanted[:, at], atol=1e-5)
    np.testing.assert_allclose(state, last, atol=1e-5)


@pytest.mark.parametrize("field", ["first", "context_end", "prompt"])
def test_a_wrong_layout_is_noticed(field):
    packed, _, _, given, weight = case("pairs" if field == "prompt" else "branches")
    wrong = packed._replace(**{field: getattr(packed, field) // 2})
    given = [y.astype(np.float32) for y in given]
    right, mutant = (ours(each, given, weight)[1] * (weight != 0) for each in (packed, wrong))
    assert not np.abs(right - mutant).max() < 1e-2
