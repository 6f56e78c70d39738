"""GPU-specific code in scripts under `python -m trl_jax`, on a machine where torch has no GPU."""

from __future__ import annotations

import json
import os
import subprocess
import sys

import pytest

from compat_tests.cli.test_main_module import ROOT, run
from compat_tests.effort import only_thorough
from compat_tests.tiny import preference_rows
from compat_tests.trainer.trainers import FACTS
from trl_jax.cli.torch_for_scripts import load_anywhere

BF16 = """
import json, sys, torch
from datasets import load_dataset
from transformers import AutoModelForSequenceClassification, AutoTokenizer, TrainingArguments
from transformers.utils import is_torch_bf16_gpu_available
from trl import RewardConfig, RewardTrainer

name, data = sys.argv[1:]
rows = load_dataset("json", data_files=data, split="train")
usual = dict(output_dir="out", per_device_train_batch_size=4, max_steps=2, learning_rate=1e-3, logging_steps=1,
             report_to="none", save_strategy="no")

def losses(model, args):
    trainer = RewardTrainer(model, args, train_dataset=rows, processing_class=AutoTokenizer.from_pretrained(name))
    trainer.train()
    return [log["loss"] for log in trainer.state.log_history if "loss" in log]

how = {"attn_implementation": "flash_attention_2", "device_map": {"": 0}}
model = AutoModelForSequenceClassification.from_pretrained(name, num_labels=1, use_flash_attention_2=True, **how)
model.cuda()
half = is_torch_bf16_gpu_available() and torch.cuda.is_bf16_supported()
with_words = losses(model, TrainingArguments(bf16=half, fp16=not half, **usual))
by_name = losses(name, RewardConfig(bf16=torch.cuda.is_available(), model_init_kwargs=how, **usual))
print(json.dumps([with_words, by_name, losses(name, RewardConfig(bf16=True, **usual))]))
"""


@only_thorough
def test_bf16_flash_attention_and_placement_train_as_the_plain_script(checkpoint, tmp_path):
    pytest.importorskip("torch")
    data = tmp_path / "pairs.jsonl"
    data.write_text("".join(json.dumps(row) + "\n" for row in preference_rows(12)))
    model = checkpoint(**FACTS, tokenizer={"chat_template": True})
    done = run(tmp_path, BF16, str(model), str(data))
    assert done.returncode == 0, done.stderr[-2000:]
    with_words, by_name, plain = json.loads(done.stdout.splitlines()[-1])
    assert with_words == by_name == plain and len(plain) == 2
    assert done.stderr.count("torch has no GPU here") == 1


def test_kernels_of_a_model_are_passed_over_where_torch_has_no_gpu():
    torch = pytest.importorskip("torch")

    class Loaded:
        @classmethod
        def from_pretrained(cls, name, **kwargs):
            return name, kwargs

    load_anywhere(Loaded)
    kernels = dict(
        flash_attn=True, flash_rotary=True, fused_dense=True, use_flash_attention_2=True,
        _attn_implementation="flash_attention_2",
    )  # fmt: skip
    kept = kernels if torch.cuda.is_available() else {}
    assert Loaded.from_pretrained("phi", revision="main", **kernels) == ("phi", {"revision": "main", **kept})


TENSORS = """
import warnings
import torch
import torch.utils.data
x = torch.arange(3, device="cuda:0")
torch.set_default_device("cuda")
moved = [x.to("cuda"), x.to(device=torch.device("cuda")), x.to(0), x.to("cuda", torch.float32), x.cuda(), x.to("cpu")]
assert all(one.device.type == "cpu" for one in moved) and moved[3].dtype is torch.float32
assert torch.nn.Linear(2, 2).cuda().weight.device.type == torch.nn.Linear(2, 2).to("cuda:0").weight.device.type == "cpu"
assert x.to(torch.float16).dtype is torch.float16 and torch.zeros(2, dtype=torch.int8).dtype is torch.int8
with torch.cuda.device("cuda:0"):
    assert torch.ones(1).cuda().device.type == "cpu"
free, total = torch.cuda.mem_get_info()
assert free == total == torch.cuda.get_device_properties(0).total_memory > 2**20
assert torch.cuda.device_count() == 1 and torch.cuda.current_device() == 0
from accelerate.utils import is_cuda_available
from transformers.utils import is_torch_cuda_available
print(is_cuda_available(), is_torch_cuda_available(), torch.cuda.is_available())
"""


def test_tensors_stay_on_the_cpu_and_libraries_hear_the_truth(tmp_path):
    pytest.importorskip("torch")
    done = run(tmp_path, TENSORS)
    assert done.stdout == "False False True\n", done.stderr[-2000:]
    assert done.stderr.count("torch has no GPU here") == 1


EXPORTED = """
import sys, torch
from datasets import Dataset
from trl import RewardConfig, RewardTrainer
torch.zeros(1).cuda()
rows = Dataset.from_dict({"chosen": ["good", "fine", "well"], "rejected": ["bad", "poor", "ill"]})
args = RewardConfig("out", max_steps=1, per_device_train_batch_size=3, report_to="none", save_strategy="no")
trainer = RewardTrainer(sys.argv[1], args, train_dataset=rows)
trainer.train()
print(trainer.state.global_step)
"""


@only_thorough
def test_torch_still_exports_a_model(checkpoint, tmp_path):
    pytest.importorskip("torch")
    done = run(tmp_path, EXPORTED, str(checkpoint("biogpt")))
    assert done.stdout.splitlines()[-1:] == ["1"], done.stderr[-2000:]


NOTEBOOK = """
import sys, torch
from transformers import AutoModelForSequenceClassification, TrainingArguments
import trl_jax
trl_jax.install()
how = {"attn_implementation": "flash_attention_2", "device_map": "cuda"}
model = AutoModelForSequenceClassification.from_pretrained(sys.argv[1], num_labels=1, **how).to("cuda")
print(model.device, torch.cuda.is_available(), TrainingArguments("out", bf16=True).bf16)
"""


@only_thorough
def test_a_notebook_may_have_imported_torch_before(checkpoint, tmp_path):
    pytest.importorskip("torch")
    model = checkpoint(**FACTS, tokenizer={"chat_template": True})
    env = {**os.environ, "PYTHONPATH": ROOT}
    command = [sys.executable, "-c", NOTEBOOK, str(model)]
    done = subprocess.run(command, capture_output=True, text=True, env=env, cwd=tmp_path)
    assert done.stdout == "cpu True True\n", done.stderr[-2000:]


FEW_BITS = """
import sys
from transformers import AutoModelForCausalLM, BitsAndBytesConfig
eight = BitsAndBytesConfig(load_in_8bit=True)
for how in ({"load_in_4bit": True}, {"load_in_4bit": True, "quantization_config": eight}, {"load_in_8bit": False}):
    model = AutoModelForCausalLM.from_pretrained(sys.argv[1], device_map={"": 0}, **how)
    print(type(model.model.layers[0].self_attn.q_proj).__name__)
"""


@only_thorough
def test_few_bits_by_their_old_names(checkpoint, tmp_path):
    pytest.importorskip("bitsandbytes")
    done = run(tmp_path, FEW_BITS, str(checkpoint(head="causal")))
    assert done.stdout.splitlines() == ["Linear4bit", "Linear8bitLt", "Linear"], done.stderr[-2000:]
    assert "load_in_4bit of from_pretrained: use quantization_config=BitsAndBytesConfig(...)." in done.stderr
