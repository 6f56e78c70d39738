"""Config values passed to from_pretrained, as transformers accepts them."""

from __future__ import annotations

import json
import shutil

import numpy as np
import pytest

import trl_jax
from compat_tests.models import causal
from compat_tests.tiny import tiny_model

IDS = np.arange(5, 45).reshape(2, 20)
CASES = [
    ("llama", {"rope_parameters": {"rope_type": "default", "rope_theta": 50.0}}),
    ("llama", {"rms_norm_eps": 0.1, "use_cache": False}),
    ("qwen3", {"hidden_act": "gelu", "pad_token_id": 7}),
    ("mistral", {"sliding_window": 3}),
    ("gpt2", {"layer_norm_epsilon": 0.1, "activation_function": "relu"}),
    ("gemma3_text", {"sliding_window": 2}),
    ("llama", {"num_hidden_layers": 1}),
]


@pytest.fixture(scope="module")
def folder(tmp_path_factory):
    made = {}

    def build(model_type):
        if model_type not in made:
            made[model_type] = causal.build(tmp_path_factory.mktemp(model_type), model_type, tie=False)
        return made[model_type]

    return build


@pytest.mark.parametrize(("model_type", "values"), CASES, ids=str)
def test_they_are_computed_with_and_saved_as_in_transformers(model_type, values, folder, tmp_path):
    torch, transformers = pytest.importorskip("torch"), pytest.importorskip("transformers")
    theirs = transformers.AutoModelForCausalLM.from_pretrained(folder(model_type), **values).eval()
    ours = trl_jax.AutoModelForCausalLM.from_pretrained(folder(model_type), **values)
    with torch.no_grad():
        wanted = theirs(input_ids=torch.tensor(IDS)).logits.numpy()
    found = np.asarray(ours(IDS).logits)
    np.testing.assert_allclose(found, wanted, atol=1e-5 * np.abs(wanted).max())
    plain = np.asarray(trl_jax.AutoModelForCausalLM.from_pretrained(folder(model_type))(IDS).logits)
    assert np.abs(plain - wanted).max() > 1e-3 * np.abs(wanted).max()
    ours.save_pretrained(tmp_path / "ours")
    theirs.save_pretrained(tmp_path / "theirs")
    saved, other = (json.loads((tmp_path / side / "config.json").read_text()) for side in ("ours", "theirs"))
    assert {name: saved[name] for name in values} == {name: other[name] for name in values} == values


def test_another_name_of_a_value_is_the_configs_own(folder, caplog):
    model = trl_jax.AutoModelForCausalLM.from_pretrained(folder("gpt2"), max_position_embeddings=512)
    assert model.config.n_positions == 512
    model = trl_jax.AutoModelForCausalLM.from_pretrained(folder("gpt2"), num_hidden_layers=1)
    assert model.config.n_layer == 1 and "only the first 1 layers are loaded, as requested" in caplog.text


def test_kinds_of_layers_are_those_of_the_layers_that_are_taken(folder, tmp_path):
    """Checked by loading it with transformers, which cannot read what it saves itself in this case."""
    torch, transformers = pytest.importorskip("torch"), pytest.importorskip("transformers")
    theirs = transformers.AutoModelForCausalLM.from_pretrained(folder("qwen3"), num_hidden_layers=2).eval()
    ours = trl_jax.AutoModelForCausalLM.from_pretrained(folder("qwen3"), num_hidden_layers=2)
    ours.save_pretrained(tmp_path)
    again = transformers.AutoModelForCausalLM.from_pretrained(tmp_path).eval()
    with torch.no_grad():
        wanted, read = (model(input_ids=torch.tensor(IDS)).logits.numpy() for model in (theirs, again))
    np.testing.assert_array_equal(read, wanted)
    np.testing.assert_allclose(ours(IDS).logits, wanted, atol=1e-5 * np.abs(wanted).max())


def test_a_config_json_of_fewer_layers_than_the_weights_have_is_refused_all_the_same(folder, tmp_path):
    shutil.copytree(folder("llama"), tmp_path / "cut")
    config = json.loads((tmp_path / "cut" / "config.json").read_text())
    (tmp_path / "cut" / "config.json").write_text(json.dumps(config | {"num_hidden_layers": 1}))
    with pytest.raises(ValueError, match="the weights do not fit config.json"):
        trl_jax.AutoModelForCausalLM.from_pretrained(tmp_path / "cut", use_cache=False)


@pytest.mark.parametrize("values", [{"color": 1}, {"to_dict": 1}, {"rope_theta": 50.0, "sliding_window": 3}], ids=str)
def test_what_the_config_does_not_have_is_refused_as_in_transformers(values, folder):
    transformers = pytest.importorskip("transformers")
    with pytest.raises(TypeError):
        transformers.AutoModelForCausalLM.from_pretrained(folder("llama"), **values)
    with pytest.raises(
        TypeError, match=f"does not accept {', '.join(sorted(values))}. It accepts .* values of the check"
    ):
        trl_jax.AutoModelForCausalLM.from_pretrained(folder("llama"), **values)


@pytest.mark.parametrize("model_type", ["distilbert", "modernbert"])
def test_what_nothing_is_computed_with_is_passed_over_where_a_config_has_none(model_type, tmp_path):
    tiny_model(tmp_path, model_type)
    plain, told = (
        trl_jax.AutoModelForSequenceClassification.from_pretrained(tmp_path, **values)
        for values in ({}, {"use_cache": False})
    )
    assert told.config.to_dict() == plain.config.to_dict()


def test_models_that_are_exported_take_none_that_is_computed_with(tmp_path):
    pytest.importorskip("torch")
    tiny_model(tmp_path, "bloom")
    with pytest.raises(TypeError, match="does not accept layer_norm_epsilon. .*this one runs as an exported program"):
        trl_jax.AutoModelForSequenceClassification.from_pretrained(tmp_path, layer_norm_epsilon=0.1)
    trl_jax.hub.auto.find_checkpoint(str(tmp_path), use_cache=False)
