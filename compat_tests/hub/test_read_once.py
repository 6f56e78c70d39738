"""A load reads config.json and adapter_config.json once each, no matter how much is derived from them."""

from __future__ import annotations

import builtins
import io
from collections import Counter
from pathlib import Path

import pytest

from compat_tests.exported import configs
from compat_tests.models import encoders
from trl_jax.hub.auto import AutoModelForSequenceClassification, find_checkpoint, with_adapter
from trl_jax.hub.peft_config import LoraConfig

pytest.importorskip("torch")
LORA = LoraConfig(r=2, target_modules=["q_proj"], task_type="SEQ_CLS")
CONFIG, BOTH = {"config.json": 1}, {"config.json": 1, "adapter_config.json": 1}
load = AutoModelForSequenceClassification.from_pretrained


@pytest.fixture
def opened(monkeypatch):
    """opened(call) -> file name -> how often that config was opened during the call."""
    counts, real = Counter(), io.open

    def count(file, *args, **kwargs):
        if not isinstance(file, int) and Path(file).name in BOTH:
            counts[Path(file).name] += 1
        return real(file, *args, **kwargs)

    def during(call):
        with monkeypatch.context() as patch:
            patch.setattr(io, "open", count)
            patch.setattr(builtins, "open", count)
            call()
        return dict(counts)

    return during


@pytest.fixture
def adapter(checkpoint, tmp_path):
    """A folder with only an adapter."""
    with_adapter(load(checkpoint("llama")), LORA, 0).save_pretrained(tmp_path)
    return str(tmp_path)


@pytest.mark.parametrize("head", ["classifier", "causal"])
def test_a_load(head, checkpoint, opened):
    folder = checkpoint("llama", head=head)
    assert opened(lambda: load(folder)) == CONFIG


@pytest.mark.parametrize("build", [encoders.build, configs.build])
def test_an_encoder_and_an_exported_model(build, tmp_path, opened):
    folder = build(tmp_path, "bert", "plain") if build is encoders.build else build(tmp_path, "bloom")
    assert opened(lambda: load(folder)) == CONFIG


def test_a_new_adapter(checkpoint, opened):
    folder = str(checkpoint("llama"))
    assert opened(lambda: find_checkpoint(folder).load_adapted(LORA, 0)) == CONFIG


def test_an_adapter_in_a_folder(adapter, opened):
    assert opened(lambda: load(adapter)) == BOTH


@pytest.mark.parametrize("lora", [None, LORA])
def test_an_outline(lora, checkpoint, opened):
    folder = str(checkpoint("llama"))
    assert opened(lambda: find_checkpoint(folder).outline(lora)) == CONFIG


def test_an_outline_of_an_adapter_in_a_folder(adapter, opened):
    assert opened(lambda: find_checkpoint(adapter).outline()) == BOTH
