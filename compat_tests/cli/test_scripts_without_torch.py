"""Scripts that import torch and load models with transformers, on a machine without torch."""

from __future__ import annotations

import importlib
import json
import os
import pickle
import runpy
import subprocess
import sys
from pathlib import Path

import numpy as np
import pytest

from compat_tests.cli.test_stand_ins import ROOT, RUNNER, WITHOUT
from compat_tests.parity.dpo_cases import SMALL
from trl_jax.cli import check, reading, torch_for_scripts
from trl_jax.cli.torch_for_scripts import ADVICE, has_name, stand_in

TRAINING = """
import json, sys
import torch
import torch.nn as nn
from datasets import Dataset
from peft import LoraConfig, PeftModel, get_peft_model, prepare_model_for_kbit_training
from torch.utils.data import DataLoader
from transformers import (
    AutoModelForCausalLM, AutoModelForSequenceClassification, AutoTokenizer, PreTrainedModel, set_seed,
)
from trl import SFTConfig, SFTTrainer

torch.backends.cuda.matmul.allow_tf32 = True
folder, out = sys.argv[1:]
set_seed(7)
head = AutoModelForSequenceClassification.from_pretrained(folder, num_labels=1).score.weight.detach().tolist()[0]
model = AutoModelForCausalLM.from_pretrained(folder, dtype=torch.float32, use_cache=False)
tokenizer = AutoTokenizer.from_pretrained(folder)
assert isinstance(model, PreTrainedModel) and isinstance(model, nn.Module) and model.dtype == torch.float32
model = prepare_model_for_kbit_training(model)
lora = LoraConfig(r=4, target_modules=["q_proj", "v_proj"], lora_dropout=0.0, task_type="CAUSAL_LM")
model = get_peft_model(model, lora).to(torch.device("cuda" if torch.cuda.is_available() else "cpu"))
model.print_trainable_parameters()


def rows(count: int, loader: DataLoader | None = None) -> Dataset:
    return Dataset.from_list([{"text": "what is it and " * number} for number in range(1, count)])


args = SFTConfig(
    out, max_steps=3, logging_steps=1, learning_rate=1e-2, per_device_train_batch_size=2, bf16=False, use_cpu=True,
    report_to="none", save_strategy="no", disable_tqdm=True, gradient_checkpointing=False,
)
trainer = SFTTrainer(model, args=args, train_dataset=rows(9), processing_class=tokenizer)
trainer.train()
trainer.save_model()
inputs = tokenizer("what is it", return_tensors="pt").to(trainer.model.device)
with torch.no_grad():
    ids = trainer.model.generate(**inputs, max_new_tokens=4, do_sample=False)
assert isinstance(trainer.model, PeftModel) and isinstance(inputs["input_ids"], torch.Tensor)
written = [int(token) for token in ids[0][inputs["input_ids"].shape[1]:]]
losses = [log["loss"] for log in trainer.state.log_history if "loss" in log]
installed = hasattr(torch, "softmax")
print(json.dumps({"head": head, "losses": losses, "written": written, "installed": installed}))
"""


def run(tmp_path: Path, source: str, *arguments: str, runner: str) -> subprocess.CompletedProcess:
    (tmp_path / "runner.py").write_text(runner)
    (tmp_path / "script.py").write_text(source)
    command = [sys.executable, str(tmp_path / "runner.py"), str(tmp_path / "script.py"), *arguments]
    env = {**os.environ, "PYTHONPATH": str(ROOT), "JAX_PLATFORMS": "cpu"}
    return subprocess.run(command, capture_output=True, text=True, env=env, cwd=tmp_path)


def test_a_script_trains_an_adapter_as_under_trl(checkpoint, tmp_path, monkeypatch, capsys):
    """After set_seed: a new score head, an adapter that the script makes, the losses, and what the model writes."""
    pytest.importorskip("trl"), pytest.importorskip("peft")
    folder, outs = str(checkpoint(**SMALL)), [str(tmp_path / side) for side in ("ours", "trl")]
    done = run(tmp_path, TRAINING, folder, outs[0], runner=WITHOUT + RUNNER)
    assert done.returncode == 0, done.stderr[-3000:]
    monkeypatch.setattr(sys, "argv", ["script.py", folder, outs[1]])
    runpy.run_path(str(tmp_path / "script.py"))
    ours, theirs = (json.loads(text.splitlines()[-1]) for text in (done.stdout, capsys.readouterr().out))
    saved = [json.loads(Path(out, "adapter_config.json").read_text()) for out in outs]
    assert ours["head"] == pytest.approx(theirs["head"], abs=1e-7) and len(ours["head"]) == 32
    assert theirs.pop("installed") and not ours.pop("installed")
    assert len(theirs["losses"]) == 3 and ours["losses"] == pytest.approx(theirs["losses"], abs=2e-5)
    assert ours["written"] == theirs["written"]
    differing = {key for key, value in saved[1].items() if saved[0].get(key) != value}
    assert differing <= {"auto_mapping", "peft_version", "target_modules"}
    assert set(saved[0]["target_modules"]) == {"q_proj", "v_proj"}


MISSING = """
import torch
import torch.nn.functional as F
from torch import nn

def reward(completions, **columns):
    return F.softmax(torch.ones(len(completions)), -1)

def first(values: torch.LongTensor, model: nn.Module) -> torch.Tensor:
    return values.softmax(-1)

import transformers
assert transformers.LlamaForCausalLM.__module__.startswith("trl_jax")
for line in ("transformers.ZamboniForCausalLM", "transformers.pipeline('text-generation')",
             "torch.softmax", "nn.Module()", "class Own(nn.Module): ...", "from torch.nn import Dropout",
             "import torch.fx", "torch.Generator().manual_seed(1)"):
    try:
        exec(compile(line, __file__, "exec"))
    except (ImportError, AttributeError, TypeError) as error:
        print(type(error).__name__, error)
"""


def test_what_needs_torch_is_said_at_the_import_and_where_it_is_reached(tmp_path):
    done = run(tmp_path, MISSING, runner=WITHOUT + RUNNER)
    assert done.returncode == 0, done.stderr[-3000:]
    [warning] = [line for line in done.stderr.splitlines() if "torch is not installed" in line]
    assert "torch.nn.functional.softmax (line 7), torch.ones (line 7), which raises an error" in warning
    assert done.stdout.splitlines() == [
        "AttributeError module transformers has no attribute ZamboniForCausalLM",
        "ImportError transformers.pipeline needs torch, which is not installed. Call "
        "model.generate_text(prompts, tokenizer), or model.generate, or install torch.",
        f"AttributeError torch is not installed: there is no torch.softmax. {ADVICE}",
        f"TypeError torch is not installed: there is no torch.nn.Module(...). {ADVICE}",
        f"TypeError torch is not installed: Own cannot derive from torch.nn.Module. {ADVICE}",
        f"ImportError torch is not installed: cannot import Dropout from torch.nn. {ADVICE}",
        f"ModuleNotFoundError torch is not installed: cannot import torch.fx. {ADVICE}",
        f"TypeError torch is not installed: there is no torch.Generator(...). {ADVICE}",
    ]


def paths_of(module, prefix="torch"):
    for name, value in vars(module).items():
        if not name.startswith("__"):
            yield f"{prefix}.{name}"
            if isinstance(value, torch_for_scripts._Part):
                yield from paths_of(value, f"{prefix}.{name}")


def test_the_stand_in_has_no_name_that_torch_lacks():
    torch = pytest.importorskip("torch")
    importlib.import_module("torch.utils.data")
    names = list(paths_of(stand_in()))
    assert len(names) > 100 and all(map(has_name, names)) and not has_name("torch.softmax")
    for path in names:
        value = torch
        for part in path.split(".")[1:]:
            value = getattr(value, part)
    ours = stand_in()
    for dtype in ("bfloat16", "half", "float", "long", "bool"):
        assert str(getattr(ours, dtype)) == repr(getattr(ours, dtype)) == str(getattr(torch, dtype))
    for device in (("cuda:1",), ("cpu",), ("cuda", 0)):
        found, wanted = ours.device(*device), torch.device(*device)
        assert (str(found), found.type, found.index) == (str(wanted), wanted.type, wanted.index)


def test_what_a_script_does_with_names_of_the_stand_in():
    torch = stand_in()
    assert json.dumps([torch.bfloat16]) == '["bfloat16"]' and isinstance(torch.float16, torch.dtype)
    assert pickle.loads(pickle.dumps(torch)) is torch
    assert pickle.loads(pickle.dumps(torch.backends.cudnn)) is torch.backends.cudnn

    @torch.no_grad
    def plain():
        return 1

    @torch.inference_mode()
    def called():
        return 2

    with torch.autocast("cuda", dtype=torch.bfloat16), torch.device("cuda"):
        assert plain() + called() == 3
    assert not torch.distributed.is_initialized() and not torch.backends.mps.is_available()
    assert torch.cuda.get_device_properties(0).total_memory > 2**20 and torch.cuda.empty_cache() is None
    from trl_jax.core.torch_random import TorchGenerator, default_generator

    torch.manual_seed(11)
    np.testing.assert_array_equal(default_generator().words(5), TorchGenerator(11).words(5))


def test_check_lists_what_the_script_needs_torch_for(tmp_path, monkeypatch):
    plain = check.is_installed
    monkeypatch.setattr(check, "is_installed", lambda name: name.partition(".")[0] != "torch" and plain(name))
    script = tmp_path / "script.py"
    script.write_text(MISSING.partition("import transformers")[0] + "\nloader = torch.utils.data.DataLoader([1])\n")
    found = {(one.line, one.what): one.kind for one in check.findings(reading.read(script.read_text(), script))}
    assert found[2, "torch"] == found[3, "torch.nn.functional"] == found[4, "torch.nn"] == "changed"
    assert {place for place, kind in found.items() if kind == "not installed"} == {
        (7, "torch.nn.functional.softmax"), (7, "torch.ones"), (13, "torch.utils.data.DataLoader(...)"),
    }  # fmt: skip
