"""What public training scripts do with torch's and PEFT's names besides training, where there is no torch."""

from __future__ import annotations

import json
import runpy
import sys

import pytest

from compat_tests.cli.test_scripts_without_torch import run
from compat_tests.cli.test_stand_ins import RUNNER, WITHOUT
from compat_tests.parity.dpo_cases import SMALL

LAYERS = """
import json
import sys
import bitsandbytes as bnb
import torch.nn as nn
from peft import LoraConfig, get_peft_model
from transformers import AutoModelForCausalLM, BitsAndBytesConfig

CLASSES = (nn.Linear, nn.Embedding, bnb.nn.Linear4bit, bnb.nn.Linear8bitLt)


def layers(model):
    return [(name, *(isinstance(module, kind) for kind in CLASSES)) for name, module in model.named_modules()]


found = []
for folder in sys.argv[1:]:
    for options in (None, {"load_in_4bit": True}, {"load_in_8bit": True}):
        config = None if options is None else BitsAndBytesConfig(**options)
        model = AutoModelForCausalLM.from_pretrained(folder, quantization_config=config)
        found.append(layers(model))
        cls = nn.Linear if options is None else bnb.nn.Linear4bit if "load_in_4bit" in options else bnb.nn.Linear8bitLt
        names = {name.split(".")[-1] for name, module in model.named_modules() if isinstance(module, cls)}
        model = get_peft_model(model, LoraConfig(r=2, target_modules=sorted(names - {"lm_head"}) or ["c_attn"]))
        found.append(layers(model))
print(json.dumps(found))
"""


def test_scripts_find_the_linear_layers_that_they_put_adapters_on(checkpoint, tmp_path, monkeypatch, capsys):
    """As the recipe of QLoRA does with bitsandbytes' classes. Modules without parameters are left out without torch."""
    pytest.importorskip("peft"), pytest.importorskip("bitsandbytes")
    folders = [str(checkpoint(**SMALL, tie=True)), str(checkpoint(model_type="gpt2", **SMALL))]
    done = run(tmp_path, LAYERS, *folders, runner=WITHOUT + RUNNER)
    assert done.returncode == 0, done.stderr[-3000:]
    monkeypatch.setattr(sys, "argv", ["script.py", *folders])
    runpy.run_path(str(tmp_path / "script.py"))
    ours, theirs = (json.loads(text.splitlines()[-1]) for text in (done.stdout, capsys.readouterr().out))
    for one, other in zip(ours, theirs, strict=True):
        wanted = [layer for layer in other if any(layer[1:])]
        assert [layer for layer in one if any(layer[1:])] == wanted and len(wanted) >= 3
        assert [layer for layer in other if layer in one] == one
