"""The gated delta rule in chunks against its recurrence in float64: values, states and gradients, on rows and on every
form of packed rows."""

from __future__ import annotations

import functools

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from compat_tests.nn import test_branch_attention as branches
from compat_tests.nn import test_packed_attention as pairs
from trl_jax.core.packed import BLOCK, Packed
from trl_jax.nn.delta_rule import delta_rule, delta_step
from trl_jax.nn.text_order import text_order

HEADS, GROUP, KEYS, VALUES, BEFORE = 2, 2, 8, 12, 3
QUICKLY = {"xla_backend_optimization_level": 0}


def drawn(rows, length):
    """Queries, keys, values, decays and strengths, and weights of the outputs; float64."""
    dice = np.random.default_rng(3)
    q, k = (dice.normal(size=(rows, length, HEADS, KEYS)) for _ in "qk")
    q, k = (x / np.linalg.norm(x, axis=-1, keepdims=True) for x in (q, k))
    v, weight = (dice.normal(size=(rows, length, HEADS, GROUP, VALUES)) for _ in "vw")
    g = -np.exp(dice.normal(size=(rows, length, HEADS, GROUP)) - 2)
    return q, k, v, g, dice.uniform(size=g.shape), weight


def one_by_one(q, k, v, g, beta, texts, longest):
    """The outputs of each text alone, token by token."""
    out = jnp.zeros_like(v)

    @jax.jit
    def alone(q, k, v, g, beta):
        def token(state, at):
            q, k, v, g, beta = at
            state = state * jnp.exp(g)[..., None, None]
            u = beta[..., None] * (v - jnp.einsum("kc,kgcv->kgv", k, state))
            state = state + jnp.einsum("kc,kgv->kgcv", k, u)
            return state, jnp.einsum("kc,kgcv->kgv", q, state)

        return jax.lax.scan(token, jnp.zeros((HEADS, GROUP, KEYS, VALUES)), (q, k, v, g, beta))[1]

    for row, at in texts:
        places = np.pad(at, (0, longest - len(at)), mode="edge")
        done = alone(*(x[row, places] for x in (q, k, v, g, beta)))
        out = out.at[row, np.where(np.arange(longest) < len(at), places, out.shape[1])].set(done, mode="drop")
    return out


def plain(length):
    return None, [(row, np.arange(length)) for row in range(2)], length, length


def of_pairs():
    """Two answers to a prompt, one before it."""
    length, longest = 6 * BLOCK, 3 * BLOCK
    packed, positions, who = pairs.drawn(0, length, 2, longest=80)
    rows = enumerate(pairs.as_rows(positions, who, length).places)
    return packed, [(row, at[at < length]) for row, texts in rows for at in texts if at[0] < length], length, longest


def of_branches():
    packed, texts = branches.laid_out()
    return packed, texts, branches.LENGTH, branches.LONGEST


def end_to_end():
    """Texts that share nothing; the row's end is empty."""
    length, ends = 3 * BLOCK, [5, 64, 70, 150]
    first, end = (np.full((1, length), length, np.int32) for _ in "fe")
    texts = [np.arange(*pair) for pair in zip([0, *ends], ends, strict=False)]
    for at in texts:
        first[0, at], end[0, at] = at[0], at + 1
    return Packed(first, end, np.ones_like(first)), [(0, at) for at in texts], length, length


LAYOUTS = {
    "a short row": lambda: plain(10), "rows": lambda: plain(150), "end to end": end_to_end, "pairs": of_pairs,
    "branches": of_branches,
}  # fmt: skip
GRAD = {"argnums": (0, 1, 2, 3, 4), "has_aux": True}


@functools.cache
def case(name):
    packed, texts, length, longest = LAYOUTS[name]()
    *given, weight = drawn(2, length)
    seen = np.zeros(weight.shape[:2], bool)
    for row, at in texts:
        seen[row, at] = True
    return packed, texts, longest, given, weight * seen[..., None, None, None]


@functools.cache
def exactly(name):
    _, texts, longest, given, weight = case(name)

    def theirs(*given):
        out = one_by_one(*given, texts, longest)
        return jnp.sum(out * weight), out

    with jax.enable_x64(True):
        return jax.tree.map(np.asarray, jax.grad(theirs, **GRAD)(*given))


def ours(packed, given, weight):
    order = None if packed is None else text_order(jax.tree.map(jnp.asarray, packed._replace(texts=None)), BEFORE)

    def loss(*given):
        if order is None:
            out, _ = delta_rule(*given)
        else:
            out = order.restored(delta_rule(*(order.ordered(x) for x in given), order)[0])
        return jnp.sum(out * weight), out

    return jax.jit(jax.grad(loss, **GRAD), compiler_options=QUICKLY)(*given)


@pytest.mark.parametrize("name", LAYOUTS)
def test_the_recurrence_text_by_text(name):
    packed, _, _, given, weight = case(name)
    gradients, out = exactly(name)
    given = [x[: len(gradients[0])].astype(np.float32) for x in given]
    found, mine = ours(packed, given, weight.astype(np.float32))
    real = np.asarray(weight != 0)
    for own, exact in zip((mine * real, *found), (out * real, *gradients), strict=True):
        np.testing.assert_allclose(own, exact, atol=3e-6 * np.abs(exact).max())


def test_a_token_at_a_time_goes_on_from_the_state_of_a_row():
    *given, _ = (x.astype(np.float32) for x in drawn(2, 80))
    wanted, last = delta_rule(*given)
    _, state = delta_rule(*(x[:, :70] for x in given))
    for at in range(70, 80):
        out, state = delta_step(*(x[:, at] for x in given), state)
        np.testing.assert_allclose(out, wanted[:, at], atol=1e-5)
    np.testing.assert_allclose(state, last, atol=1e-5)


@pytest.mark.parametrize("field", ["first", "context_end", "prompt"])
def test_a_wrong_layout_is_noticed(field):
    name = "pairs" if field == "prompt" else "branches"
    packed, _, _, given, weight = case(name)
    wrong = packed._replace(**{field: getattr(packed, field) // 2})
    given = [x.astype(np.float32) for x in given]
    right, mutant = (ours(each, given, weight)[1] * (weight != 0) for each in (packed, wrong))
    assert not np.abs(right - mutant).max() < 1e-2
