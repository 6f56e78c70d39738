"""What public training scripts do with torch's and PEFT's names besides training, where there is no torch."""

from __future__ import annotations

import json
import runpy
import sys

import pytest
from datasets import Dataset

import trl_jax
from compat_tests.cli.test_scripts_without_torch import run
from compat_tests.cli.test_stand_ins import RUNNER, WITHOUT
from compat_tests.parity.dpo_cases import SMALL
from trl_jax.hub.auto import PeftModel, get_peft_model

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


FLAGS = """
import json
import sys
from peft import LoraConfig, PeftModel, get_peft_model
from transformers import AutoModelForCausalLM, set_seed
from trl import SFTConfig, SFTTrainer
from datasets import Dataset

folder, out, adapter = sys.argv[1:]


def load(**options):
    return PeftModel.from_pretrained(AutoModelForCausalLM.from_pretrained(folder), adapter, **options)


def flags(model):
    return [bool(parameter.requires_grad) for parameter in model.parameters()]


set_seed(3)
get_peft_model(AutoModelForCausalLM.from_pretrained(folder), LoraConfig(r=2)).save_pretrained(adapter)
models = [load(), load(is_trainable=True), load()]
found = [flags(model) for model in models] + [models[0].get_nb_trainable_parameters()]
for parameter in models[0].parameters():
    parameter.requires_grad = False
for name, parameter in models[2].named_parameters():
    if "lora" in name:
        parameter.requires_grad = True
found += [flags(model) for model in (models[0], models[2])]
data = Dataset.from_list([{"text": "what is it and " * number} for number in range(1, 5)])
args = {"max_steps": 2, "logging_steps": 1, "report_to": "none", "save_strategy": "no", "bf16": False, "use_cpu": True}
trainer = SFTTrainer(models[2], SFTConfig(out, **args), train_dataset=data)
trainer.train()
print(json.dumps([found, [log["loss"] for log in trainer.state.log_history if "loss" in log]]))
"""


def test_requires_grad_of_a_loaded_adapter_is_pefts(checkpoint, tmp_path, monkeypatch, capsys):
    """A script freezes all parameters of a reference model, or lets a loaded adapter train."""
    pytest.importorskip("trl"), pytest.importorskip("peft")
    folder = str(checkpoint(**SMALL))
    done = run(tmp_path, FLAGS, folder, str(tmp_path / "a"), str(tmp_path / "b"), runner=WITHOUT + RUNNER)
    assert done.returncode == 0, done.stderr[-3000:]
    monkeypatch.setattr(sys, "argv", ["script.py", folder, str(tmp_path / "c"), str(tmp_path / "d")])
    runpy.run_path(str(tmp_path / "script.py"))
    ours, theirs = (json.loads(text.splitlines()[-1]) for text in (done.stdout, capsys.readouterr().out))
    assert ours[0] == theirs[0] and not any(ours[0][0]) and any(ours[0][1])
    assert ours[1] == pytest.approx(theirs[1], abs=2e-5)


def test_an_adapter_is_trained_as_a_whole(checkpoint, tmp_path, caplog):
    """TRL would train nothing of one that was loaded without is_trainable."""
    base = trl_jax.AutoModelForCausalLM.from_pretrained(checkpoint(**SMALL))
    get_peft_model(base, trl_jax.LoraConfig(r=2)).save_pretrained(tmp_path)
    args = trl_jax.SFTConfig(str(tmp_path / "out"), report_to="none", bf16=False)
    data = Dataset.from_list([{"text": "what is it"}])
    model = PeftModel.from_pretrained(base, tmp_path)
    assert model.get_nb_trainable_parameters()[0] == 0
    first = next(parameter for name, parameter in model.named_parameters() if "lora" in name)
    first.requires_grad = True
    with pytest.raises(ValueError, match="an adapter is trained as a whole. Load it with is_trainable=True"):
        trl_jax.SFTTrainer(model, args, train_dataset=data)
    trained = trl_jax.SFTTrainer(PeftModel.from_pretrained(base, tmp_path), args, train_dataset=data).model
    assert "loaded without is_trainable=True" in caplog.text and trained.get_nb_trainable_parameters()[0] > 0


PROCESSOR = """
from transformers import AutoProcessor
from transformers import AutoModelForCausalLM, PreTrainedModel

print(AutoProcessor.__module__, AutoModelForCausalLM.__module__, PreTrainedModel.__module__)
"""


def test_models_are_ours_after_a_script_has_imported_a_processor(tmp_path):
    done = run(tmp_path, PROCESSOR, runner=WITHOUT + RUNNER)
    assert done.returncode == 0, done.stderr[-3000:]
    processor, *models = done.stdout.split()
    assert processor.startswith("transformers.") and all(name.startswith("trl_jax.") for name in models)
