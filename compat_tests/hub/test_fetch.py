"""Checkpoints by Hub name: the config is checked before weights are downloaded, and nothing is downloaded
needlessly."""

from __future__ import annotations

import json
import re
import shutil
from pathlib import Path

import huggingface_hub
import numpy as np
import pytest
from huggingface_hub.errors import RepositoryNotFoundError

from compat_tests.hub.fake_hub import COMMIT, NAME, FakeHub
from trl_jax.hub import torch_bridge
from trl_jax.hub.auto import AutoModelForSequenceClassification, find_checkpoint

pytest.importorskip("torch")  # builds the checkpoints

SINGLE, INDEX = "model.safetensors", "model.safetensors.index.json"
load = AutoModelForSequenceClassification.from_pretrained


@pytest.fixture
def hub(checkpoint, tmp_path, monkeypatch):
    """hub(shards=..., subfolder=...) -> a FakeHub that serves a tiny llama."""

    def build(*, shards=False, subfolder=""):
        upstream = tmp_path / "upstream"
        shutil.copytree(checkpoint("llama", shards=shards), upstream / subfolder)
        return FakeHub(upstream, tmp_path / "cache").install(monkeypatch)

    return build


def test_an_unsupported_model_does_not_cost_its_weights(hub):
    there = hub()
    path = there.upstream / "config.json"
    path.write_text(json.dumps(json.loads(path.read_text()) | {"model_type": "homemade"}))
    with pytest.raises(ValueError, match="model_type 'homemade' is not supported"):
        load(NAME)
    assert there.fetched[0] == "config.json" and SINGLE not in there.fetched


@pytest.mark.parametrize("subfolder", ["", "deep/er"])
@pytest.mark.parametrize("shards", [False, True])
def test_weights_come_when_the_model_is_loaded_and_no_earlier(shards, subfolder, hub, checkpoint):
    there = hub(shards=shards, subfolder=subfolder)
    found = find_checkpoint(NAME, subfolder=subfolder, revision="v1", token="secret")
    assert not any(name.endswith(".safetensors") for name in there.fetched)
    model = found.load(0)
    shown = checkpoint("llama", shards=shards)
    wanted = {str(Path(subfolder) / path.name) for path in shown.iterdir()}
    assert set(there.fetched) == wanted
    assert model.params.keys() == load(shown).params.keys()
    assert {how["token"] for how in there.asked} == {"secret"}
    assert [how["revision"] for how in there.asked] == ["v1"] + [COMMIT] * (len(there.asked) - 1)


def test_only_what_is_read_comes(hub):
    there = hub()
    strays = ["original/consolidated.safetensors", "onnx/config.json", "consolidated.safetensors", "modeling.py"]
    strays += [INDEX.replace("model.", "other."), "pytorch_model.bin", "README.md", "tf_model.h5"]
    wanted = ["tokenizer.model", "merges.txt", "words.tiktoken", "chat_template.jinja"]
    wanted += ["additional_chat_templates/tool_use.jinja"]
    for name in strays + wanted:
        (there.upstream / name).parent.mkdir(exist_ok=True)
        (there.upstream / name).write_text("{}")
    before = {path.name for path in there.upstream.glob("tokenizer*.json")}
    load(NAME)
    assert set(there.fetched) == {"config.json", SINGLE, *before, *wanted, "other.safetensors.index.json"}


def test_a_single_file_beside_an_index_is_enough(hub, checkpoint):
    there = hub(shards=True)
    shutil.copy(checkpoint("llama") / SINGLE, there.upstream)
    load(NAME)
    assert [name for name in there.fetched if name.endswith(".safetensors")] == [SINGLE]


def test_an_index_cannot_ask_for_more_than_files_of_its_folder(hub):
    there = hub(shards=True)
    (there.upstream / INDEX).write_text(json.dumps({"weight_map": {"a": "*"}}))
    with pytest.raises(FileNotFoundError, match=re.escape(f"lacks 1 of the 1 shards in {INDEX}: *.")):
        load(NAME)
    (there.cache / "snapshots" / COMMIT / INDEX).write_text(json.dumps({"weight_map": {"a": "../x"}}))
    with pytest.raises(ValueError, match="names shards outside its folder"):
        load(NAME)
    assert not any(name.endswith(".safetensors") for name in there.fetched)


@pytest.mark.parametrize("trust", [False, True])
def test_code_comes_for_the_tokenizer_where_it_is_trusted(trust, hub, caplog):
    there = hub()
    (there.upstream / "tokenization_own.py").write_text("")
    found = find_checkpoint(NAME, trust_remote_code=trust)
    assert (found.folder / "tokenization_own.py").exists() == trust
    assert ("trust_remote_code has no effect on models" in caplog.text) == trust


@pytest.mark.parametrize("subfolder", ["", "deep"])
def test_a_repository_of_pickles_is_told_to_be_converted_without_torch(subfolder, hub, monkeypatch):
    monkeypatch.setattr(torch_bridge, "available", lambda: False)
    there = hub(subfolder=subfolder)
    folder = there.upstream / subfolder
    (folder / SINGLE).rename(folder / "pytorch_model.bin")
    with pytest.raises(ValueError, match=re.escape(f"AutoModel.from_pretrained({NAME!r}).save_pretrained(folder)")):
        load(NAME, subfolder=subfolder)
    assert not any(name.endswith(".bin") for name in there.fetched)
    (folder / "pytorch_model.bin").unlink()
    (there.upstream / "other").mkdir()
    (there.upstream / "other" / "pytorch_model.bin").write_text("")
    with pytest.raises(FileNotFoundError, match=f"model='{NAME}' has no weights: neither {SINGLE} nor {INDEX}"):
        load(NAME, subfolder=subfolder)


@pytest.mark.parametrize("subfolder", ["", "deep"])
def test_a_repository_of_pickles_is_read_where_torch_is(subfolder, hub, checkpoint):
    torch = pytest.importorskip("torch")
    from safetensors.torch import load_file

    there = hub(subfolder=subfolder)
    folder = there.upstream / subfolder
    torch.save(load_file(folder / SINGLE), folder / "pytorch_model.bin")
    (folder / SINGLE).unlink()
    found = load(NAME, subfolder=subfolder)
    assert any(name.endswith("pytorch_model.bin") for name in there.fetched)
    for name, array in load(checkpoint("llama")).params.items():
        np.testing.assert_array_equal(found.params[name], array, err_msg=name)


def test_a_repository_without_config(hub):
    there = hub()
    (there.upstream / "config.json").unlink()
    with pytest.raises(FileNotFoundError, match=f"model='{NAME}' has no config.json on the Hub: 404"):
        load(NAME)
    with pytest.raises(FileNotFoundError, match=f"model='{NAME}' has no deep/config.json on the Hub"):
        load(NAME, subfolder="deep")


@pytest.mark.parametrize("name", ["out/final", "final", "final run"])
def test_a_mistyped_folder(name, tmp_path, monkeypatch):
    """The tests are offline: the error includes what the client raises."""
    monkeypatch.chdir(tmp_path)
    text = f"model={name!r}: there is no such folder in {tmp_path}, and no such repository could be downloaded"
    with pytest.raises(FileNotFoundError, match=re.escape(text) + ".*client reported: .+"):
        load(name, cache_dir=str(tmp_path / "cache"))


def test_a_mistyped_folder_with_the_hub_in_reach(tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)

    class Unknown(RepositoryNotFoundError):
        def __init__(self, text):
            Exception.__init__(self, text)

        __str__ = Exception.__str__

    def refuse(*where, **how):
        raise Unknown("401: Repository Not Found")

    monkeypatch.setattr(huggingface_hub, "hf_hub_download", refuse)
    with pytest.raises(FileNotFoundError, match="model='out/final': there is no such folder.*reported: 401"):
        load("out/final")


def test_weights_that_cannot_be_fetched_offline(hub, tmp_path, monkeypatch):
    client = huggingface_hub.hf_hub_download
    hub()
    found = find_checkpoint(NAME, cache_dir=str(tmp_path / "empty"))
    monkeypatch.setattr(huggingface_hub, "hf_hub_download", client)
    with pytest.raises(FileNotFoundError, match=f"model='{NAME}': the weights are not in the cache"):
        found.load(0)
