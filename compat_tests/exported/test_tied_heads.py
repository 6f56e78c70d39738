"""Exported causal language models whose head is the embedding table, which torch has under two names."""

from __future__ import annotations

import numpy as np
import pytest
from safetensors.numpy import load_file

from trl_jax import AutoModelForCausalLM

torch = pytest.importorskip("torch")
transformers = pytest.importorskip("transformers")

SIZES = {
    "vocab_size": 32, "hidden_size": 16, "intermediate_size": 32, "num_hidden_layers": 2, "num_attention_heads": 2,
    "num_key_value_heads": 1, "layer_types": ["conv", "full_attention"], "pad_token_id": 0, "bos_token_id": 1,
    "eos_token_id": 2, "tie_word_embeddings": True,
}  # fmt: skip


@pytest.fixture(scope="module")
def folder(tmp_path_factory):
    torch.manual_seed(0)
    out = tmp_path_factory.mktemp("lfm2")
    transformers.Lfm2ForCausalLM(transformers.Lfm2Config(**SIZES)).save_pretrained(out)
    return out


def test_its_logits_are_torchs_and_it_is_saved_once(folder, tmp_path):
    model, ids = AutoModelForCausalLM.from_pretrained(folder, dtype="float32"), np.array([[3, 4, 5, 6]])
    with torch.no_grad():
        theirs = transformers.AutoModelForCausalLM.from_pretrained(folder, dtype=torch.float32)
        wanted = theirs(torch.tensor(ids)).logits.numpy()
    np.testing.assert_allclose(model(ids).logits, wanted, atol=1e-5)
    model.save_pretrained(tmp_path / "out")
    before, after = (load_file(path / "model.safetensors") for path in (folder, tmp_path / "out"))
    assert before.keys() == after.keys() and "lm_head.weight" not in after
    for name, values in before.items():
        np.testing.assert_array_equal(after[name], values)
