"""With cached keys and values, every decoder gives the logits of a full forward pass."""

from __future__ import annotations

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from compat_tests.effort import usual, usually
from compat_tests.models import causal
from trl_jax.generation.decode import prefill
from trl_jax.generation.weights import Weights, layers_for_decoding, trunk_of
from trl_jax.hub.auto import AutoModelForCausalLM
from trl_jax.models.cached_decoder import with_keys
from trl_jax.models.model import merge

pytest.importorskip("torch")

# All with the stack in a scan; those with several RoPEs, windows, soft caps, experts or learned positions also layer by
# layer.
CASES = [(family, False) for family in causal.DECODERS] + [
    (family, True) for family in ("gemma2", "gemma3_text", "gemma4_text", "gpt2", "gpt_oss", "llama4_text", "mixtral")
]
# Latent attention, learned positions, convolutions, windows; generation/test_families.py compares tokens of the others.
USUAL = {("deepseek_v3", False), ("gpt2", False), ("lfm2", False), ("gemma2", True)}
LENGTHS, GROUP, NEW = np.array([11, 7], np.int32), 2, 12  # windows of 7 are exceeded within prompts and after them


@usual("gpt2-False", "lfm2-False", "gemma2-True")
@pytest.mark.parametrize(("family", "by_layer"), usually(lambda *case: case in USUAL, CASES))
def test_logits_are_those_of_whole_texts(family, by_layer, tmp_path):
    model = AutoModelForCausalLM.from_pretrained(causal.build(tmp_path, family, tie=False))
    ids = np.random.default_rng(0).integers(5, model.vocab_size - 8, (4, 24)).astype(np.int32)
    ids[1, :11], ids[3, :7] = ids[0, :11], ids[2, :7]  # two different completions of each prompt
    wanted = np.asarray(model(ids).logits)
    layers = layers_for_decoding(model.graph, model.arrays, None, "cpu") if by_layer else None
    weights = Weights(model.graph, model.arrays, layers, jnp.dtype("float32"), jnp.dtype("float32"))
    sizes = {"group": GROUP, "capacity": 16, "max_tokens": 1000}
    logits, cache = prefill(weights, ids[::2, :12], LENGTHS, LENGTHS.max(), **sizes)
    far = np.abs(logits - wanted[[0, 2], LENGTHS - 1]).max()

    @jax.jit
    def step(cache, tokens, places):
        whole, options = merge(model.graph, model.arrays), {"cache": cache, "layers": layers, "max_tokens": 1000}
        hidden, new = with_keys(trunk_of(whole), tokens[:, None], places[:, None], None, jnp.max(places) + 1, **options)
        return whole.outputs(hidden, None, jnp.float32, None, 1.0), cache.appended(new, after=tokens)

    for number in range(NEW):
        places = np.repeat(LENGTHS, GROUP) + number
        logits, cache = step(cache, ids[np.arange(4), places], places)
        far = max(far, np.abs(logits - wanted[np.arange(4), places]).max())
    assert far < 1e-5 * max(1.0, wanted.std())
    assert int(cache.fill.written) == NEW
