"""Tasks written only with public names, examples/custom_*_loss.py, support everything that a run offers."""

from __future__ import annotations

import ast
import os
import re
import subprocess
import sys
from dataclasses import dataclass, field
from pathlib import Path
from typing import ClassVar

import numpy as np
import pytest
from datasets import Dataset
from safetensors.numpy import load_file
from transformers import TrainerCallback

ROOT = Path(__file__).resolve().parents[2]
EXAMPLES = ROOT / "examples"
sys.path.insert(0, str(EXAMPLES))

import custom_policy_loss  # noqa: E402
import custom_preference_loss  # noqa: E402
import jax.numpy as jnp  # noqa: E402
import tiny_model  # noqa: E402
from custom_policy_loss import SpoConfig, SpoTrainer, share_of_e  # noqa: E402
from custom_preference_loss import DpoPositiveTask, DpoPositiveTrainer  # noqa: E402

import trl_jax  # noqa: E402
import trl_jax.losses  # noqa: E402
import trl_jax.tasks  # noqa: E402
from compat_tests.effort import THOROUGH, only_thorough, usual  # noqa: E402
from trl_jax import BaseConfig, BaseTrainer, LoraConfig, ReferenceTrainer  # noqa: E402
from trl_jax.tasks import PairTask, TextTask, weighted_loss  # noqa: E402

NAMES = ("custom_preference_loss", "custom_policy_loss")
KINDS = pytest.mark.parametrize("kind", ["pairs", "online"])
SHAPE = {"num_hidden_layers": 1, "hidden_size": 32, "intermediate_size": 32, "num_attention_heads": 2, "head_dim": 16}
COMMON = {"logging_steps": 1, "bf16": False, "report_to": "none", "disable_tqdm": True, "save_strategy": "no"}
PAIRS = {"max_steps": 6, "learning_rate": 3e-3, "per_device_train_batch_size": 4} | COMMON
ONLINE = {
    "max_steps": 4, "learning_rate": 3e-3, "per_device_train_batch_size": 8, "num_generations": 4,
    "max_completion_length": 6, "num_iterations": 2,
} | COMMON  # fmt: skip
LORA = LoraConfig(r=4, target_modules="all-linear")
CLOCK = ("runtime", "per_second", "time")
ROWS = custom_preference_loss.pairs()
PROMPTS = [f"Say {word}: " for word in ("one", "two", "three", "four")]


@pytest.fixture(scope="module")
def folder(tmp_path_factory):
    texts = ["".join(row.values()) for row in ROWS] + PROMPTS
    return str(tiny_model.build(tmp_path_factory.mktemp("start"), texts, vocab_size=300, **SHAPE))


def pair_trainer(folder, out, *, kind=DpoPositiveTrainer, config=None, rows=ROWS, **arguments):
    args = kind.config_class(str(out), **PAIRS | (config or {}))
    return kind(folder, args=args, train_dataset=Dataset.from_list(rows), **arguments)


def online_trainer(folder, out, *, config=None, **arguments):
    args = SpoConfig(str(out), **ONLINE | (config or {}))
    return SpoTrainer(folder, share_of_e, args=args, train_dataset=Dataset.from_dict({"prompt": PROMPTS}), **arguments)


MAKE = {"pairs": pair_trainer, "online": online_trainer}


def trained(trainer, resume=None):
    trainer.train(resume_from_checkpoint=resume)
    return trainer


def logs(trainer) -> list[dict]:
    return [{k: v for k, v in log.items() if not k.endswith(CLOCK)} for log in trainer.state.log_history]


def logged(trainer, name="loss") -> list[float]:
    return [log[name] for log in trainer.state.log_history if name in log]


# The examples: only public names, a short objective, and something is learned.


@pytest.mark.parametrize("name", NAMES)
def test_an_example_imports_public_names_only(name):
    tree = ast.parse((EXAMPLES / f"{name}.py").read_text())
    found = [node for node in ast.walk(tree) if isinstance(node, ast.ImportFrom) and "trl_jax" in node.module]
    public = {module.__name__: {*module.__all__} for module in (trl_jax, trl_jax.tasks, trl_jax.losses)}
    assert {node.module for node in found} >= {"trl_jax", "trl_jax.tasks"}
    assert all({one.name for one in node.names} <= public[node.module] for node in found)
    plain = {one.name.split(".")[0] for node in ast.walk(tree) if isinstance(node, ast.Import) for one in node.names}
    assert "trl_jax" not in plain
    assert not [node.attr for node in ast.walk(tree) if isinstance(node, ast.Attribute) and node.attr[0] == "_"]


@pytest.mark.parametrize("name", NAMES)
def test_an_objective_is_about_40_lines(name):
    tree = ast.parse((EXAMPLES / f"{name}.py").read_text())
    classes = [node for node in tree.body if isinstance(node, ast.ClassDef)]
    assert len(classes) == 3 and sum(node.end_lineno - node.lineno + 1 for node in classes) <= 45


@pytest.mark.parametrize("module", [trl_jax.tasks, trl_jax.losses])
def test_every_public_name_is_there(module):
    for name in module.__all__:
        assert getattr(module, name).__name__ == name


def test_the_preference_example_learns(tmp_path, capsys):
    custom_preference_loss.main(tmp_path)
    shown = re.search(r"unseen pairs: (\S+), after training (\S+); (\d+)%", capsys.readouterr().out)
    before, after, right = map(float, shown.groups())
    assert before == pytest.approx(np.log(2), abs=1e-3) and after < 0.5 and right > 80


@only_thorough
def test_the_policy_example_learns(tmp_path, capsys):
    custom_policy_loss.main(tmp_path)
    shown = re.search(r"reward: (\S+) at first, (\S+) at last\.", capsys.readouterr().out)
    first, last = map(float, shown.groups())
    assert last > 3 * first


# The loss equals the formula.


def test_the_loss_of_one_pair_is_the_papers(folder, tmp_path):
    trainer = trained(pair_trainer(folder, tmp_path, config={"penalty": 50.0, "beta": 0.5}, rows=ROWS[8:]))
    found = trainer.evaluate(Dataset.from_list([ROWS[0] | {"chosen": " not now"}]))
    assert found["eval_lost"] > 0.01
    exponent = found["eval_rewards/margins"] - 0.5 * 50.0 * found["eval_lost"]
    assert found["eval_loss"] == pytest.approx(np.log1p(np.exp(-exponent)), rel=1e-4)


def test_rewards_of_rollouts_go_up(folder, tmp_path):
    config = {"max_steps": 24, "learning_rate": 1e-2, "per_device_train_batch_size": 16}
    rewards = logged(trained(online_trainer(folder, tmp_path, config=config)), "reward")
    assert np.mean(rewards[-3:]) > 1.5 * np.mean(rewards[:3])


def test_a_reference_is_compared_with_rollouts(folder, tmp_path):
    kl = logged(trained(online_trainer(folder, tmp_path, config={"beta": 0.1})), "kl")
    assert kl[0] == 0 and min(kl[1:]) > 1e-6


# It resumes bitwise, and gives the same results in every layout.


class Stops(TrainerCallback):
    def on_step_end(self, args, state, control, **kwargs):
        control.should_training_stop = state.global_step == 3


@usual("online")
@KINDS
def test_it_resumes_to_the_bit(kind, folder, tmp_path):
    config = {"save_strategy": "steps", "save_steps": 2}
    whole = trained(MAKE[kind](folder, tmp_path / "whole", config=config))
    trained(MAKE[kind](folder, tmp_path / "again", config=config, callbacks=[Stops()]))
    again = trained(MAKE[kind](folder, tmp_path / "again", config=config), resume=str(tmp_path / "again/checkpoint-2"))
    assert logs(again) == logs(whole)
    for trainer in (whole, again):
        trainer.save_model()
    weights = [(tmp_path / name / "model.safetensors").read_bytes() for name in ("whole", "again")]
    assert weights[0] == weights[1]


@usual("online")
@KINDS
def test_layouts_give_the_same_losses(kind, folder, tmp_path, caplog):
    with caplog.at_level("INFO", "trl_jax"):
        found = {
            layout: logged(
                trained(MAKE[kind](folder, tmp_path / layout, config={"batch_layout": layout, "log_level": "info"}))
            )
            for layout in ("padded", "shared", *(("packed",) if THOROUGH else ()))
        }
    for losses in found.values():
        assert losses == pytest.approx(found["padded"], abs=2e-5)
    assert max(map(abs, found["padded"])) > 1e-3


# Adapters and export.


@only_thorough
@KINDS
def test_an_adapter_trains(kind, folder, tmp_path):
    trainer = MAKE[kind](folder, tmp_path, peft_config=LORA)
    base = {path: np.array(array) for path, array in trainer.model.frozen.items()}
    adapter = {path: np.array(array) for path, array in trainer.model.params.items() if path not in base}
    trained(trainer)
    assert base and all(np.array_equal(array, trainer.model.frozen[path]) for path, array in base.items())
    assert any(not np.array_equal(array, trainer.model.params[path]) for path, array in adapter.items())
    trainer.save_model()
    assert load_file(tmp_path / "adapter_model.safetensors")


def test_transformers_computes_the_same_logits(folder, tmp_path):
    import torch
    from transformers import AutoModelForCausalLM

    trainer = trained(pair_trainer(folder, tmp_path))
    trainer.save_model()
    ids = np.array([[5, 9, 20, 33, 7]])
    model = AutoModelForCausalLM.from_pretrained(tmp_path, dtype=torch.float32)
    theirs = model(torch.tensor(ids)).logits.detach().numpy()
    assert np.asarray(trainer.model(input_ids=ids).logits) == pytest.approx(theirs, abs=1e-4)


# The reference: a model, precomputed, or none.


@only_thorough
def test_precomputed_reference_logps_give_the_same_losses(folder, tmp_path):
    """Without the penalty, whose gradient is discontinuous where policy and reference are equal, so that rounding
    decides."""
    found = []
    for before in (False, True):
        config = {"precompute_ref_log_probs": before, "penalty": 0.0}
        found.append(logged(trained(pair_trainer(folder, tmp_path / str(before), config=config))))
    assert found[0] == pytest.approx(found[1], abs=1e-4)


@dataclass(frozen=True)
class UnreferencedTask(PairTask):
    compared: ClassVar[tuple[str, ...]] = ()

    def loss(self, outputs, batch):
        chosen, rejected = self.answers(outputs, batch)
        gap = (chosen.logps - rejected.logps) / jnp.maximum(chosen.tokens + rejected.tokens, 1)
        return weighted_loss(jnp.square(gap - 1), batch, {"gap": gap})


class UnreferencedTrainer(ReferenceTrainer):
    _name, _tag_names = "Unreferenced", ["unreferenced"]

    def make_task(self):
        return UnreferencedTask(max_length=self.args.max_length)


def test_pairs_train_without_a_reference(folder, tmp_path):
    trainer = trained(pair_trainer(folder, tmp_path, kind=UnreferencedTrainer))
    assert trainer.ref_model is None
    losses, gaps = logged(trainer), logged(trainer, "gap")
    assert losses[-1] < losses[0] and gaps[-1] > gaps[0]


def test_a_reference_that_nothing_is_compared_with_is_refused(folder, tmp_path):
    with pytest.raises(ValueError, match=re.escape("ref_model was set, but UnreferencedTask has compared = ()")):
        pair_trainer(folder, tmp_path, kind=UnreferencedTrainer, ref_model=folder)
    with pytest.raises(ValueError, match="precompute_ref_log_probs was set"):
        pair_trainer(folder, tmp_path, kind=UnreferencedTrainer, config={"precompute_ref_log_probs": True})


class ComparesNothing(DpoPositiveTask):
    compared = ()


class WrongTrainer(DpoPositiveTrainer):
    def make_task(self):
        return ComparesNothing()


def test_log_ratio_without_a_reference_is_refused(folder, tmp_path):
    with pytest.raises(ValueError, match="log_ratio needs a reference"):
        trained(pair_trainer(folder, tmp_path, kind=WrongTrainer))


class BareConfigTrainer(UnreferencedTrainer):
    config_class = BaseConfig


def test_a_config_without_the_fields_is_refused(folder, tmp_path):
    args = BaseConfig(str(tmp_path), report_to="none")
    with pytest.raises(TypeError, match="BareConfigTrainer is BaseConfig, which has no field router_aux_loss_coef"):
        BareConfigTrainer(folder, args=args, train_dataset=Dataset.from_list(ROWS))


# A task over single texts.


@dataclass(frozen=True)
class FocalTask(TextTask):
    """Tokens that the model already predicts well get less weight."""

    gamma: float = 2.0

    def token_losses(self, outputs, batch):
        return -((1 - jnp.exp(outputs.logps)) ** self.gamma) * outputs.logps


@dataclass
class FocalConfig(BaseConfig):
    max_length: int | None = 64
    disable_dropout: bool = True
    gamma: float = field(default=2.0)


class FocalTrainer(BaseTrainer):
    _name, _tag_names = "Focal", ["focal"]
    config_class = FocalConfig

    def make_task(self):
        return FocalTask(gamma=self.args.gamma)


def test_single_texts_train_in_every_layout(folder, tmp_path):
    rows = [{"prompt": row["prompt"], "completion": row["chosen"]} for row in ROWS]
    found = [
        logged(
            trained(pair_trainer(folder, tmp_path / one, kind=FocalTrainer, config={"batch_layout": one}, rows=rows))
        )
        for one in ("padded", "packed")
    ]
    assert found[0] == pytest.approx(found[1], abs=2e-5) and found[0][-1] < found[0][0]
    plain = trained(
        pair_trainer(folder, tmp_path / "plain", kind=FocalTrainer, config={"gamma": 0.0, "max_steps": 1}, rows=rows)
    )
    args = trl_jax.SFTConfig(str(tmp_path / "sft"), **PAIRS | {"max_steps": 1, "max_length": 64})
    sft = trained(trl_jax.SFTTrainer(folder, args=args, train_dataset=Dataset.from_list(rows)))
    assert logged(plain) == pytest.approx(logged(sft), abs=1e-6)  # gamma=0 is the cross-entropy


# Two devices.


@only_thorough
@KINDS
def test_it_trains_on_two_devices(kind, folder, tmp_path):
    ours = trained(MAKE[kind](folder, tmp_path / "one"))
    command = [
        sys.executable,
        "-m",
        "compat_tests.light",
        "compat_tests.tasks.test_public_tasks",
        kind,
        folder,
        str(tmp_path / "two"),
    ]
    environment = {**os.environ, "PYTHONPATH": str(ROOT)}
    done = subprocess.run(command, cwd=ROOT, capture_output=True, text=True, env=environment)
    assert done.returncode == 0, done.stderr[-3000:]
    [shown] = re.findall(r"^losses (.+)$", done.stdout, flags=re.M)
    found = list(map(float, shown.split()))
    # Each TRL process samples with its own seed, so completions differ on two devices.
    assert (
        found[:1] == pytest.approx(logged(ours)[:1], abs=1e-5)
        if kind == "online"
        else found == pytest.approx(logged(ours), abs=1e-5)
    )


def on_two_devices(kind: str, folder: str, out: str) -> None:
    import jax

    jax.config.update("jax_num_cpu_devices", 2)
    size = PAIRS if kind == "pairs" else ONLINE
    config = {"mesh_shape": "fsdp:2", "per_device_train_batch_size": size["per_device_train_batch_size"] // 2}
    trainer = trained(MAKE[kind](folder, out, config=config | {"fsdp_config": {"min_num_params": 1}}))
    assert trainer.sharding_plan.shards == 2
    print("losses", *logged(trainer))


if __name__ == "__main__":
    on_two_devices(*sys.argv[1:])
