"""Packages that a script imports but this machine lacks, under `python -m trl_jax` and in `trl-jax check`."""

from __future__ import annotations

import os
import subprocess
import sys
from pathlib import Path

import pytest

from trl_jax.cli import check, reading
from trl_jax.cli.trl_alias import ADVICE

ROOT = Path(__file__).parents[2]

WITHOUT = """
import sys
from importlib.machinery import PathFinder

plain = PathFinder.find_spec


def without(name, path=None, target=None):
    missing = ("torch", "trl", "peft", "accelerate", "bitsandbytes", "deepspeed", "wandb", "unsloth")
    return None if name.partition(".")[0] in missing else plain(name, path, target)


PathFinder.find_spec = staticmethod(without)
"""
RUNNER = "from trl_jax.__main__ import main\n\nmain(sys.argv[1:])\n"

SCRIPT = """
import importlib.util
from peft import LoraConfig, TaskType, prepare_model_for_kbit_training
from accelerate import Accelerator, PartialState, logging
from accelerate.logging import get_logger
from accelerate.utils import set_seed
import bitsandbytes as bnb
import peft
from transformers import BitsAndBytesConfig
from transformers.integrations import HfDeepSpeedConfig
from transformers.utils import is_accelerate_available, is_bitsandbytes_available, is_peft_available
from trl import SFTTrainer
from trl.trainer.utils import is_peft_available as ours
from trl_jax import LoraConfig as Ours

assert LoraConfig is peft.LoraConfig is Ours and SFTTrainer.__module__.startswith("trl_jax")
assert peft.AutoPeftModelForCausalLM and peft.PromptTuningConfig and not isinstance("model", peft.PeftModel)
assert TaskType.CAUSAL_LM == "CAUSAL_LM" and prepare_model_for_kbit_training("model", use_gradient_checkpointing=1)
assert not any((ours(), is_peft_available(), is_accelerate_available(), is_bitsandbytes_available()))
assert BitsAndBytesConfig(load_in_4bit=True, bnb_4bit_compute_dtype="bfloat16").load_in_4bit
assert importlib.util.find_spec("wandb") is None and importlib.util.find_spec("unsloth") is None
assert HfDeepSpeedConfig({"zero_optimization": {"stage": 3}}).config["zero_optimization"] == {"stage": 3}
state = PartialState()
with state.main_process_first():
    state.print("rank", state.process_index, "of", Accelerator().num_processes, state.is_main_process)
get_logger(__name__).warning("of the main process %d", 1, main_process_only=True)
logging.get_logger(__name__, log_level="ERROR").warning("not shown", in_order=True)
set_seed(3)
for line in ("import wandb", "from unsloth import FastLanguageModel", "bnb.optim", "from peft import AdaLoraConfig",
             "state.gather"):
    try:
        exec(compile(line, __file__, "exec"))
    except (ImportError, AttributeError) as error:
        print(type(error).__name__, error)
"""

SILENT = """
from trl_jax import LoraConfig, SFTConfig
from transformers.utils import logging

print(LoraConfig, SFTConfig)
logging.get_logger("transformers").warning_advice("another advice")
"""


def test_a_script_finds_what_stands_in_for_missing_packages(tmp_path):
    runner, script = tmp_path / "runner.py", tmp_path / "script.py"
    runner.write_text(WITHOUT + RUNNER)
    script.write_text(SCRIPT)
    env = {**os.environ, "PYTHONPATH": str(ROOT), "JAX_PLATFORMS": "cpu"}
    command = [sys.executable, str(runner), str(script)]
    ran = subprocess.run(command, capture_output=True, text=True, env=env, cwd=tmp_path)
    assert ran.returncode == 0, ran.stderr[-3000:]
    assert ran.stdout.splitlines() == [
        "rank 0 of 1 True",
        f"ModuleNotFoundError No module named 'wandb'. {ADVICE['wandb']}",
        f"ModuleNotFoundError No module named 'unsloth'. {ADVICE['unsloth']}",
        f"ImportError bitsandbytes is not installed, and optim is not in trl_jax. {ADVICE['bitsandbytes']}",
        f"ImportError peft is not installed, and AdaLoraConfig is not in trl_jax. {ADVICE['peft']}",
        f"AttributeError accelerate is not installed, and trl_jax's stand-in has no gather. {ADVICE['accelerate']}",
    ]
    assert "PyTorch was not found" not in ran.stderr and ran.stderr.endswith("of the main process 1\n")


def test_without_torch_transformers_does_not_say_that_models_are_missing(tmp_path):
    """Nor in a script that imports trl_jax; other warnings of transformers are shown."""
    code = WITHOUT + SILENT
    env = {**os.environ, "PYTHONPATH": str(ROOT), "JAX_PLATFORMS": "cpu"}
    env.pop("TRANSFORMERS_NO_ADVISORY_WARNINGS", None)
    ran = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, env=env, cwd=tmp_path)
    assert ran.returncode == 0 and "SFTConfig" in ran.stdout, ran.stderr[-3000:]
    assert "PyTorch was not found" not in ran.stderr and "another advice" in ran.stderr


@pytest.mark.parametrize("name", ["capitals", "tiny_model", "quickstart"])
def test_an_example_does_not_start_with_that_line(tmp_path, name):
    """Examples import trl_jax before transformers."""
    code = f"{WITHOUT}\nimport {name}\nassert 'transformers' in sys.modules"
    env = {**os.environ, "PYTHONPATH": f"{ROOT}{os.pathsep}{ROOT / 'examples'}", "JAX_PLATFORMS": "cpu"}
    env.pop("TRANSFORMERS_NO_ADVISORY_WARNINGS", None)
    ran = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, env=env, cwd=tmp_path)
    assert ran.returncode == 0 and "PyTorch was not found" not in ran.stderr, ran.stderr[-3000:]


def test_check_says_what_a_missing_package_means(tmp_path, monkeypatch):
    plain = check.is_installed
    monkeypatch.setattr(check, "is_installed", lambda name: name.partition(".")[0] not in ADVICE and plain(name))
    script = tmp_path / "script.py"
    script.write_text(
        "from peft import LoraConfig, AdaLoraConfig\nfrom accelerate import PartialState\n"
        "import wandb\nimport bitsandbytes as bnb\n"
    )
    found = {
        (one.line, one.what): (one.kind, one.text) for one in check.findings(reading.read(script.read_text(), script))
    }
    assert found[1, "peft.LoraConfig"][0] == found[2, "accelerate.PartialState"][0] == "changed"
    assert found[4, "bitsandbytes"][0] == "changed"
    assert found[1, "peft"] == ("not installed", f"The script stops at this import. {ADVICE['peft']}")
    assert found[3, "wandb"] == ("not installed", f"The script stops at this import. {ADVICE['wandb']}")
