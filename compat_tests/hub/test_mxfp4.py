"""MXFP4 experts: dequantized as transformers does, and saved in bfloat16."""

from __future__ import annotations

import json
import re

import ml_dtypes
import numpy as np
import pytest
from safetensors.numpy import load_file, save_file

from compat_tests.models import causal, variants
from compat_tests.tiny import tiny_model
from trl_jax.hub.auto import AutoModelForCausalLM
from trl_jax.hub.formats import INDEX, SINGLE
from trl_jax.hub.gguf import dequantized

torch = pytest.importorskip("torch")
transformers = pytest.importorskip("transformers")

QUANTIZATION = {"quant_method": "mxfp4", "modules_to_not_convert": ["model.layers.*.self_attn", "lm_head"]}
EXPERTS = re.compile(r"experts\.(gate_up|down)_proj$")


def test_every_byte_under_every_scale_is_transformers():
    from transformers.integrations.mxfp4 import convert_moe_packed_tensors

    blocks = np.arange(256, dtype=np.uint8).reshape(1, 1, 1, 16, 16).repeat(2, 0).repeat(127, 1).reshape(2, 127, 16, 16)
    scales = np.arange(1, 255, dtype=np.uint8).reshape(2, 127, 1).repeat(16, 2)
    found = dequantized(blocks, scales)
    wanted = convert_moe_packed_tensors(torch.tensor(blocks), torch.tensor(scales))
    assert found.shape == tuple(wanted.shape) == (2, 512, 127)
    np.testing.assert_array_equal(found.view(np.uint16), wanted.view(torch.int16).numpy().view(np.uint16))


def quantized(folder, *, shards):
    """A tiny checkpoint with random blocks and scales; if sharded, the second shard has the scales."""
    tiny_model(folder, "gpt_oss", head="causal", dtype="bfloat16", sliding_window=7)
    dice, tensors = np.random.default_rng(0), load_file(folder / SINGLE)
    for name in [name for name in tensors if EXPERTS.search(name)]:
        experts, inputs, outputs = tensors.pop(name).shape
        size = (experts, outputs, inputs // 8)
        tensors[f"{name}_blocks"] = dice.integers(0, 256, (*size, 4), dtype=np.uint8)
        tensors[f"{name}_scales"] = dice.integers(120, 126, size, dtype=np.uint8)
    if shards:
        (folder / SINGLE).unlink()
        of = {name: f"model-0000{1 + name.endswith('_scales')}-of-00002.safetensors" for name in tensors}
        for file in set(of.values()):
            save_file({name: tensors[name] for name in tensors if of[name] == file}, folder / file, {"format": "pt"})
        (folder / INDEX).write_text(json.dumps({"metadata": {}, "weight_map": of}))
    else:
        save_file(tensors, folder / SINGLE, {"format": "pt"})
    config = json.loads((folder / "config.json").read_text())
    (folder / "config.json").write_text(json.dumps(config | {"quantization_config": QUANTIZATION}))
    return folder


def theirs(folder, dtype):
    how = transformers.Mxfp4Config(dequantize=True)
    return transformers.AutoModelForCausalLM.from_pretrained(folder, dtype=dtype, quantization_config=how).eval()


def test_a_checkpoint_computes_as_dequantized_by_transformers(tmp_path):
    folder, (ids, mask) = quantized(tmp_path, shards=False), causal.rows()
    with torch.no_grad():
        wanted = causal.forward(theirs(folder, torch.float32), ids, mask).numpy()
    found = np.asarray(AutoModelForCausalLM.from_pretrained(folder, dtype="float32")(ids, mask).logits)
    seen = mask.astype(bool)
    variants.assert_close(found[seen], wanted[seen], 1e-5)


@pytest.mark.parametrize("shards", [False, True])
def test_it_is_saved_as_bfloat16(shards, tmp_path):
    folder = quantized(tmp_path / "in", shards=shards)
    model = AutoModelForCausalLM.from_pretrained(folder, dtype="auto")
    model.save_pretrained(tmp_path / "out")
    theirs(folder, torch.bfloat16).save_pretrained(tmp_path / "theirs")
    ours, wanted = (load_file(tmp_path / side / SINGLE) for side in ("out", "theirs"))
    assert ours.keys() == wanted.keys()
    for name, values in wanted.items():
        assert ours[name].dtype == ml_dtypes.bfloat16
        np.testing.assert_array_equal(ours[name].view(np.uint16), values.view(np.uint16), err_msg=name)
    before, after = (json.loads((side / "config.json").read_text()) for side in (folder, tmp_path / "out"))
    assert after == {key: value for key, value in before.items() if key != "quantization_config"}
    assert not hasattr(model.config, "quantization_config")


def test_the_config_that_scripts_pass_has_dequantize(tmp_path):
    folder = quantized(tmp_path, shards=False)
    plain = AutoModelForCausalLM.from_pretrained(folder)
    how = transformers.Mxfp4Config(dequantize=True)
    told = AutoModelForCausalLM.from_pretrained(folder, quantization_config=how)
    for path, array in plain.params.items():
        np.testing.assert_array_equal(told.params[path], array, err_msg=path)
    with pytest.raises(ValueError, match=r"Mxfp4Config\(dequantize=False\): training requires dequantize=True"):
        AutoModelForCausalLM.from_pretrained(folder, quantization_config=transformers.Mxfp4Config())
