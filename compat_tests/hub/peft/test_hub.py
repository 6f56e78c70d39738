"""Adapters on a Hub: the real client against a loopback server that also has the base model."""

from __future__ import annotations

import json
import pickle
import re

import numpy as np
import pytest

import trl_jax
from compat_tests.hub.loopback import TOKEN, Repository, serving
from compat_tests.trainer.trainers import FACTS, make
from trl_jax.hub.peft_config import LoraConfig

IDS = np.array([[5, 6, 7, 8, 9, 10]])
BASE, JUDGE = "somebody/base", "somebody/judge"
LORA = LoraConfig(r=2, target_modules=["q_proj"], task_type="SEQ_CLS")
load = trl_jax.AutoModelForSequenceClassification.from_pretrained


def files_of(folder):
    return {path.relative_to(folder).as_posix(): path.read_bytes() for path in folder.rglob("*") if path.is_file()}


@pytest.fixture(scope="module")
def adapter(checkpoint, tmp_path_factory):
    """The files of an adapter for the base model."""
    out, base = tmp_path_factory.mktemp("adapter"), checkpoint("llama", **FACTS)
    make(trl_jax, base, out, peft_config=LORA, config={"max_steps": 1}).save_model()
    return files_of(out)


@pytest.fixture
def hub(checkpoint, adapter, tmp_path, monkeypatch):
    """A Hub with a base model and an adapter for it; the token is in the environment."""
    monkeypatch.setenv("HF_TOKEN", TOKEN)
    with serving(monkeypatch, tmp_path / "cache") as server:
        add(server, BASE, files_of(checkpoint("llama", **FACTS)))
        add(server, JUDGE, adapter)
        changed(server, base_model_name_or_path=BASE)
        yield server


def add(hub, name, files):
    hub.repositories[name] = Repository(False, {"main": [("initial commit", files)]})


def changed(hub, **keys):
    files = hub.files(JUDGE)
    config = json.loads(files["adapter_config.json"]) | keys
    add(hub, JUDGE, files | {"adapter_config.json": json.dumps(config).encode()})


def refuses(text, error=ValueError):
    return pytest.raises(error, match=re.escape(text))


def test_what_was_pushed_is_on_disk_and_goes_on_from_there(hub, tmp_path):
    config = {"push_to_hub": True, "hub_model_id": "mine", "hub_token": TOKEN, "max_steps": 2}
    pushed = make(trl_jax, BASE, tmp_path / "run", peft_config=LORA, config=config)
    pushed.train()
    pushed.save_model()
    files, local = hub.files("somebody/mine"), files_of(tmp_path / "run")
    assert {"adapter_config.json", "adapter_model.safetensors", "tokenizer.json", "README.md"} <= set(files)
    assert not {"model.safetensors", "config.json"} & set(files) and files.pop(".gitattributes") == b""
    assert {name: local[name] for name in files} == files
    assert json.loads(files["adapter_config.json"])["base_model_name_or_path"] == BASE
    assert f"base_model: {BASE}\n" in files["README.md"].decode()
    hub.requests.clear()
    again = make(trl_jax, "somebody/mine", tmp_path / "again", config={"max_steps": 2, "learning_rate": 1e-2})
    fetched = [path for method, path in hub.requests if method == "GET" and path.endswith(".safetensors")]
    assert len(fetched) == 1 and fetched[0].startswith("/somebody/mine/")  # the base is a cache hit
    before = np.asarray(again.model(IDS).logits)
    assert np.abs(before - np.asarray(pushed.model(IDS).logits)).max() < 1e-6
    again.train()
    assert np.abs(before - np.asarray(again.model(IDS).logits)).max() > 1e-4
    again.save_model(str(tmp_path / "third"))
    assert json.loads((tmp_path / "third" / "adapter_config.json").read_text())["base_model_name_or_path"] == BASE


class Malicious:
    def __init__(self, mark):
        self.mark = mark

    def __reduce__(self):
        return open, (str(self.mark), "w")


def test_a_pickle_is_neither_fetched_nor_run(hub, tmp_path):
    files = {name: data for name, data in hub.files(JUDGE).items() if name != "adapter_model.safetensors"}
    add(hub, JUDGE, files | {"adapter_model.bin": pickle.dumps(Malicious(tmp_path / "mark"))})
    hub.requests.clear()
    with refuses(f"model={JUDGE!r} has no adapter_model.safetensors. It has adapter_model.bin, but pickles", OSError):
        load(JUDGE)
    assert not any("adapter_model.bin" in path for _, path in hub.requests) and not (tmp_path / "mark").exists()


def test_a_base_of_another_shape(hub, checkpoint):
    add(hub, "somebody/wide", files_of(checkpoint("llama")))
    changed(hub, base_model_name_or_path="somebody/wide", layers_to_transform=[0])
    with refuses("q_proj.lora_A.weight is [2, 32], but this base model requires [2, 64]."):
        load(JUDGE)


@pytest.mark.parametrize(
    ("keys", "text"),
    [
        ({"use_frobnication": True, "peft_version": "9.0"}, "has use_frobnication, which PEFT 0.21.2 does not know ("),
        ({"peft_type": "LOHA"}, "peft_type='LOHA' is not in this release of trl_jax; the closest is LoraConfig."),
        ({"base_model_name_or_path": "somebody/gone"}, "is for base_model_name_or_path='somebody/gone'. model="),
        ({"base_model_name_or_path": None}, "has no base_model_name_or_path. Set it to the name of the base model."),
    ],
)
def test_a_config_that_does_not_fit(keys, text, hub):
    changed(hub, **keys)
    with refuses(text):
        load(JUDGE)
