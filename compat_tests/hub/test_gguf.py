"""A GGUF file trains like the safetensors checkpoint it was converted from."""

from __future__ import annotations

import json
import re

import numpy as np
import pytest
from safetensors.numpy import load_file

from compat_tests.models import variants
from compat_tests.tiny import preference_rows
from trl_jax.hub.auto import AutoModelForSequenceClassification
from trl_jax.trainer.reward_config import RewardConfig
from trl_jax.trainer.reward_trainer import RewardTrainer

gguf = pytest.importorskip("gguf")
pytest.importorskip("torch")

NAMES = {
    "model.embed_tokens": "token_embd",
    "model.norm": "output_norm",
    "lm_head": "output",
    "input_layernorm": "attn_norm",
    "self_attn.q_proj": "attn_q",
    "self_attn.k_proj": "attn_k",
    "self_attn.v_proj": "attn_v",
    "self_attn.o_proj": "attn_output",
    "self_attn.q_norm": "attn_q_norm",
    "self_attn.k_norm": "attn_k_norm",
    "post_attention_layernorm": "ffn_norm",
    "mlp.gate_proj": "ffn_gate",
    "mlp.up_proj": "ffn_up",
    "mlp.down_proj": "ffn_down",
}
TYPES = ("llama", "qwen2", "qwen3")


def theirs(name: str) -> str:
    layer, module, kind = re.fullmatch(r"(?:model\.layers\.(\d+)\.)?(.*)\.(weight|bias)", name).groups()
    return ("" if layer is None else f"blk.{layer}.") + f"{NAMES[module]}.{kind}"


def interleaved(values: np.ndarray, heads: int) -> np.ndarray:
    """Permutes the rows of each head into llama.cpp's order."""
    return values.reshape(heads, 2, -1, *values.shape[1:]).swapaxes(1, 2).reshape(values.shape)


def write_gguf(folder, path, *, quantize=False, **extra):
    """Write the checkpoint in `folder` as llama.cpp's converter would."""
    raw = json.loads((folder / "config.json").read_text())
    vocabulary = json.loads((folder / "tokenizer.json").read_text())
    kind = raw["model_type"]
    writer = gguf.GGUFWriter(path, kind)
    writer.add_context_length(raw["max_position_embeddings"])
    writer.add_block_count(raw["num_hidden_layers"])
    writer.add_embedding_length(raw["hidden_size"])
    writer.add_feed_forward_length(raw["intermediate_size"])
    writer.add_head_count(raw["num_attention_heads"])
    writer.add_head_count_kv(raw["num_key_value_heads"])
    writer.add_layer_norm_rms_eps(raw["rms_norm_eps"])
    writer.add_rope_freq_base(raw["rope_parameters"]["rope_theta"])
    if kind == "qwen3":
        writer.add_key_length(raw["head_dim"])
    tokens = vocabulary["model"]["vocab"]
    special = {entry["content"] for entry in vocabulary["added_tokens"]}
    writer.add_tokenizer_model("gpt2")
    writer.add_tokenizer_pre("gpt-2")
    writer.add_token_list(sorted(tokens, key=tokens.get))
    writer.add_token_types([3 if token in special else 1 for token in sorted(tokens, key=tokens.get)])
    writer.add_token_merges([" ".join(pair) for pair in vocabulary["model"]["merges"]])
    writer.add_eos_token_id(raw["eos_token_id"])
    writer.add_pad_token_id(raw["pad_token_id"])
    for key, value in extra.items():
        writer.add_string(key.replace("__", "."), value)
    for name, values in load_file(folder / "model.safetensors").items():
        turned = kind == "llama" and re.search(r"\.([qk])_proj", name)
        if turned:
            values = interleaved(values, raw["num_attention_heads" if turned[1] == "q" else "num_key_value_heads"])
        if quantize and values.ndim == 2:
            packed = gguf.quants.quantize(values, gguf.GGMLQuantizationType.Q8_0)
            writer.add_tensor(theirs(name), packed, raw_dtype=gguf.GGMLQuantizationType.Q8_0)
        else:
            writer.add_tensor(theirs(name), values)
    writer.write_header_to_file()
    writer.write_kv_data_to_file()
    writer.write_tensors_to_file()
    writer.close()
    return path


@pytest.fixture(autouse=True)
def layer_cache(tmp_path, monkeypatch):
    monkeypatch.setattr("huggingface_hub.constants.HF_ASSETS_CACHE", str(tmp_path / "assets"))


@pytest.mark.parametrize("family", TYPES)
def test_a_file_scores_as_the_checkpoint_it_was_made_of(family, checkpoint, tmp_path):
    folder = checkpoint(family, head="causal", tie=family == "llama", initializer_range=0.02)
    path = write_gguf(folder, tmp_path / "model.gguf")
    wanted, found = (AutoModelForSequenceClassification.from_pretrained(name) for name in (folder, path))
    ids, mask = variants.rows()
    np.testing.assert_array_equal(found(ids, mask).logits, wanted(ids, mask).logits)
    again = AutoModelForSequenceClassification.from_pretrained(tmp_path, gguf_file="model.gguf")
    np.testing.assert_array_equal(again.params["score.weight"], found.params["score.weight"])


def test_quantized_weights_are_read_as_the_gguf_package_reads_them(checkpoint, tmp_path):
    folder = checkpoint("qwen2", head="causal")
    model = AutoModelForSequenceClassification.from_pretrained(write_gguf(folder, tmp_path / "q8.gguf", quantize=True))
    name = "model.layers.1.mlp.up_proj.weight"
    values = load_file(folder / "model.safetensors")[name]
    quantized = gguf.quants.quantize(values, gguf.GGMLQuantizationType.Q8_0)
    wanted = gguf.quants.dequantize(quantized, gguf.GGMLQuantizationType.Q8_0)
    np.testing.assert_array_equal(model.params["decoder.layers.mlp.up.weight"][1], wanted)
    assert 0 < np.abs(wanted - values).max() < 0.05


def test_it_trains_and_is_saved_as_safetensors(checkpoint, tmp_path):
    import transformers
    from datasets import Dataset

    folder = checkpoint("llama", head="causal", initializer_range=0.02)
    path = write_gguf(folder, tmp_path / "model.gguf")
    runs = {}
    for name in (folder, path):
        args = RewardConfig(
            str(tmp_path / "out"), use_cpu=True, bf16=False, report_to="none", max_steps=2, logging_steps=1,
            save_strategy="no", disable_tqdm=True,
        )  # fmt: skip
        trainer = RewardTrainer(str(name), args, train_dataset=Dataset.from_list(preference_rows(16)))
        trainer.train()
        runs[name] = [entry["loss"] for entry in trainer.state.log_history if "loss" in entry]
    assert runs[path] == runs[folder]
    trainer.save_model(str(tmp_path / "final"))
    theirs = transformers.AutoModelForSequenceClassification.from_pretrained(tmp_path / "final")
    ids, mask = variants.rows()
    import torch

    with torch.no_grad():
        wanted = theirs.eval()(input_ids=torch.tensor(ids), attention_mask=torch.tensor(mask)).logits.numpy()
    variants.assert_close(trainer.model(ids, mask).logits, wanted, 1e-5)


def test_what_is_not_read_is_named(checkpoint, tmp_path):
    folder = checkpoint("llama", head="causal", initializer_range=0.02)
    load = AutoModelForSequenceClassification.from_pretrained
    with pytest.raises(ValueError, match="llama.twist may change what the model computes|twist may change"):
        load(write_gguf(folder, tmp_path / "a.gguf", llama__twist="3"))
    with pytest.raises(ValueError, match="rope.scaling.type='yarn' may change"):
        load(write_gguf(folder, tmp_path / "b.gguf", llama__rope__scaling__type="yarn"))
    writer = gguf.GGUFWriter(tmp_path / "c.gguf", "mamba")
    writer.write_header_to_file()
    writer.write_kv_data_to_file()
    writer.close()
    with pytest.raises(ValueError, match="architecture 'mamba', but only llama, qwen2, qwen3 can be read"):
        load(tmp_path / "c.gguf")
    (tmp_path / "d.gguf").write_bytes(b"GGUF" + b"\x00" * 3)
    with pytest.raises(ValueError, match="d.gguf is not a readable GGUF file"):
        load(tmp_path / "d.gguf")
    with pytest.raises(FileNotFoundError, match="has no file 'x.gguf'"):
        load(tmp_path, gguf_file="x.gguf")
