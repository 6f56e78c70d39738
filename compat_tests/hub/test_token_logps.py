"""Log-probabilities and entropies of tokens against torch, including gradients."""

from __future__ import annotations

import jax
import numpy as np
import pytest

from compat_tests.models import causal
from trl_jax.hub.auto import AutoModelForCausalLM, AutoModelForSequenceClassification
from trl_jax.hub.pretrained import token_logps_and_entropies

torch = pytest.importorskip("torch")
IDS = np.random.default_rng(0).integers(5, 400, (3, 9))
MASK = np.array([[1] * 9, [1] * 6 + [0] * 3, [1] * 2 + [0] * 7])


def test_values_and_gradients_are_torchs(tmp_path):
    folder = causal.build(tmp_path, "llama", tie=True)
    model, reference = AutoModelForCausalLM.from_pretrained(folder), causal.reference(folder)
    logps, entropies = token_logps_and_entropies(model, IDS, MASK, 0.7)
    z = torch.log_softmax(causal.forward(reference, IDS, MASK)[:, :-1] / 0.7, -1)
    real = torch.tensor(MASK[:, 1:])
    wanted = (z.gather(-1, torch.tensor(IDS[:, 1:, None]))[..., 0] * real, -(z.exp() * z).sum(-1) * real)
    for found, other in zip((logps, entropies), wanted, strict=True):
        np.testing.assert_allclose(found, other.detach().numpy(), atol=2e-5)
    (wanted[0].sum() + 0.3 * wanted[1].sum()).backward()

    def total(params):
        logps, entropies = token_logps_and_entropies(model, IDS, MASK, 0.7, params=params)
        return logps.sum() + 0.3 * entropies.sum()

    gradients = jax.jit(jax.grad(total))(model.params)["decoder.layers.mlp.up.weight"]
    theirs = [layer.mlp.up_proj.weight.grad.numpy() for layer in reference.model.layers]
    np.testing.assert_allclose(gradients, np.stack(theirs), atol=2e-4)


def test_other_heads_and_short_rows_are_refused(checkpoint, tmp_path):
    with pytest.raises(ValueError, match="'score' head, but a language model is required"):
        token_logps_and_entropies(AutoModelForSequenceClassification.from_pretrained(checkpoint("llama")), IDS)
    model = AutoModelForCausalLM.from_pretrained(causal.build(tmp_path, "llama", tie=True))
    with pytest.raises(ValueError, match=r"got \[3, 1\]"):
        token_logps_and_entropies(model, IDS[:, :1])
