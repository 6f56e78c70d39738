"""Every family in every variant scores and differentiates as transformers does."""

from __future__ import annotations

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from compat_tests.models import variants
from trl_jax import AutoModelForSequenceClassification
from trl_jax.models.functional import merge

torch = pytest.importorskip("torch")

every_variant = pytest.mark.parametrize(("family", "name"), variants.CASES)


@every_variant
def test_scores(family, name, built):
    folder, length = built(family, name), variants.variant(family, name).get("length", variants.LENGTH)
    with_new_head = variants.variant(family, name).get("head") == "causal"
    model = AutoModelForSequenceClassification.from_pretrained(folder)
    if with_new_head:  # a head that both draw: saved by us, read by both
        folder = folder / "saved"
        model.save_pretrained(folder)
    ids, mask = variants.rows(length)
    wanted = variants.reference_logits(folder, ids, mask)
    assert wanted.std() > 0.05
    variants.assert_close(model(ids, mask).logits, wanted, 1e-5)
    unmasked = variants.reference_logits(folder, ids, np.ones_like(ids))
    variants.assert_close(model(ids).logits, unmasked, 1e-5, "scores without a mask")


GRADIENTS = [
    ("llama", "yarn"),
    ("llama", "both_biases"),
    ("qwen2", "wide_heads"),
    ("qwen2", "max_window_layers"),
    ("qwen3", "long_window"),
    ("qwen3", "attention_bias"),
]
QUICKLY = {"xla_backend_optimization_level": 0}  # compiles in a third of the time, computes the same


@pytest.mark.parametrize(("family", "name"), GRADIENTS)
def test_gradients(family, name, built):
    """Of a weighted sum of scores, for every tensor on disk. Row 3 sees a pad: that embedding has none."""
    folder, length = built(family, name), variants.variant(family, name).get("length", variants.LENGTH)
    ids, mask = (rows[:6] for rows in variants.rows(length))
    pull = np.linspace(-1.0, 1.5, len(ids), dtype=np.float32)
    model = AutoModelForSequenceClassification.from_pretrained(folder)
    pulled = _pulled_scores(model, ids, mask, pull)
    gradients = jax.jit(jax.grad(pulled), compiler_options=QUICKLY)(model.params)

    reference = variants.reference(folder)
    logits = reference(input_ids=torch.tensor(ids), attention_mask=torch.tensor(mask)).logits[:, 0]
    (logits * torch.tensor(pull)).sum().backward()
    wanted = {tensor: parameter.grad.numpy() for tensor, parameter in reference.named_parameters()}
    seen = set()
    for wire in model.source.wires:
        for layer, tensor in enumerate(wire.tensors(model.source.arch.num_layers)):
            found = gradients[wire.path][layer] if wire.stacked else gradients[wire.path]
            variants.assert_close(found, wanted[tensor], 1e-4, tensor)
            seen.add(tensor)
    assert seen == set(wanted)
    assert not np.any(gradients["decoder.embed.weight"][0])


def _pulled_scores(model, ids, mask, pull):
    pad_free = np.where(ids != 0, np.arange(ids.shape[1]), 0)
    positions = np.broadcast_to(np.arange(ids.shape[1], dtype=np.int32), ids.shape)

    def total(params):
        scorer = merge(model.graph, params)
        scores = scorer(jnp.asarray(ids), positions, at=pad_free.max(axis=1), valid=jnp.asarray(mask, bool))
        return jnp.sum(scores * pull)

    return total


def test_bfloat16_weights_are_read_exactly(tmp_path):
    folder = variants.tiny_model(tmp_path, "qwen3", dtype="bfloat16")
    ids, mask = variants.rows()
    model = AutoModelForSequenceClassification.from_pretrained(folder)
    variants.assert_close(model(ids, mask).logits, variants.reference_logits(folder, ids, mask), 1e-5)
