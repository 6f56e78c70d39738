"""Loops over tokens exported as one operation: Mamba's state spaces."""

from __future__ import annotations

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from compat_tests.effort import THOROUGH, thorough, usual
from compat_tests.exported import configs
from trl_jax.exported import aten

torch = pytest.importorskip("torch")

from compat_tests.exported.check import QUICKLY  # noqa: E402
from trl_jax.exported import program  # noqa: E402
from trl_jax.hub.auto import AutoModelForCausalLM  # noqa: E402


@usual("_in_turn-1", "_joined-2")
@pytest.mark.parametrize("axis", [1, 2])
@pytest.mark.parametrize("way", ["_in_turn", "_joined"])  # for CPUs, and for accelerators
def test_the_recurrence_and_its_gradients_are_those_of_a_loop(axis, way, monkeypatch):
    compute = getattr(aten, way)
    monkeypatch.setattr(aten, "_scan", lambda a, b, axis, reverse: compute(a, b, axis=axis, reverse=reverse))
    rng = np.random.default_rng(0)
    decay, drive, pull = (rng.normal(size=(2, 5, 7)).astype(np.float32) for _ in range(3))
    a, b = torch.tensor(decay, requires_grad=True), torch.tensor(drive, requires_grad=True)
    state, states = torch.zeros_like(b.select(axis, 0)), []
    for place in range(decay.shape[axis]):
        state = a.select(axis, place) * state + b.select(axis, place)
        states.append(state)
    wanted = torch.stack(states, axis)
    wanted.backward(torch.tensor(pull))
    found, back = jax.vjp(lambda decay, drive: aten.linear_recurrence(decay, drive, axis), decay, drive)
    np.testing.assert_allclose(found, wanted.detach().numpy(), rtol=1e-5, atol=1e-5)
    for mine, theirs in zip(back(jnp.asarray(pull)), (a.grad, b.grad), strict=True):
        np.testing.assert_allclose(mine, theirs.numpy(), rtol=1e-4, atol=1e-5)
    np.testing.assert_allclose(
        program._linear_recurrence()(torch.tensor(decay), torch.tensor(drive), axis),
        wanted.detach().numpy(),
        rtol=1e-5,
    )


def test_only_a_linear_recurrence_is_taken_for_one():
    assert program._is_linear_recurrence(lambda left, right: (left[0] * right[0], right[0] * left[1] + right[1]))
    assert not program._is_linear_recurrence(lambda left, right: (left[0] * right[0], right[0] * left[1] - right[1]))
    assert not program._is_linear_recurrence(lambda left, right: left[0] + right[0])
    assert not program._is_linear_recurrence(lambda left, right: (torch.mul(left[0], right[0]), right[1]))


@pytest.mark.parametrize("model_type", ["mamba", thorough("falcon_mamba")])
def test_logits_and_gradients_are_transformers_and_one_program_serves_every_length(model_type, tmp_path):
    import transformers

    torch.manual_seed(0)
    made = transformers.AutoModelForCausalLM.from_config(configs.config(model_type))
    with torch.no_grad():
        for parameter in made.parameters():
            parameter.add_(0.1 * torch.randn_like(parameter))
    made.save_pretrained(tmp_path)
    ours = AutoModelForCausalLM.from_pretrained(tmp_path)
    for length in (24, 40):
        ids, mask = configs.rows(length)
        made.zero_grad()
        wanted = made(input_ids=torch.tensor(ids), attention_mask=torch.tensor(mask)).logits
        if length == 40 and not THOROUGH:  # the same program, so compare only logits
            found, wanted = np.asarray(ours(ids, mask).logits).reshape(wanted.shape), wanted.detach().numpy()
            assert np.abs((found - wanted) * mask[..., None]).max() < 1e-5 * np.abs(wanted).max()
            continue
        pull = np.random.default_rng(1).normal(size=wanted.shape).astype(np.float32) * mask[..., None]
        (wanted * torch.tensor(pull)).sum().backward()
        found, gradients = _ours(ours, ids, mask, pull)
        wanted = wanted.detach().numpy()
        assert np.abs((found - wanted) * mask[..., None]).max() < 1e-5 * np.abs(wanted).max()
        named = {name: parameter.grad.numpy() for name, parameter in made.named_parameters()}
        least = 1e-2 * max(np.abs(gradient).max() for gradient in named.values())
        for name, gradient in named.items():
            far = np.abs(gradients[name] - gradient).max() / max(np.abs(gradient).max(), least)
            assert far < 1e-4, name
    [[(_, program)]] = ours.backend._model._programs.values()
    assert sum(node.op == "trl_jax.linear_recurrence.default" for node in program.nodes) == 2  # one per layer


def _ours(model, ids, mask, pull):
    from trl_jax.models.model import merge

    def pulled(params):
        logits = merge(model.graph, params)(jnp.asarray(ids), None, None, valid=jnp.asarray(mask, bool))
        logits = logits.reshape(pull.shape)
        return jnp.sum(logits * pull), logits

    gradients, logits = jax.jit(jax.grad(pulled, has_aux=True), compiler_options=QUICKLY)(model.params)
    return np.asarray(logits), gradients
