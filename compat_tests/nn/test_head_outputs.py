"""A language-model head in chunks against float64: outputs and gradients, ties, padding, memory."""

from __future__ import annotations

from functools import partial

import jax
import jax.numpy as jnp
import numpy as np
import pytest
import torch

from compat_tests.effort import usual, usually
from trl_jax.core.outputs import TokenOutputs
from trl_jax.nn import head
from trl_jax.nn.head import HeadInputs, token_outputs

VOCABULARY, WIDTH, ROWS = 90, 12, 64
NAMES = TokenOutputs._fields
CASES = {
    "plain": {}, "bias": {"bias": True}, "scale": {"scale": 0.3}, "softcap": {"softcap": 2.0},
    "temperature": {"temperature": 0.7}, "all": {"bias": True, "scale": 1.7, "softcap": 3.0, "temperature": 1.6},
}  # fmt: skip


@pytest.fixture(autouse=True)
def chunks_of_64(monkeypatch):
    monkeypatch.setattr(head, "LOGITS_PER_CHUNK", {"cpu": ROWS * VOCABULARY})
    monkeypatch.setattr(head, "MIN_ROWS_PER_CHUNK", {"cpu": ROWS})


def drawn(places, real, seed=0):
    """Hidden states, weight, bias and targets; the last targets are padding."""
    draw = np.random.default_rng(seed)
    hidden, weight, bias = (
        draw.normal(size=size).astype(np.float32) for size in ((places, WIDTH), (VOCABULARY, WIDTH), (VOCABULARY,))
    )
    targets = np.where(np.arange(places) < real, draw.integers(0, VOCABULARY, places), -1).astype(np.int32)
    return hidden, weight, bias, targets


def formula(hidden, weight, bias, targets, scale=1.0, softcap=None, temperature=1.0):
    """All logits at once, in torch's float64."""
    z = (hidden @ weight.T + (0 if bias is None else bias)) * scale
    z = (z if softcap is None else softcap * torch.tanh(z / softcap)) / temperature
    log_p, real = torch.log_softmax(z, -1), torch.as_tensor(targets >= 0)
    of_target = log_p.gather(1, torch.as_tensor(targets).long().clamp(min=0)[:, None])[:, 0]
    outputs = of_target, -(log_p.exp() * log_p).sum(-1), log_p.mean(-1)
    correct = (z.argmax(-1) == torch.as_tensor(targets)).double()
    outputs += correct, z.mean(-1), torch.logsumexp(2 * log_p, -1)
    return TokenOutputs(*(torch.where(real, output, 0) for output in outputs))


@usual(
    "plain-200-150",
    "bias-200-150",
    "softcap-200-150",
    "temperature-200-150",
    "all-200-150",
    "all-192-192",
    "all-64-3",
    "all-10-9",
    "all-70-0",
)
@pytest.mark.parametrize(
    ("case", "places", "real"),
    usually(
        lambda case, places, _: case == "all" or places == 200,
        [(case, *size) for case in CASES for size in ((200, 150), (192, 192), (64, 3), (10, 9), (70, 0))],
    ),
)
def test_values_and_gradients_of_the_formula(case, places, real):
    """Full and partial chunks, with different cotangents for every output and position, including padding."""
    *arrays, targets = drawn(places, real)
    facts = dict(CASES[case])
    arrays = arrays if facts.pop("bias", False) else arrays[:2]
    cotangents = np.random.default_rng(1).normal(size=(3, places)).astype(np.float32)

    def ours(arrays):
        outputs = token_outputs(*arrays[:2], targets, bias=arrays[2] if len(arrays) > 2 else None, **facts)
        return sum(jnp.sum(g * output) for g, output in zip(cotangents, outputs, strict=False)), outputs

    (_, found), gradients = jax.jit(jax.value_and_grad(ours, has_aux=True))(arrays)
    exact = [torch.tensor(array, dtype=torch.float64, requires_grad=True) for array in arrays]
    wanted = formula(*exact, *[None] * (3 - len(exact)), targets, **facts)
    sum((torch.as_tensor(g) * output).sum() for g, output in zip(cotangents, wanted, strict=False)).backward()
    for name, one, other in zip(NAMES, found, wanted, strict=True):
        assert one.dtype == jnp.float32
        np.testing.assert_allclose(one, other.detach(), rtol=2e-6, atol=2e-5, err_msg=name)
    for gradient, array in zip(gradients, exact, strict=True):
        np.testing.assert_allclose(gradient, array.grad, rtol=1e-4, atol=1e-4)


@pytest.mark.parametrize("name", NAMES[:3])
def test_one_output_alone_differentiated(name):
    """The cotangents of the others are symbolic zeros then."""
    hidden, weight, _, targets = drawn(130, 100)
    run = jax.jit(jax.grad(lambda w: jnp.sum(token_outputs(hidden, w, targets)._asdict()[name])))
    exact = torch.tensor(weight, dtype=torch.float64, requires_grad=True)
    formula(torch.tensor(hidden).double(), exact, None, targets)._asdict()[name].sum().backward()
    np.testing.assert_allclose(run(weight), exact.grad, rtol=1e-4, atol=1e-4)


@pytest.mark.parametrize(
    ("case", "name"),
    usually(
        lambda case, name: case == "all" or name == "logps", [(case, name) for case in CASES for name in NAMES[:3]]
    ),
)
def test_under_a_frozen_weight(case, name):
    """For log-probabilities alone the gradient needs two products: logits are not recomputed."""
    hidden, weight, bias, targets = drawn(130, 100)
    facts = dict(CASES[case])
    bias = bias if facts.pop("bias", False) else None
    cotangent = np.random.default_rng(1).normal(size=130).astype(np.float32)

    def ours(hidden):
        return jnp.sum(token_outputs(hidden, weight, targets, bias=bias, **facts)._asdict()[name] * cotangent)

    exact = torch.tensor(hidden, dtype=torch.float64, requires_grad=True)
    frozen = [None if array is None else torch.tensor(array).double() for array in (weight, bias)]
    wanted = formula(exact, *frozen, targets, **facts)
    (wanted._asdict()[name] * torch.tensor(cotangent)).sum().backward()
    traced = jax.jit(jax.grad(ours)).trace(hidden)
    np.testing.assert_allclose(traced.lower().compile()(hidden), exact.grad, rtol=1e-4, atol=1e-4)
    every = equations(traced.jaxpr.jaxpr)
    assert sum(equation.primitive.name == "dot_general" for equation in every) == (2 if name == "logps" else 4)


def test_a_tie_with_a_smaller_id_is_a_miss():
    weight = np.zeros((VOCABULARY, WIDTH), np.float32)
    weight[[7, 40]] = 1
    found = token_outputs(jnp.ones((3, WIDTH)), weight, jnp.asarray([7, 40, 8], jnp.int32))
    assert found.correct.tolist() == [1, 0, 0]


def test_chunks_without_a_target_are_not_computed():
    """Their hidden states may be anything, and get no gradient."""
    hidden, weight, _, targets = drawn(200, ROWS)
    hidden[ROWS:] = np.nan
    both = jax.jit(jax.grad(lambda *arrays: jnp.sum(token_outputs(*arrays, targets).logps), argnums=(0, 1)))
    d_hidden, d_weight = both(hidden, weight)
    assert np.isfinite(d_weight).all() and np.any(d_weight)
    assert np.any(d_hidden[:ROWS], axis=1).all() and not np.any(d_hidden[ROWS:])
    assert all(np.isfinite(output).all() for output in token_outputs(hidden, weight, targets))


def test_bfloat16_rounds_as_torch():
    """The product, and its sum with the bias, are rounded; everything after is float32, as are sums of gradients."""
    hidden, weight, bias, targets = drawn(150, 140)
    low = jnp.asarray(hidden, jnp.bfloat16)

    def ours(hidden, weight, bias):
        found = token_outputs(hidden, weight, targets, bias=bias, scale=0.5)
        return jnp.sum(found.logps), found

    run = jax.jit(jax.value_and_grad(ours, argnums=(0, 1, 2), has_aux=True))
    (_, found), gradients = run(low, weight, bias)
    halves = [torch.tensor(array).bfloat16() for array in (hidden, weight, bias)]
    z = (halves[0] @ halves[1].T + halves[2]).float().requires_grad_()
    log_p = torch.log_softmax(z * 0.5, -1)[:140]
    wanted = log_p.gather(1, torch.tensor(targets[:140]).long()[:, None])[:, 0]
    np.testing.assert_allclose(found.logps[:140], wanted.detach(), rtol=2e-6, atol=2e-6)
    wanted.sum().backward()
    d_z = z.grad.bfloat16().double()
    exact = d_z @ halves[1].double(), d_z.T @ halves[0].double(), d_z.sum(0)
    assert [gradient.dtype for gradient in gradients] == [jnp.bfloat16, jnp.float32, jnp.float32]
    for gradient, other, near in zip(gradients, exact, (2**-8, 1e-3, 1e-3), strict=True):
        np.testing.assert_allclose(gradient.astype(jnp.float32), other, rtol=near, atol=near)


def total(hidden, weight, targets, bias=None):
    return sum(jnp.sum(output) for output in token_outputs(hidden, weight, targets, bias=bias)[:3])


def equations(jaxpr):
    """Every equation of a jaxpr, including those in loops, calls and custom gradients."""
    for equation in jaxpr.eqns:
        yield equation
        for inner in jax.tree.leaves(tuple(equation.params.values()), is_leaf=lambda leaf: hasattr(leaf, "eqns")):
            if hasattr(inner, "eqns"):
                yield from equations(inner)


def outputs_of_products(function, *arguments):
    """The output shapes of matrix products, and the shapes of all arrays."""
    every = list(equations(jax.make_jaxpr(function)(*arguments).jaxpr))
    shapes = {variable.aval.shape for equation in every for variable in equation.outvars}
    return {e.outvars[0].aval.shape for e in every if e.primitive.name == "dot_general"}, shapes


FROZEN = {
    "not an argument": lambda hidden, weight, bias, targets: jax.grad(total)(hidden, weight, targets, bias),
    "gradient stopped": lambda hidden, weight, bias, targets: jax.grad(
        lambda *both: total(both[0], jax.lax.stop_gradient(both[1]), targets, bias), argnums=(0, 1)
    )(hidden, weight),
    "in a compiled function": lambda hidden, weight, bias, targets: jax.grad(jax.jit(total))(
        hidden, weight, targets, bias
    ),
    "in a scan": lambda hidden, weight, bias, targets: jax.lax.scan(
        lambda sums, turn: (sums + jax.grad(total)(hidden * turn, weight, targets, bias), None), hidden, jnp.arange(2.0)
    ),
}  # fmt: skip


@pytest.mark.parametrize("case", FROZEN)
def test_a_frozen_weight_gets_no_gradient(case):
    """No product has its shape, unlike with a trained weight."""
    hidden, weight, bias, targets = drawn(200, 150)
    products, _ = outputs_of_products(FROZEN[case], hidden, weight, bias, targets)
    assert products == {(ROWS, VOCABULARY), (ROWS, WIDTH)}
    trained = partial(jax.grad(total, argnums=(0, 1)))
    assert outputs_of_products(trained, hidden, weight, targets)[0] == products | {(VOCABULARY, WIDTH)}


def test_an_adapter_does_not_widen_the_weight():
    """It gives what a weight `[V, D + r]` would give, without a copy of the weight or a gradient of it."""
    hidden, weight, bias, targets = drawn(200, 150)
    inner, outer = (np.random.default_rng(1).normal(size=(size, 4)).astype(np.float32) for size in (200, VOCABULARY))

    def adapted(hidden, inner, outer):
        outputs = HeadInputs(hidden, weight, bias, inner=inner, outer=outer).token_outputs(targets)
        return sum(jnp.sum(output) for output in outputs[:3])

    def widened(hidden, inner, outer):
        return total(jnp.hstack([hidden, inner]), jnp.hstack([weight, outer]), targets, bias)

    found, wanted = (jax.grad(each, argnums=(0, 1, 2))(hidden, inner, outer) for each in (adapted, widened))
    for mine, other in zip(found, wanted, strict=True):
        np.testing.assert_allclose(mine, other, rtol=1e-4, atol=1e-5)
    products, shapes = outputs_of_products(jax.grad(adapted, argnums=(0, 1, 2)), hidden, inner, outer)
    assert (VOCABULARY, WIDTH) not in products and (VOCABULARY, WIDTH + 4) not in shapes


def test_never_all_logits():
    hidden, weight, bias, targets = drawn(400, 390)
    run = jax.grad(total, argnums=(0, 1, 3))
    largest = max(map(np.prod, outputs_of_products(run, hidden, weight, targets, bias)[1]))
    assert largest == ROWS * VOCABULARY
    compiled = jax.jit(run).lower(hidden, weight, targets, bias).compile()
    assert compiled.memory_analysis().temp_size_in_bytes < 400 * VOCABULARY * 4
