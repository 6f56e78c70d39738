"""`import trl_jax`: it is fast, every public name exists, and errors for TRL's other names say that they do not."""

from __future__ import annotations

import ast
import importlib
import re
import subprocess
import sys
from dataclasses import dataclass
from pathlib import Path

import pytest

import trl_jax
import trl_jax.trainer
from compat_tests.effort import only_thorough
from trl_jax.cli.main import COMMANDS
from trl_jax.cli.trl_alias import MODULES
from trl_jax.core.trainers import NEAR, TRAINERS

HEAVY = (
    "jax",
    "flax",
    "optax",
    "torch",
    "transformers",
    "datasets",
    "safetensors",
    "trl",
    "peft",
    "accelerate",
)


def fresh(code: str) -> str:
    """The output of the code in a fresh Python process."""
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True)
    return done.stdout.strip()


UNCHANGED = """
import logging
from types import ModuleType

import datasets
import jax
import transformers
from transformers import Trainer, TrainerCallback, TrainingArguments

watched = [Trainer, TrainerCallback, TrainingArguments, jax, jax.numpy, jax.lax, jax.nn, datasets, datasets.Dataset]
before = [dict(vars(one)) for one in watched]
filters = list(logging.getLogger("transformers").filters)
import trl_jax
from trl_jax.core.trainers import EXPERIMENTAL, TRAINERS

for names in (*TRAINERS.values(), *EXPERIMENTAL.values()):
    names.load_trainer()
for one, old in zip(watched, before):
    now = vars(one)
    changed = [name for name in now if name not in old and not isinstance(now[name], ModuleType)]
    changed += [name for name in old if name not in now or now[name] is not old[name]]
    print(one.__name__, *changed)
print(len(logging.getLogger("transformers").filters) - len(filters))
"""


def test_trainers_change_nothing_in_other_libraries():
    """Except for one filter, which hides transformers' line that PyTorch was not found."""
    *told, filters = fresh(UNCHANGED).splitlines()
    names = "Trainer TrainerCallback TrainingArguments jax jax.numpy jax.lax jax.nn datasets Dataset"
    assert told == names.split() and filters == "1"


# Few models need these modules, so they are imported with the first one that does.
OF_FEW = ("trl_jax.exported.aten", "trl_jax.exported.program")
OF_OLD_SCRIPTS = ("trl_jax.legacy.collators", "trl_jax.legacy.policy")


@pytest.fixture(scope="module")
def loaded(checkpoint):
    """Which of all those modules are loaded after each of these consecutive statements in one process."""
    model = f"trl_jax.AutoModelForCausalLM.from_pretrained({str(checkpoint(head='causal'))!r})"
    statements = {
        "door": "import trl_jax; dir(trl_jax); trl_jax.__version__",
        "configuration": "from trl_jax import RewardConfig",
        "model": f"trl_jax.DPOTrainer; {model}",
        "trainers": f"from trl_jax import {', '.join(names.trainer for names in TRAINERS.values())}",
        "old": "trl_jax.DataCollatorForCompletionOnlyLM",
    }
    tell = f"print('loaded', *[name for name in {HEAVY + OF_FEW + OF_OLD_SCRIPTS} if name in sys.modules])"
    told = fresh("import sys\n" + "".join(f"{statement}\n{tell}\n" for statement in statements.values()))
    names = [set(line.split()[1:]) for line in told.splitlines() if line.startswith("loaded")]
    return dict(zip(statements, names, strict=True))


def test_importing_the_door_loads_nothing(loaded):
    assert loaded["door"] == set()


def test_a_configuration_loads_no_part_of_the_engine(loaded):
    """transformers itself imports torch if it is installed."""
    assert "transformers" in loaded["configuration"]
    assert not loaded["configuration"] & {"jax", "flax", "optax", "trl"}


def test_a_trainer_loads_nothing_of_exported_programs(loaded):
    assert "jax" in loaded["model"] and not loaded["model"] & set(OF_FEW)


def test_trainers_load_what_old_scripts_need_when_one_uses_it(loaded):
    assert not loaded["trainers"] & set(OF_OLD_SCRIPTS) and "trl_jax.legacy.collators" in loaded["old"]


@pytest.mark.parametrize("name", trl_jax.__all__)
def test_every_name_is_there(name):
    value = getattr(trl_jax, name)
    assert value.__name__ == name and name in dir(trl_jax)
    assert value.__module__.startswith("trl_jax.")


def test_the_door_keeps_what_it_fetched():
    assert trl_jax.RewardConfig is trl_jax.RewardConfig
    assert "RewardConfig" in vars(trl_jax)


@only_thorough
def test_from_door_import_star():
    names = fresh("from trl_jax import *; print(RewardTrainer.__name__, pairwise_loss.__name__)")
    assert names == "RewardTrainer pairwise_loss"


def test_every_name_on_trls_door_is_ours_or_says_that_it_is_not_here_when_it_is_used():
    trl = pytest.importorskip("trl")
    theirs = {name for names in trl._import_structure.values() for name in names}
    assert {"RewardTrainer", "DistillationTrainer"} <= theirs
    for name in sorted(theirs - set(trl_jax.__all__)):
        with pytest.raises(NotImplementedError, match=f"^TRL's {name} is not implemented in trl_jax"):
            getattr(trl_jax, name)("out")


def test_names_are_where_trl_has_them():
    from trl_jax.experimental.cpo.cpo_trainer import CPOTrainer
    from trl_jax.experimental.distillation import DistillationTrainer
    from trl_jax.experimental.gkd import GKDConfig
    from trl_jax.experimental.kto import KTOConfig
    from trl_jax.experimental.online_dpo.online_dpo_trainer import OnlineDPOTrainer
    from trl_jax.models import create_reference_model
    from trl_jax.trainer.callbacks import SyncRefModelCallback

    assert CPOTrainer is trl_jax.CPOTrainer and DistillationTrainer is trl_jax.DistillationTrainer
    assert GKDConfig.__module__ == "trl_jax.trainer.gkd_config"
    assert OnlineDPOTrainer.__module__ == "trl_jax.trainer.online_dpo_trainer"
    assert KTOConfig is trl_jax.KTOConfig and create_reference_model is trl_jax.create_reference_model
    with pytest.raises(NotImplementedError, match="sync_ref_model=True"):
        SyncRefModelCallback()
    with pytest.raises(AttributeError):
        trl_jax.trainer.callbacks.Frobnicate  # noqa: B018
    with pytest.raises(
        ImportError, match="GKDTrainer is in trl_jax.experimental.gkd, because TRL only has it in trl.experim"
    ):
        trl_jax.GKDTrainer  # noqa: B018
    for name in ("IWOPDConfig", "A2POTrainer"):
        with pytest.raises(ImportError, match=f"{name} is not implemented in trl_jax. .* trl.experimental"):
            getattr(trl_jax, name)


def test_a_script_that_mentions_a_trainer_of_trls_and_never_uses_it_goes_on():
    from transformers import HfArgumentParser

    from trl_jax import PPOConfig, PPOTrainer
    from trl_jax.trainer.sft_config import SFTConfig

    assert not isinstance(SFTConfig("out"), PPOConfig) and PPOTrainer.__name__ == "PPOTrainer"
    said = "^TRL's PPOConfig is not implemented in trl_jax. Closest: GRPOTrainer or RLOOTrainer, which train"
    with pytest.raises(NotImplementedError, match=said):
        PPOConfig("out", kl_coef=0.1)
    with pytest.raises(NotImplementedError, match=said):
        HfArgumentParser(PPOConfig)
    mine = dataclass(type("Mine", (PPOConfig,), {"__annotations__": {"beta": float}, "beta": 0.1}))
    for use in (lambda: mine("out"), lambda: HfArgumentParser(mine)):
        with pytest.raises(NotImplementedError, match=said):
            use()
    own = type("Mine", (PPOTrainer,), {})
    with pytest.raises(NotImplementedError, match="^TRL's PPOTrainer"):
        own.from_pretrained("model")


def test_editors_see_the_names_that_are_there():
    """The imports for type checkers match the table of lazy imports."""
    tree = ast.parse(Path(trl_jax.__file__).read_text())
    [block] = [node for node in tree.body if isinstance(node, ast.If) and ast.unparse(node.test) == "TYPE_CHECKING"]
    assert {name.name: found.module for found in block.body for name in found.names} == trl_jax._WHERE


@pytest.mark.parametrize("names", TRAINERS.values(), ids=list(TRAINERS))
def test_a_trainer_of_the_table_is_behind_every_door(names):
    assert COMMANDS[names.command] == names.summary
    assert {"main", "make_parser"} <= vars(importlib.import_module(f"trl_jax.scripts.{names.command}")).keys()
    for name, module in names.where.items():
        kind = getattr(trl_jax, name)
        assert kind is names.load(name) is getattr(trl_jax.trainer, name) and kind.__module__ == module
        assert MODULES[module.replace("trl_jax", "trl")][0] == module
    assert names.load_trainer().config_class is names.load_config()


def test_a_trainers_script_runs_as_a_module():
    run = [sys.executable, "-m", "compat_tests.light", "trl_jax.scripts.rloo", "--help"]
    told = subprocess.run(run, capture_output=True, text=True, check=True).stdout
    assert told.startswith("usage: python -m trl_jax.scripts.rloo ") and "trl-jax rloo --model_name_or_path" in told


def test_a_script_of_no_trainer():
    with pytest.raises(ModuleNotFoundError, match="trl_jax.scripts.ppo"):
        importlib.import_module("trl_jax.scripts.ppo")


def test_the_scripts_of_online_trainers_name_their_arguments():
    from trl_jax.scripts import dpo, grpo

    assert grpo.GRPOScriptArguments(reward_funcs=["accuracy_reward"]).dataset_name is None
    assert "GRPOScriptArguments" not in vars(dpo)


def test_no_name_is_both_here_and_a_placeholder():
    assert not NEAR.keys() & set(trl_jax.__all__)


@pytest.mark.parametrize(("module", "name"), [
    ("data_utils", "is_conversational"), ("chat_template_utils", "clone_chat_template"), ("trainer", "SFTTrainer"),
    ("rewards", "think_format_reward"),
])  # fmt: skip
def test_trls_modules_are_attributes(module, name):
    assert getattr(trl_jax.__getattr__(module), name).__name__ == name


def test_every_name_of_trls_door_is_here():
    trl = pytest.importorskip("trl")
    # A package of ours, after it is imported.
    assert {name for name in trl.__all__ if not hasattr(trl_jax, name)} <= {"models"}


def test_an_unknown_name():
    with pytest.raises(AttributeError, match="^module 'trl_jax' has no attribute 'RewardTrainr'"):
        _ = trl_jax.RewardTrainr
    assert "__wrapped__" not in dir(trl_jax)


@pytest.mark.parametrize(
    ("module", "name"),
    [
        ("trainer.reward_trainer", "RewardTrainer"),
        ("trainer.reward_config", "RewardConfig"),
        ("trainer.model_config", "ModelConfig"),
        ("scripts.utils", "ScriptArguments"),
        ("scripts.utils", "TrlParser"),
    ],
)
def test_trls_dotted_paths(module, name):
    theirs = pytest.importorskip(f"trl.{module}")
    ours = __import__(f"trl_jax.{module}", fromlist=[name])
    assert getattr(theirs, name).__name__ == name
    assert getattr(ours, name) is getattr(trl_jax, name)


def test_the_version():
    assert re.fullmatch(r"\d+\.\d+\.\d+", trl_jax.__version__)
