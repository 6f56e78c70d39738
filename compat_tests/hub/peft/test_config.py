"""LoraConfig: PEFT's fields and JSON; unsupported values, files and models are refused by name."""

from __future__ import annotations

import dataclasses
import json
import re
import shutil

import numpy as np
import pytest
from safetensors.numpy import load_file, save_file

import trl_jax
from compat_tests.hub.peft.runs import train
from compat_tests.trainer.trainers import FACTS, make
from trl_jax.hub.peft_config import LoraConfig, TaskType, as_adapter_config, read_adapter_config

ROW = {"r": 2, "target_modules": ["q_proj"], "task_type": "SEQ_CLS"}


@pytest.fixture(scope="module")
def adapter(checkpoint, tmp_path_factory):
    """(base, an adapter for it)."""
    base = checkpoint("llama", **FACTS)
    config = LoraConfig, {"target_modules": ["q_proj"]}
    return base, train(trl_jax, config, base, tmp_path_factory.mktemp("adapter"), rows=4, max_steps=1).folder


def broken(adapter, tmp_path, **keys):
    folder = shutil.copytree(adapter[1], tmp_path / "broken")
    path = folder / "adapter_config.json"
    path.write_text(json.dumps(json.loads(path.read_text()) | keys))
    return folder


def refuses(text, error=ValueError):
    return pytest.raises(error, match=re.escape(text))


def test_fields_defaults_and_keys_are_pefts():
    peft = pytest.importorskip("peft")
    named = [f.name for f in dataclasses.fields(peft.LoraConfig)]
    assert [f.name for f in dataclasses.fields(LoraConfig)] == named
    given = {"r": 4, "task_type": TaskType.SEQ_CLS, "target_modules": ["v_proj"], "use_dora": True}
    mine, other = LoraConfig(**given).to_dict(), peft.LoraConfig(**given).to_dict()
    plain = {key: sorted(v) if isinstance(v, set) else getattr(v, "value", v) for key, v in other.items()}
    assert mine | {"peft_version": None} == plain | {"peft_version": None} and len(mine) == 41


def test_pefts_object_is_taken_and_stays_as_it_was():
    peft = pytest.importorskip("peft")
    given = peft.LoraConfig(r=3, target_modules=["q_proj"], modules_to_save=["score"], rank_pattern={"q_proj": 1})
    found = as_adapter_config(given)
    found.modules_to_save.append("mine")
    assert (found.r, found.rank_pattern, given.modules_to_save) == (3, {"q_proj": 1}, ["score"])


@pytest.mark.parametrize(
    ("keys", "text"),
    [
        ({"r": 0}, "LoraConfig: r must be an integer of at least 1, got 0."),
        ({"lora_alpha": float("nan")}, "LoraConfig: lora_alpha must be a number, got nan."),
        ({"lora_dropout": 1.0}, "lora_dropout must be at least 0 and below 1, got 1.0"),
        ({"bias": "some"}, "LoraConfig: bias must be none, all or lora_only, got 'some'."),
        ({"task_type": "REWARD"}, "task_type must be one of SEQ_CLS"),
        ({"modules_to_save": "score"}, "modules_to_save must be a list of names, got 'score'"),
        ({"rank_pattern": {"q": 0}}, "rank_pattern must be ranks of at least 1, got {'q': 0}"),
        ({"modules_to_save": 5}, "modules_to_save must be a list of names, got 5"),
        ({"target_modules": "(q"}, "target_modules must be a list of names or a single pattern, got '(q'"),
        ({"modules_to_save": ["(score"]}, "modules_to_save must be a list of names, got ['(score']"),
        ({"rank_pattern": {"(?i)q": 2}}, "rank_pattern must be ranks of at least 1, got {'(?i)q': 2}"),
        ({"use_dora": "no"}, "use_dora must be True or False, got 'no'"),
        ({"task_type": ["SEQ_CLS"]}, "task_type must be one of"),
        ({"layers_to_transform": [-1]}, "layers_to_transform must be a layer index of at least 0"),
        ({"target_modules": "q", "layers_to_transform": [1]}, "layers_to_transform must be None if target_modules"),
        ({"target_modules": ["q"], "layers_pattern": "h"}, "layers_pattern must be None without layers_to_transform"),
    ],
)
def test_values_that_no_adapter_has(keys, text):
    with refuses(text):
        LoraConfig(**keys)


@pytest.mark.parametrize(
    ("keys", "text"),
    [
        ({"init_lora_weights": "olora"}, "init_lora_weights='olora' modifies the base model or needs data"),
        ({"init_lora_weights": "pissa", "r": 33}, "'pissa' cannot take 33 principal components of model.layers.{}"),
        ({"layer_replication": [(0, 1)]}, "layer_replication=[(0, 1)] is not in this release of trl_jax."),
        ({"target_parameters": ["q_proj.weight"]}, "q_proj.weight and target_modules selects its module, in this or"),
        ({"target_modules": ["embed_tokens"], "use_dora": True}, "use_dora=True does not support the embedding model."),
        ({"target_modules": ["qproj"]}, "target_modules=['qproj'] selects no module of this model"),
        ({"modules_to_save": ["q_proj"], "target_modules": r".*v_proj|.*q_proj"}, None),
    ],
)
def test_what_is_not_computed_here(keys, text, adapter, tmp_path):
    def build():
        make(trl_jax, adapter[0], tmp_path, peft_config=LoraConfig(**(ROW | keys)))

    if text is None:  # fully trained modules get no adapter
        build()
        return
    with refuses(text):
        build()


@pytest.mark.parametrize(
    ("keys", "text"),
    [
        ({"peft_type": "IA3"}, "peft_type='IA3' is not in this release of trl_jax; the closest is LoraConfig(r=1)"),
        ({"use_frobnication": True, "peft_version": "9.0"}, "has use_frobnication, which PEFT 0.21.2 does not know ("),
        ({"r": 3}, "q_proj.lora_A.weight is [4, 32], but this base model requires [3, 32]"),
        ({"target_modules": ["v_proj"]}, "Missing: base_model.model.model.layers.0.self_attn.v_proj.lora_A.weight"),
        ({"base_model_name_or_path": None}, "has no base_model_name_or_path"),
        ({"base_model_name_or_path": "/no/such"}, "is for base_model_name_or_path='/no/such'. model="),
    ],
)
def test_an_adapter_that_does_not_fit(keys, text, adapter, tmp_path):
    with refuses(text):
        trl_jax.AutoModelForSequenceClassification.from_pretrained(broken(adapter, tmp_path, **keys))


def test_an_adapter_of_another_base(adapter, checkpoint, tmp_path):
    wide = str(checkpoint("llama"))
    with refuses("Pass the base model that the adapter was trained on."):
        folder = broken(adapter, tmp_path, base_model_name_or_path=wide, layers_to_transform=[0])
        trl_jax.AutoModelForSequenceClassification.from_pretrained(folder)


def test_an_adapter_without_a_head_takes_the_bases(adapter, tmp_path, caplog):
    """PEFT does not save the head if the config does not name it, which is true of many adapters."""
    folder = broken(adapter, tmp_path, modules_to_save=None, task_type=None)
    path, head = folder / "adapter_model.safetensors", "base_model.model.score.weight"
    tensors = load_file(path)
    assert not np.array_equal(tensors.pop(head), load_file(adapter[0] / "model.safetensors")["score.weight"])
    save_file(tensors, path)
    model = trl_jax.AutoModelForSequenceClassification.from_pretrained(folder)
    assert f"has no {head}: starting from the base model's." in caplog.text
    np.testing.assert_array_equal(
        model.params["score.weight"], load_file(adapter[0] / "model.safetensors")["score.weight"]
    )
    model.save_pretrained(tmp_path / "again")
    assert set(load_file(tmp_path / "again" / path.name)) == {*tensors, head}


def test_a_pickled_adapter(adapter, tmp_path):
    folder = broken(adapter, tmp_path)
    (folder / "adapter_model.safetensors").rename(folder / "adapter_model.bin")
    with refuses("It has adapter_model.bin, but pickles are not read", FileNotFoundError):
        trl_jax.AutoModelForSequenceClassification.from_pretrained(folder)


def test_an_adapter_of_single_experts(adapter, tmp_path):
    folder = broken(adapter, tmp_path)
    path = folder / "adapter_model.safetensors"
    one = {"base_model.model.model.layers.0.mlp.experts.3.w1.lora_A.weight": np.zeros((4, 32), np.float32)}
    save_file(load_file(path) | one, path)
    with refuses("has separate adapters for each expert, as in transformers 4; now all experts share one parameter."):
        trl_jax.AutoModelForSequenceClassification.from_pretrained(folder)


def test_an_adapter_of_integers(adapter, tmp_path):
    folder = broken(adapter, tmp_path)
    path = folder / "adapter_model.safetensors"
    save_file({name: value.astype("int32") for name, value in load_file(path).items()}, path)
    with refuses("is not a floating-point tensor (F32, BF16, F16)"):
        trl_jax.AutoModelForSequenceClassification.from_pretrained(folder)


def test_a_config_that_is_no_json(tmp_path):
    (tmp_path / "adapter_config.json").write_text("[1]")
    with refuses("must hold an object with peft_type, got a list."):
        read_adapter_config(tmp_path)
