"""Models that no engine supports are refused by name; errors say if torch is needed; pickles are read as tensors
only."""

from __future__ import annotations

import json
import pickle
import re
import sys

import numpy as np
import pytest

from compat_tests.effort import only_thorough
from compat_tests.exported import configs
from trl_jax.exported import program
from trl_jax.exported.program import TorchModel
from trl_jax.hub.auto import AutoModelForSequenceClassification
from trl_jax.hub.families import families
from trl_jax.hub.model_types import REFUSED, is_exported, unsupported_error


def folder_of(tmp_path, **config):
    (tmp_path / "config.json").write_text(json.dumps(config))
    return tmp_path


@pytest.mark.parametrize("model_type", REFUSED)
def test_a_type_that_nobody_takes_names_the_reason_and_the_nearest(model_type, tmp_path):
    reason, nearest = REFUSED[model_type]
    text = f"model_type {model_type!r} is not supported: {reason}. The nearest supported type: {nearest}."
    assert text in str(unsupported_error({"model_type": model_type}, families(), tmp_path))
    assert not is_exported({"model_type": model_type}, families(), tmp_path)
    assert nearest not in REFUSED


def test_every_classifier_of_transformers_is_native_exported_or_refused():
    from transformers.models.auto.modeling_auto import MODEL_FOR_SEQUENCE_CLASSIFICATION_MAPPING_NAMES as known

    native = {name for name, family in families().items() if family.in_transformers}
    assert set(configs.TYPES) | set(REFUSED) | native == set(known)
    assert not set(configs.TYPES) & set(REFUSED)


@pytest.mark.parametrize(("model_type", "exported"), [("granitemoehybrid", False), ("mamba2", True)])
def test_a_language_model_that_has_no_family_is_exported(model_type, exported, tmp_path):
    raw = {"model_type": model_type}
    assert is_exported(raw, families(), tmp_path, "lm") == exported
    assert not is_exported(raw, families(), tmp_path, "score")


def test_loading_refuses_by_name(tmp_path):
    folder = folder_of(tmp_path, model_type="bart")
    with pytest.raises(ValueError, match="model_type 'bart' is not supported: it looks for the EOS .* type: roberta"):
        AutoModelForSequenceClassification.from_pretrained(folder)


def test_code_of_a_repository_is_refused_although_torch_is_here(tmp_path):
    folder = folder_of(tmp_path, model_type="homemade", auto_map={"AutoModel": "x.Y"})
    with pytest.raises(ValueError, match=r"'homemade' is not supported .* Its custom code \(auto_map\) is never run"):
        AutoModelForSequenceClassification.from_pretrained(folder, trust_remote_code=True)


def test_without_torch_the_error_says_what_to_install(tmp_path, monkeypatch):
    monkeypatch.setitem(sys.modules, "torch", None)  # find_spec and import then behave as if it were not installed
    folder = folder_of(tmp_path, model_type="bloom")
    text = f"{folder / 'config.json'}: model_type 'bloom' runs as a program exported from transformers' own model"
    with pytest.raises(ImportError, match=re.escape(text) + r".*pip install 'trl_jax\[torch\]'.*these work: apertus, "):
        AutoModelForSequenceClassification.from_pretrained(folder)


@only_thorough
def test_an_unknown_operation_is_named_when_the_model_is_exported(tmp_path, monkeypatch):
    pytest.importorskip("torch")
    model = AutoModelForSequenceClassification.from_pretrained(configs.build(tmp_path, "albert"))
    monkeypatch.delitem(program.OPERATIONS, "aten.tanh.default")
    with pytest.raises(ValueError, match="'albert' uses operations that trl_jax does not support: aten.tanh.default"):
        model(*configs.rows())


def test_what_torch_cannot_export_is_named(tmp_path):
    pytest.importorskip("torch")
    folder = configs.build(tmp_path, "longformer", attention_window=8)
    model = TorchModel(folder, dtype="float32", seed=0)
    with pytest.raises(ValueError, match="model_type 'longformer' cannot be exported for 4 rows of 24 tokens"):
        model.program(4, 24, dtype="float32", training=False)


# ---- pytorch_model.bin ----


@pytest.fixture
def pickled(checkpoint, tmp_path):
    """pickled(**facts) -> (a llama as safetensors, the same as pytorch_model.bin)."""
    torch = pytest.importorskip("torch")
    from safetensors.torch import load_file

    def build(shards=False, legacy=False, **facts):
        safe = checkpoint("llama", **facts)
        tensors = load_file(safe / "model.safetensors")
        (tmp_path / "config.json").write_text((safe / "config.json").read_text())
        names = sorted(tensors)
        halves = {"pytorch_model-00001-of-00002.bin": names[::2], "pytorch_model-00002-of-00002.bin": names[1::2]}
        files = halves if shards else {"pytorch_model.bin": names}
        for file, held in files.items():
            part = {name: tensors[name] for name in held}
            torch.save(part, tmp_path / file, _use_new_zipfile_serialization=not legacy)
        if shards:
            index = {"weight_map": {name: file for file, held in halves.items() for name in held}}
            (tmp_path / "pytorch_model.bin.index.json").write_text(json.dumps(index))
        return safe, tmp_path

    return build


@pytest.mark.parametrize(
    "how", [{}, {"shards": True}, {"legacy": True}, {"dtype": "bfloat16"}], ids=["one", "shards", "legacy", "bfloat16"]
)
def test_a_bin_file_gives_what_safetensors_give(how, pickled, tmp_path):
    safe, there = pickled(**how)
    one, other = (AutoModelForSequenceClassification.from_pretrained(folder) for folder in (safe, there))
    assert one.source.dtypes == other.source.dtypes
    for name, array in one.params.items():
        np.testing.assert_array_equal(other.params[name], array, err_msg=name)
    other.save_pretrained(tmp_path / "back")
    assert any((tmp_path / "back").glob("*.safetensors")) and not any((tmp_path / "back").glob("*.bin"))


class Malicious:
    """Creates a file when it is unpickled."""

    def __init__(self, mark):
        self.mark = mark

    def __reduce__(self):
        return open, (str(self.mark), "w")


@pytest.mark.parametrize("model_type", ["llama", "bloom"])
def test_a_malicious_bin_file_is_not_run(model_type, tmp_path):
    pytest.importorskip("torch")
    folder, mark = configs.build(tmp_path, model_type), tmp_path / "mark"
    (folder / "model.safetensors").unlink()
    (folder / "pytorch_model.bin").write_bytes(pickle.dumps({"score.weight": Malicious(mark)}))
    with pytest.raises(ValueError, match="pytorch_model.bin is not a PyTorch file that only holds tensors"):
        AutoModelForSequenceClassification.from_pretrained(folder)
    assert not mark.exists()


def test_a_bin_file_of_something_else(pickled):
    import torch

    _, folder = pickled()
    torch.save([1, 2], folder / "pytorch_model.bin")
    with pytest.raises(ValueError, match="pytorch_model.bin must hold a state dict of tensors by name, got a list"):
        AutoModelForSequenceClassification.from_pretrained(folder)
    torch.save({"score.weight": torch.ones(1, dtype=torch.int8)}, folder / "pytorch_model.bin")
    with pytest.raises(ValueError, match="tensor score.weight has dtype int8; trl_jax reads float32"):
        AutoModelForSequenceClassification.from_pretrained(folder)
