"""`trl-jax grpo` and `trl-jax rloo`: rewards by name, and scripts written for TRL."""

from __future__ import annotations

import dataclasses
import importlib
import json
import os
import subprocess
import sys
from pathlib import Path

import pytest

from compat_tests.effort import only_thorough, usual
from trl_jax import rewards
from trl_jax.cli.main import main
from trl_jax.core.trainers import TRAINERS
from trl_jax.scripts.grpo import GRPOScriptArguments
from trl_jax.scripts.train import reward_sources
from trl_jax.scripts.utils import TrlParser

ROOT = Path(__file__).parents[2]
COMMANDS = pytest.mark.parametrize("command", ["grpo", "rloo"])
RUN = {
    "max_steps": 1, "per_device_train_batch_size": 4, "num_generations": 2, "max_completion_length": 4, "use_cpu": True,
    "bf16": False, "report_to": "none", "save_strategy": "no", "logging_steps": 1, "learning_rate": 1e-3,
}  # fmt: skip


@pytest.fixture
def model(checkpoint):
    return checkpoint(
        head="causal", num_hidden_layers=1, hidden_size=32, intermediate_size=48, tokenizer={"chat_template": True}
    )


@pytest.fixture(autouse=True)
def folder(tmp_path, monkeypatch):
    """Change to a folder with prompts and a file with reward functions."""
    rows = [{"prompt": f"How do I bake {what}?", "extra": what} for what in ("bread", "pies", "soup", "cake")]
    (tmp_path / "prompts.jsonl").write_text("".join(json.dumps(row) + "\n" for row in rows))
    (tmp_path / "my_rewards.py").write_text(
        "number = 3\n\n\ndef brevity(completions, extra, **columns):\n"
        "    return [len(text) / 10 + len(word) for text, word in zip(completions, extra)]\n"
    )
    monkeypatch.chdir(tmp_path)
    monkeypatch.setattr(sys, "path", [*sys.path])
    monkeypatch.delitem(sys.modules, "my_rewards", raising=False)
    return tmp_path


def flags(model: Path, **further: object) -> list[str]:
    given = {"model_name_or_path": model, "dataset_name": "prompts.jsonl", "output_dir": "out"} | RUN | further
    return [text for name, value in given.items() for text in (f"--{name}", str(value))]


@usual("grpo")
@COMMANDS
def test_a_run_by_a_function_in_this_folder_and_by_a_model(command, model, checkpoint, folder, capsys):
    judge = checkpoint()
    how = flags(model, reward_model_name_or_path=judge, save_strategy="steps", save_steps=1)
    assert main([command, *how, "--reward_funcs", "my_rewards.brevity", "get_soft_overlong_punishment"]) == 0
    assert "Model saved to out." in capsys.readouterr().out
    assert (folder / "out" / "model.safetensors").is_file()
    state = json.loads((folder / "out" / "checkpoint-1" / "trainer_state.json").read_text())
    [logged] = state["log_history"]
    names = [name.split("/")[1] for name in logged if name.startswith("rewards/") and name.endswith("/mean")]
    assert names == [judge.name, "brevity", "soft_overlong_punishment_reward"]
    assert logged["rewards/brevity/mean"] > 4 and logged["rewards/soft_overlong_punishment_reward/mean"] == 0


SCRIPT = """
import json, sys
from datasets import load_dataset
from {package} import {algorithm}Config, {algorithm}Trainer
{more}

def longer(completions, **columns):
    return [len(text) / 10 for text in completions]

model, out, options = sys.argv[1:]
rows = load_dataset("json", data_files="prompts.jsonl", split="train")
args = {algorithm}Config(output_dir=out, **json.loads(options))
trainer = {algorithm}Trainer(model=model, reward_funcs=longer, args=args, train_dataset=rows)
trainer.train()
trainer.save_model(out)
json.dump(trainer.state.log_history, open(out + "/logs.json", "w"))
print(type(trainer).__module__)
"""


@only_thorough
@COMMANDS
def test_a_script_trains_by_its_import_or_as_it_is(command, model, folder):
    """With its import changed, and unchanged under `python -m trl_jax`, with the same results."""
    algorithm, found = command.upper(), {}
    from_trl = "from trl.rewards import accuracy_reward\nassert accuracy_reward.__module__.startswith('trl_jax')"
    for package, how, more in (("trl_jax", [], ""), ("trl", ["-m", "trl_jax"], from_trl)):
        script = folder / f"{package}_script.py"
        script.write_text(SCRIPT.format(package=package, algorithm=algorithm, more=more))
        words = [sys.executable, *how, str(script), str(model), f"out_{package}", json.dumps(RUN)]
        env = {**os.environ, "PYTHONPATH": str(ROOT)}
        done = subprocess.run(words, capture_output=True, text=True, env=env, cwd=folder)
        assert done.returncode == 0, done.stderr[-3000:]
        assert done.stdout.splitlines()[-1] == f"trl_jax.trainer.{command}_trainer"
        [found[package], _] = json.loads((folder / f"out_{package}" / "logs.json").read_text())
    assert found["trl"]["reward"] > 0 and found["trl"]["grad_norm"] > 0
    timed = {"step_time"}
    assert {k: v for k, v in found["trl"].items() if k not in timed} == {
        k: v for k, v in found["trl_jax"].items() if k not in timed
    }


@COMMANDS
@pytest.mark.parametrize(
    ("given", "text"),
    [
        ([], "No reward source provided: pass functions with --reward_funcs, a reward model with"),
        (["brevity"], "Could not load reward function 'brevity'. Expected one of ['accuracy_reward', 'reasoning_"),
        (["my_rewards.none"], "'my_rewards.none': the module my_rewards has no function none."),
        (["my_rewards.number"], "'my_rewards.number': the module my_rewards has no function number."),
    ],
)
def test_a_reward_that_is_none_is_told_before_anything_is_loaded(command, given, text, capsys):
    words = [command, *flags(Path("nowhere"))]
    assert main([*words, "--reward_funcs", *given] if given else words) == 2
    assert text in capsys.readouterr().err


def test_names_are_those_of_trls_script():
    args = GRPOScriptArguments(
        reward_model_name_or_path="judge", reward_funcs=["accuracy_reward", "reasoning_accuracy_reward"]
    )
    assert reward_sources(args) == ["judge", rewards.accuracy_reward, rewards.reasoning_accuracy_reward]
    args = GRPOScriptArguments(reward_funcs=["get_soft_overlong_punishment", "think_format_reward"])
    assert reward_sources(args) == [rewards.get_soft_overlong_punishment(1280, 256), rewards.think_format_reward]


@COMMANDS
def test_fields_are_those_of_trls_script(command):
    theirs = pytest.importorskip(f"trl.scripts.{command}")
    ours = importlib.import_module(f"trl_jax.scripts.{command}")
    name = f"{command.upper()}ScriptArguments"
    found, wanted = (
        [(field.name, field.default) for field in dataclasses.fields(vars(side)[name])] for side in (ours, theirs)
    )
    assert found == wanted


@COMMANDS
def test_help_shows_a_reward(command):
    parser = importlib.import_module(f"trl_jax.scripts.{command}").make_parser(prog=f"trl-jax {command}")
    told = parser.format_help()
    assert f"trl-jax {command} --model" in told and "--reward_funcs my_rewards.brevity --learning_rate" in told
    assert isinstance(parser, TrlParser) and TRAINERS[command].summary.capitalize() in told
