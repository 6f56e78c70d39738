"""Scripts that import torch and load models with transformers, on a machine without torch."""

from __future__ import annotations

import importlib
import importlib.util
import json
import os
import pickle
import runpy
import subprocess
import sys
from pathlib import Path

import jax
import numpy as np
import pytest

from compat_tests.cli.test_stand_ins import ROOT, RUNNER, WITHOUT
from compat_tests.parity.dpo_cases import SMALL
from trl_jax.cli import check, reading, torch_for_scripts
from trl_jax.cli.torch_for_scripts import ADVICE, has_name, stand_in
from trl_jax.hub.torch_bridge import TensorLikeArray
from trl_jax.training.user_loss_errors import ArraysOrTensors, found_in_torch

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


WORKERS = """
import json, sys
import torch
import torch.nn as nn
from datasets import Dataset
from transformers import AutoTokenizer

tokenizer, dtype, device = AutoTokenizer.from_pretrained(sys.argv[1]), torch.bfloat16, torch.device("cuda:0")


def encode(row: dict, mask: torch.Tensor | None = None, model: nn.Module | None = None) -> dict:
    ids = tokenizer(row["text"], return_tensors="pt")["input_ids"]
    with torch.no_grad():
        known = isinstance(ids, torch.Tensor) and torch.cuda.is_available() and not isinstance(tokenizer, nn.Module)
    return {"ids": ids[0], "facts": f"{known} {dtype} {device.type}"}


if __name__ == "__main__":
    rows = Dataset.from_list([{"text": "what is it " * number} for number in range(1, 5)])
    print(json.dumps([rows.map(encode, num_proc=count)[:] for count in (1, 2)]))
"""


def test_a_function_that_names_torch_runs_in_the_workers_of_map(checkpoint, tmp_path):
    done = run(tmp_path, WORKERS, str(checkpoint(**SMALL)), runner=WITHOUT + RUNNER)
    assert done.returncode == 0, done.stderr[-3000:]
    alone, shared = json.loads(done.stdout.splitlines()[-1])
    assert alone == shared and set(shared["facts"]) == {"True torch.bfloat16 cuda"} and len(shared["ids"][3]) > 8


PEFT_NAMES = """
import sys
from peft import LoraConfig, PeftConfig, PeftModel, PeftModelForCausalLM, PeftModelForSequenceClassification
from peft import get_peft_model
from transformers import AutoModelForCausalLM

folder, adapter = sys.argv[1:]
model = AutoModelForCausalLM.from_pretrained(folder)
assert not isinstance(model, PeftModelForCausalLM)
get_peft_model(model, LoraConfig(r=3, target_modules=["q_proj"], task_type="CAUSAL_LM")).save_pretrained(adapter)
config = PeftConfig.from_pretrained(adapter)
base = AutoModelForCausalLM.from_pretrained(config.base_model_name_or_path)
model = PeftModelForCausalLM.from_pretrained(base, adapter)
print(type(config).__name__, config.r, isinstance(config, PeftConfig), config.base_model_name_or_path == folder)
print(isinstance(model, PeftModel), isinstance(model, PeftModelForCausalLM),
      isinstance(model, PeftModelForSequenceClassification))
for read in (PeftConfig.from_pretrained, lambda name: PeftModel.from_pretrained(base, name)):
    try:
        read(folder)
    except ValueError as error:
        print(str(error)[:35])
"""


def test_a_script_reads_the_config_of_an_adapter_as_under_peft(checkpoint, tmp_path):
    arguments = str(checkpoint(**SMALL)), str(tmp_path / "adapter")
    printed = [run(tmp_path, PEFT_NAMES, *arguments, runner=WITHOUT + RUNNER)]
    if importlib.util.find_spec("peft") and importlib.util.find_spec("torch"):
        printed.append(
            run(tmp_path, PEFT_NAMES, *arguments, runner="import runpy, sys; runpy.run_path(sys.argv.pop(1))")
        )
    for done in printed:
        assert done.returncode == 0, done.stderr[-3000:]
        assert done.stdout.splitlines() == [
            "LoraConfig 3 True True", "True True False", *["Can't find 'adapter_config.json' at"] * 2,
        ], done.stdout  # fmt: skip


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


@pytest.mark.parametrize(("uses", "found"), [("torch.ones(2)", False), ("torch.cuda.is_available()", True)])
def test_a_script_that_is_prepared_for_its_absence_gets_no_half_of_torch(tmp_path, uses, found):
    source = f"try:\n    import torch\nexcept ImportError:\n    torch = None\nprint(torch is not None and {uses})\n"
    done = run(tmp_path, source, runner=WITHOUT + RUNNER)
    assert done.stdout == f"{found}\n", done.stderr[-3000:]
    assert "torch is not installed" not in done.stderr


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
    values = np.arange(3, dtype=np.float32).view(TensorLikeArray)
    casts = {"long": values.long(), "int": values.int(), "bool": values.bool(), "float64": values.double()}
    for name, cast in casts.items():
        assert cast.dtype == values.to(getattr(torch, name)).dtype == values.to("cuda", getattr(torch, name)).dtype
    assert values.to(torch.device("cuda")).dtype == torch.float32
    from trl_jax.core.torch_random import TorchGenerator, default_generator

    torch.manual_seed(11)
    np.testing.assert_array_equal(default_generator().words(5), TorchGenerator(11).words(5))


FUNCTIONS = """
import torch

def best(logits, labels):
    values, places = logits.max(-1)
    return {"std": logits.std(), "values": values, "places": places, "row": logits.argmax(dim=-1)}

def above(logits, labels):
    return best(logits * 2, labels)

def compute_loss(model, inputs):
    return model(**inputs).logits.std()

def with_norm(model, inputs):
    return torch.linalg.norm(model(**inputs).logits)
"""


def test_functions_of_a_script_that_imports_torch_mean_what_torch_means(tmp_path, monkeypatch):
    """Methods that NumPy's arrays also have, with another meaning: of tensors where torch is installed, otherwise of
    arrays that follow torch. A loss, which is compiled, has neither."""
    torch = pytest.importorskip("torch")
    (tmp_path / "functions.py").write_text(FUNCTIONS)
    monkeypatch.syspath_prepend(tmp_path)
    functions = importlib.import_module("functions")
    values = np.random.default_rng(0).standard_normal((2, 3, 5)).astype(np.float32), np.zeros((2, 3), np.int64)
    found = []
    for installed in (True, False):
        if not installed:
            for module in ("hub.torch_bridge", "training.user_loss_errors"):
                monkeypatch.setattr(f"trl_jax.{module}.available", lambda: False)
        found.append([ArraysOrTensors(getattr(functions, name), name)(*values) for name in ("best", "above")])
    expected = torch.tensor(values[0])
    np.testing.assert_allclose(found[1][0]["std"], expected.std(), rtol=1e-6)
    np.testing.assert_array_equal(found[1][0]["places"], expected.max(-1).indices)
    jax.tree.map(lambda ours, theirs: np.testing.assert_allclose(ours, theirs, rtol=1e-6), found[1], found[0])
    for name, line in (("compute_loss", "return model"), ("with_norm", "return torch.linalg.norm")):
        error = found_in_torch(name, [getattr(functions, name)])
        assert (
            str(error).startswith(f"{name} receives JAX arrays: torch functions do not accept them")
            and line in error.line
        )


def test_rows_of_different_lengths_are_no_tensor_without_torch_either(checkpoint, tmp_path):
    source = "import sys\nfrom transformers import AutoTokenizer\n" + (
        "AutoTokenizer.from_pretrained(sys.argv[1])(['what', 'what is it'], return_tensors='pt')\n"
    )
    done = run(tmp_path, source, str(checkpoint(**SMALL)), runner=WITHOUT + RUNNER)
    assert "ValueError: Unable to create tensor, you should probably activate truncation and/or padding" in done.stderr


def test_check_lists_what_of_transformers_needs_torch(tmp_path):
    runner = "from trl_jax.cli.main import main\n\nmain(['check', *sys.argv[1:]])\n"
    names = "AutoModel, AutoModelForCausalLM, LlamaForCausalLM, PreTrainedModel, TrainingArguments, pipeline, set_seed"
    done = run(tmp_path, f"import trl\nfrom transformers import {names}\n", runner=WITHOUT + runner)
    assert [line.split()[1:3] for line in done.stdout.splitlines() if "transformers" in line.partition(":")[0]] == [
        ["transformers.AutoModel:", "not"], ["transformers.pipeline:", "not"],
    ], done.stderr[-2000:]  # fmt: skip


def test_check_lists_what_the_script_needs_torch_for(tmp_path, monkeypatch):
    plain = check.is_installed
    monkeypatch.setattr(check, "is_installed", lambda name: name.partition(".")[0] != "torch" and plain(name))
    script = tmp_path / "script.py"
    script.write_text(MISSING.partition("import transformers")[0] + "\nloader = torch.utils.data.DataLoader([1])\n")
    guarded = "import trl\ntry:\n    import torch\nexcept ImportError:\n    torch = None\nx = torch and torch.ones(2)\n"
    assert not [one for one in check.findings(reading.read(guarded, script)) if one.kind == "not installed"]
    found = {(one.line, one.what): one.kind for one in check.findings(reading.read(script.read_text(), script))}
    assert found[2, "torch"] == found[3, "torch.nn.functional"] == found[4, "torch.nn"] == "changed"
    assert {place for place, kind in found.items() if kind == "not installed"} == {
        (7, "torch.nn.functional.softmax"), (7, "torch.ones"), (13, "torch.utils.data.DataLoader(...)"),
    }  # fmt: skip


CONVERTED = """
import sys
import torch
from peft import LoraConfig, get_peft_model
from transformers import AutoModelForCausalLM, set_seed

for convert in ("half", "bfloat16", "float"):
    model = getattr(AutoModelForCausalLM.from_pretrained(sys.argv[1], torch_dtype=torch.float32), convert)()
    weight = model.to(torch.float32).lm_head.weight
    print([round(float(value), 9) for value in weight.detach().tolist()[5]])
set_seed(4)
model = get_peft_model(AutoModelForCausalLM.from_pretrained(sys.argv[1]), LoraConfig(r=2, target_modules=["q_proj"]))
model = model.to(torch.bfloat16).to(torch.float32)
for name in ("base_layer", "lora_A.default"):
    weight = model.get_parameter(f"base_model.model.model.layers.0.self_attn.q_proj.{name}.weight")
    print([round(float(value), 9) for value in weight.detach().tolist()[1]])
"""


def test_a_model_that_a_script_converts_has_the_rounded_weights(checkpoint, tmp_path):
    pytest.importorskip("torch")
    folder = str(checkpoint(**SMALL))
    plain = "import runpy, sys; runpy.run_path(sys.argv.pop(1))"
    ours, theirs = (run(tmp_path, CONVERTED, folder, runner=runner) for runner in (WITHOUT + RUNNER, plain))
    assert ours.returncode == theirs.returncode == 0, ours.stderr[-3000:] + theirs.stderr[-3000:]
    assert ours.stdout == theirs.stdout and len(set(ours.stdout.splitlines())) == 5
