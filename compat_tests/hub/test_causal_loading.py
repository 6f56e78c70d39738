"""Causal language models: loaded from other kinds and formats of checkpoints, resized, built from a config, converted
to classifiers."""

from __future__ import annotations

import json
import logging

import numpy as np
import pytest
from safetensors.numpy import load_file, save_file

from compat_tests.effort import only_thorough, usual
from compat_tests.hub.test_gguf import write_gguf
from compat_tests.models import causal, variants
from trl_jax.hub.auto import AutoModelForCausalLM, AutoModelForSequenceClassification, find_checkpoint
from trl_jax.hub.config import transformers_config
from trl_jax.hub.config_reader import read_config

torch = pytest.importorskip("torch")
transformers = pytest.importorskip("transformers")


def logits_of(folder, ids, mask):
    with torch.no_grad():
        return causal.forward(causal.reference(folder), ids, mask).numpy()


def assert_same_logits(model, folder):
    ids, mask = causal.rows()
    wanted = logits_of(folder, ids, mask)
    variants.assert_close(np.asarray(model(ids, mask).logits)[mask > 0], wanted[mask > 0], 1e-5, "logits")


@pytest.mark.parametrize("head", ["classifier", "base"])
@pytest.mark.parametrize("family", ["llama", "gpt_neox", "phi"])
def test_a_head_that_is_not_there_is_drawn_as_transformers_draws_it(family, head, tmp_path, caplog):
    folder = variants.tiny_model(tmp_path / "in", family, head=head)
    with caplog.at_level(logging.WARNING):
        model = AutoModelForCausalLM.from_pretrained(folder, seed=5)
    name = "embed_out.weight" if family == "gpt_neox" else "lm_head.weight"
    assert f"has no {name}" in caplog.text
    transformers.set_seed(5)
    theirs = transformers.AutoModelForCausalLM.from_pretrained(folder, dtype=torch.float32)
    np.testing.assert_allclose(
        model.params["lm_head.weight"], theirs.lm_head.weight.detach().numpy(), rtol=1e-6, atol=1e-9
    )
    model.save_pretrained(tmp_path / "out")
    assert_same_logits(model, tmp_path / "out")
    assert "ForCausalLM" in json.loads((tmp_path / "out" / "config.json").read_text())["architectures"][0]


def test_a_tied_head_is_not_drawn(tmp_path, caplog):
    folder = variants.tiny_model(tmp_path, "llama", head="base", tie=True)
    with caplog.at_level(logging.WARNING):
        model = AutoModelForCausalLM.from_pretrained(folder)
    assert "has no" not in caplog.text
    assert_same_logits(model, folder)


def test_a_language_model_becomes_a_scorer_and_a_scorer_a_language_model(tmp_path):
    folder = causal.build(tmp_path / "in", "llama", tie=True)
    AutoModelForSequenceClassification.from_pretrained(folder).save_pretrained(tmp_path / "scorer")
    model = AutoModelForCausalLM.from_pretrained(tmp_path / "scorer")
    model.save_pretrained(tmp_path / "back")
    assert (tmp_path / "back" / "model.safetensors").read_bytes() == (folder / "model.safetensors").read_bytes()
    assert "score.weight" in load_file(tmp_path / "scorer" / "model.safetensors")


def test_an_encoder_has_no_language_models_head(tmp_path):
    with pytest.raises(ValueError, match="model_type 'bert' is bidirectional and has no causal language model"):
        AutoModelForCausalLM.from_pretrained(variants.tiny_model(tmp_path, "bert"))


@usual("llama-False", "llama-True", "phi-False", "gemma4_text-False")
@pytest.mark.parametrize("tie", [False, True])
@pytest.mark.parametrize("family", ["llama", "phi", "gpt_neox", "gemma4_text"])
def test_more_tokens_are_the_mean_of_the_old(family, tie, tmp_path):
    model = AutoModelForCausalLM.from_pretrained(causal.build(tmp_path / "in", family, tie=tie))
    before = {path: np.asarray(array) for path, array in model.params.items()}
    model.resize_token_embeddings(521, pad_to_multiple_of=64)
    for path in [path for path in before if "lm_head" in path or "embed.weight" in path or "table" in path]:
        old, new = before[path][:576], np.asarray(model.params[path])
        assert len(new) == 576
        np.testing.assert_array_equal(new[: len(old)], old)
        np.testing.assert_allclose(new[len(old) :], np.broadcast_to(old.mean(axis=0), new[len(old) :].shape), atol=1e-6)
    model.save_pretrained(tmp_path / "out")
    assert_same_logits(model, tmp_path / "out")


def test_the_generation_config_is_the_checkpoints_and_may_be_changed(tmp_path):
    folder = causal.build(tmp_path / "in", "llama", tie=False)
    path = folder / "generation_config.json"
    # generation values of the checkpoint that contradict each other: transformers refuses to save them
    path.write_text(json.dumps(json.loads(path.read_text()) | {"top_p": 0.6, "do_sample": False, "max_length": 77}))
    model = AutoModelForCausalLM.from_pretrained(folder)
    model.generation_config.eos_token_id = [1, 9]
    model.save_pretrained(tmp_path / "out")
    found = json.loads((tmp_path / "out" / "generation_config.json").read_text())
    assert found["eos_token_id"] == [1, 9] and found["top_p"] == 0.6 and found["max_length"] == 77
    path.unlink()
    assert AutoModelForCausalLM.from_pretrained(folder).generation_config.pad_token_id == model.config.pad_token_id


@pytest.mark.parametrize("family", ["llama", "gemma2", "phi", "granite"])
def test_a_new_model_of_a_config(family, tmp_path):
    config = causal.reference(causal.build(tmp_path / "in", family, tie=False)).config
    model = AutoModelForCausalLM.from_config(config, seed=3)
    model.save_pretrained(tmp_path / "out")
    assert_same_logits(model, tmp_path / "out")
    theirs = dict(transformers.AutoModelForCausalLM.from_config(config).named_parameters())
    assert sum(parameter.numel() for parameter in theirs.values()) == model.num_parameters()
    for name, values in model.named_parameters():
        wanted = theirs[name.replace("embed_out", "lm_head")].detach().numpy()
        facts = ([found.mean(), found.std()] for found in (values, wanted))
        np.testing.assert_allclose(*facts, atol=0.02, err_msg=name)


@pytest.mark.parametrize(("family", "buffer"), [("gemma4_text", "layer_scalar"), ("glm4_moe", "score_correction_bias")])
def test_buffers_are_saved_but_are_no_parameters(family, buffer, tmp_path):
    folder = causal.build(tmp_path / "in", family, tie=False)
    model, theirs = AutoModelForCausalLM.from_pretrained(folder), causal.reference(folder)
    buffers = {name for name in theirs.state_dict() if name.endswith(buffer)}
    assert buffers and buffers <= {name for name, _ in theirs.named_buffers()}
    assert not buffers & {name for name, _ in model.named_parameters()} and buffers <= model.state_dict().keys()
    assert len(list(model.parameters())) == len(model.state_dict()) - len(buffers)


@pytest.mark.parametrize("tie", [False, True])
def test_a_gguf_file(tie, tmp_path):
    folder = causal.build(tmp_path / "in", "llama", tie=tie)
    write_gguf(folder, tmp_path / "model.gguf")
    assert_same_logits(AutoModelForCausalLM.from_pretrained(tmp_path / "model.gguf"), folder)


def test_a_pickled_checkpoint(tmp_path):
    folder = causal.build(tmp_path / "in", "llama", tie=False)
    tensors = {name: torch.tensor(values) for name, values in load_file(folder / "model.safetensors").items()}
    expected = logits_of(folder, *causal.rows())
    torch.save(tensors, folder / "pytorch_model.bin")
    (folder / "model.safetensors").unlink()
    ids, mask = causal.rows()
    found = np.asarray(AutoModelForCausalLM.from_pretrained(folder)(ids, mask).logits)
    variants.assert_close(found[mask > 0], expected[mask > 0], 1e-5)


@only_thorough  # exported/test_tied_heads.py compares its logits and its file
def test_an_exported_model(tmp_path):
    """bloom is not a native family: transformers' own code is exported and run."""
    folder = variants.tiny_model(tmp_path / "in", "bloom", head="causal", n_head=4, n_layer=1)
    model = AutoModelForCausalLM.from_pretrained(folder)
    assert model.backend.name.startswith("exported")
    assert_same_logits(model, folder)
    model.save_pretrained(tmp_path / "out")
    assert_same_logits(AutoModelForCausalLM.from_pretrained(tmp_path / "out"), folder)


def test_the_outline_has_the_shapes_of_the_loaded_model(tmp_path):
    for tie in (False, True):
        checkpoint = find_checkpoint(str(causal.build(tmp_path / str(tie), "phi", tie=tie)), head="lm")
        shapes = {path: array.shape for path, array in checkpoint.outline().params.items()}
        assert shapes == {path: array.shape for path, array in checkpoint.load(0).params.items()}


def changed(folder, **values):
    path = folder / "config.json"
    path.write_text(json.dumps(json.loads(path.read_text()) | values))


def test_keys_of_cohere2s_first_checkpoints_say_what_is_computed(tmp_path):
    folder = variants.tiny_model(tmp_path / "in", "cohere2", head="causal")
    said = {
        "cache_implementation": "hybrid", "order_of_interleaved_layers": "local_attn_first",
        "position_embedding_type": "rope_gptj", "rotary_pct": 1.0, "use_embedding_sharing": True,
        "use_gated_activation": True, "use_parallel_block": True, "use_parallel_embedding": False,
    }  # fmt: skip
    changed(folder, **said)
    assert_same_logits(AutoModelForCausalLM.from_pretrained(folder), folder)
    changed(folder, use_parallel_block=False)
    with pytest.raises(ValueError, match="use_parallel_block must be True.*, got False"):
        AutoModelForCausalLM.from_pretrained(folder)


def test_gpt_neox_has_as_many_heads_of_keys_as_of_queries(tmp_path):
    folder = variants.tiny_model(tmp_path / "in", "gpt_neox", head="causal")
    changed(folder, num_key_value_heads=1)
    assert_same_logits(AutoModelForCausalLM.from_pretrained(folder), folder)


def test_numbers_that_json_does_not_have(tmp_path):
    """For example limits of NemotronH's state-space layers, as transformers writes them."""
    theirs = transformers.NemotronHConfig(time_step_limit=(0.0, float("inf")))
    theirs.save_pretrained(tmp_path)
    assert '"__float__": "Infinity"' in (tmp_path / "config.json").read_text()
    found = transformers_config(read_config(tmp_path), tmp_path / "config.json", "lm")
    assert list(found.time_step_limit) == [0.0, float("inf")]


def test_a_bias_that_the_familys_head_does_not_have_is_left_out_and_said(tmp_path, caplog):
    folder = variants.tiny_model(tmp_path / "in", "llama", head="causal")
    tensors = load_file(folder / "model.safetensors")
    save_file(
        tensors | {"lm_head.bias": np.ones(len(tensors["lm_head.weight"]), np.float32)}, folder / "model.safetensors"
    )
    with caplog.at_level(logging.WARNING):
        model = AutoModelForCausalLM.from_pretrained(folder)
    assert "lm_head.bias is dropped because a LlamaForCausalLM does not have it, as in transformers." in caplog.text
    assert_same_logits(model, folder)
    caplog.clear()
    AutoModelForSequenceClassification.from_pretrained(folder)
    assert "lm_head.bias" not in caplog.text
