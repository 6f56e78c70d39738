"""Plans of a trainer outside trl_jax, examples/pointwise.py, and of one added to the table of trainers."""

from __future__ import annotations

import json
import shutil
import sys
import types
from dataclasses import replace
from pathlib import Path

import jax
import jax.numpy as jnp
import pytest

from compat_tests import pages
from compat_tests.effort import only_thorough, thorough
from compat_tests.plan.planned import LENGTH, LORA, PAIRS, alike
from trl_jax.cli.main import main
from trl_jax.core.trainers import TRAINERS, TrainerNames, names_of_config
from trl_jax.data.batch import Columns
from trl_jax.hub.auto import find_checkpoint
from trl_jax.plan import trace
from trl_jax.plan.chips import topology
from trl_jax.plan.plan import Run, plan
from trl_jax.scripts import train
from trl_jax.scripts.plan import ignored_arguments, text
from trl_jax.trainer.reward_config import RewardConfig
from trl_jax.trainer.reward_trainer import RewardTrainer

sys.path.insert(0, str(Path(__file__).resolve().parents[2] / "examples"))

from pointwise import PointwiseConfig, PointwiseTrainer

RATED = {"input_ids": [1] * LENGTH, "rating": 0.0}


@pytest.fixture
def run(checkpoint, tmp_path):
    shutil.copy(checkpoint() / "config.json", tmp_path / "config.json")
    return Run(find_checkpoint(str(tmp_path), dtype="float32"), trainer=PointwiseTrainer)


def config(tmp_path, kind=PointwiseConfig, **changes):
    given = {"per_device_train_batch_size": 4, "max_length": 96, "bf16": False, "report_to": "none"}
    return kind(str(tmp_path / "out"), **given | changes)


@only_thorough
@pytest.mark.parametrize("how", [{"bf16": False}, thorough({"bf16": True, "adapter": LORA})], ids=["whole", "adapter"])
def test_its_programs_are_those_of_a_trainer_with_weights(checkpoint, tmp_path, how):
    found = alike(checkpoint(), tmp_path, kind=PointwiseTrainer, row=RATED, **how)
    assert found.tokens == LENGTH * PAIRS and "Evaluation: a pass of" in text(found)


def test_one_text_an_example_is_half_of_two(run, tmp_path):
    place = topology("h100:1")
    one = plan(run, config(tmp_path, batch_layout="padded"), place)
    two = plan(replace(run, trainer=None), config(tmp_path, RewardConfig, batch_layout="padded"), place)
    assert two.tokens == 2 * one.tokens == 2 * 4 * 96 and two.memory.parameters == one.memory.parameters


def test_arguments_of_a_subclass_are_its_trainers(tmp_path):
    class Own(RewardConfig):
        pass

    assert names_of_config(config(tmp_path, Own)).load_trainer() is RewardTrainer


def test_a_trainer_that_is_not_in_the_table_is_named(run, tmp_path):
    with pytest.raises(
        TypeError,
        match=r"args must be one of RewardConfig.*, got a pointwise.PointwiseConfig. For a config of your own, pass",
    ):
        plan(replace(run, trainer=None), config(tmp_path), topology("h100:1"))


def test_arguments_of_another_trainer_are_refused(run, tmp_path):
    with pytest.raises(TypeError, match="expected a PointwiseConfig"):
        plan(run, config(tmp_path, RewardConfig), topology("h100:1"))


class UserCompletionsLoss(RewardTrainer):
    weights = 0

    def compute_loss(self, model, inputs, return_outputs=False, num_items_in_batch=None):
        scores = model(input_ids=inputs["input_ids"], attention_mask=inputs["attention_mask"]).logits
        chosen, rejected = jnp.split(scores, 2)
        wide = jnp.tanh(scores * jnp.arange(1.0, self.weights + 1)) if self.weights else jnp.zeros(1)
        return -jax.nn.log_sigmoid(chosen - rejected).mean() + wide.mean()


class WideLoss(UserCompletionsLoss):
    weights = 1_000_000


class TorchLoss(UserCompletionsLoss):
    def compute_loss(self, model, inputs, return_outputs=False, num_items_in_batch=None):
        import torch

        return torch.nn.functional.softplus(model(input_ids=inputs["input_ids"]).logits).mean()


def test_a_loss_of_a_scripts_own_is_planned(run, tmp_path):
    """The step whose micro-batches run one after another computes the same as the built-in one, and its memory includes
    what the user's loss needs."""
    place, given = topology("cpu:1"), {"gradient_accumulation_steps": 2, "batch_layout": "padded"}
    given["remat_policy"] = "nothing_saveable"
    theirs, own, wide = (
        plan(replace(run, trainer=kind), config(tmp_path, RewardConfig, **given), place)
        for kind in (None, UserCompletionsLoss, WideLoss)
    )
    assert own.one == theirs.one and own.tokens == theirs.tokens == 2 * 2 * 4 * 96
    assert own.compiled.cost.flops == pytest.approx(theirs.compiled.cost.flops, rel=0.05)
    assert own.memory.moments == theirs.memory.moments and own.compiled.peak < wide.compiled.peak - 4 * 6 * 1_000_000
    pytest.importorskip("torch")
    with pytest.raises(TypeError, match="compute_loss receives JAX arrays: torch functions do not accept them"):
        plan(replace(run, trainer=TorchLoss), config(tmp_path, RewardConfig), place)


def test_made_up_rows_have_what_a_task_must_have_and_predict_all_they_can():
    columns = Columns(("a_ids", "b_ids"), ("must", "may"), ("a_labels", "b_labels"), "documents", optional=("may",))
    [row] = trace.longest_rows(columns, 3, 1)
    assert row == {"a_ids": [1] * 3, "b_ids": [2] * 3, "a_labels": [1] * 3, "b_labels": [2] * 3, "must": 0.0}
    assert columns.example(row).num_targets == 4


def test_the_page_plans_it(checkpoint, monkeypatch, capsys, tmp_path):
    monkeypatch.setattr("trl_jax.plan.compile.prepare", lambda place: None)
    monkeypatch.chdir(tmp_path)
    [block] = pages.blocks(Path(__file__).resolve().parents[2] / "docs" / "pages" / "plans.md", "python")
    code = block.code.replace("Qwen/Qwen3-0.6B", str(checkpoint())).replace("v5e:2x2", "h100:1")
    exec(code, {})
    assert "Whether it fits is unknown: weights" in capsys.readouterr().out


# One line in the table is enough for the commands.


@pytest.fixture
def in_table(monkeypatch):
    """Adds the example to the table as if it were a trainer of trl_jax."""
    # JAX is already initialized in this process.
    monkeypatch.setattr("trl_jax.plan.compile.prepare", lambda place: None)
    names = TrainerNames("pointwise", "PointwiseTrainer", "PointwiseConfig", "ratings", "train on ratings")
    for name, kind in ((names.trainer, PointwiseTrainer), (names.config, PointwiseConfig)):
        module = types.ModuleType(names.where[name])
        vars(module)[name] = kind
        monkeypatch.setitem(sys.modules, names.where[name], module)
    monkeypatch.setitem(TRAINERS, names.command, names)
    return names


@pytest.fixture
def ratings(tmp_path):
    rows = [{"prompt": "How? ", "completion": "so " * n, "rating": float(n)} for n in range(1, 9)]
    path = tmp_path / "ratings.jsonl"
    path.write_text("".join(json.dumps(row) + "\n" for row in rows))
    return path


def test_the_command_plans_it(in_table, checkpoint, ratings, tmp_path, capsys):
    flags = f"--model_name_or_path {checkpoint()} --topology h100:1 --per_device_train_batch_size 4 --max_length 64"
    flags += " --batch_layout padded"
    assert main(["plan", "--trainer", "pointwise", *flags.split(), "--json", str(tmp_path / "flag.json")]) == 0
    (tmp_path / "plan.yaml").write_text("trainer: pointwise\n")
    yaml = f"--config {tmp_path / 'plan.yaml'} --json {tmp_path / 'yaml.json'}"
    assert main(["plan", *flags.split(), *yaml.split()]) == 0
    found, same = (json.loads((tmp_path / f"{name}.json").read_text()) for name in ("flag", "yaml"))
    assert found == same and found["tokens"] == 4 * 64 and found["memory"]["moments"] > 0
    assert main(["plan", "--trainer=pointwise", *flags.split(), "--dataset_name", str(ratings)]) == 0
    assert "(x2)" in capsys.readouterr().out  # 8 rows make two steps


def test_flags_of_another_trainer_are_unknown(in_table, checkpoint, capsys):
    flags = f"--model_name_or_path {checkpoint()} --topology h100:1 --center_rewards_coefficient 0.01 --max_length 64"
    assert main(["plan", *flags.split()]) == 0
    assert main(["plan", *flags.split(), "--trainer", "pointwise"]) == 2
    assert "unknown argument --center_rewards_coefficient" in capsys.readouterr().err


def test_a_trainer_that_there_is_not(checkpoint, capsys, tmp_path):
    flags = ["plan", "--model_name_or_path", str(checkpoint()), "--topology", "h100:1"]
    assert main([*flags, "--trainer", "sorcery"]) == 2
    assert "--trainer sorcery is unknown: expected one of reward" in capsys.readouterr().err
    (tmp_path / "plan.yaml").write_text("trainer: [reward]\n")
    assert main([*flags, "--config", str(tmp_path / "plan.yaml")]) == 2
    assert "--trainer ['reward'] is unknown: expected one of reward" in capsys.readouterr().err


def test_arguments_that_a_config_lacks_are_not_missed(tmp_path):
    assert ignored_arguments(PointwiseConfig(str(tmp_path), save_steps=7)) == ["output_dir", "save_steps"]


def test_the_shared_script_trains_it(in_table, checkpoint, ratings, tmp_path, capsys):
    parser = train.parser_of("pointwise", prog="trl-jax pointwise")
    assert "Train on ratings, for example:" in parser.format_help() and "ratings.jsonl" in parser.format_help()
    flags = f"--model_name_or_path {checkpoint()} --dataset_name {ratings} --output_dir {tmp_path / 'out'}"
    flags += " --max_steps 1 --report_to none --use_cpu"
    train.train("pointwise", *parser.parse_args_and_config(flags.split()))
    assert f"Model saved to {tmp_path / 'out'}." in capsys.readouterr().out
    assert (tmp_path / "out" / "model.safetensors").is_file()
    with pytest.raises(ValueError, match="--dataset_name is missing: .* file of ratings"):
        script, config, model, _ = parser.parse_args_and_config(["--model_name_or_path", "m"])
        train.train("pointwise", script, config, model)
