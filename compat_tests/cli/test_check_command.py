"""`trl-jax check`: what it reports about a script is true when the script runs."""

from __future__ import annotations

import os

import jax
import pytest

from compat_tests.pages import ROOT
from trl_jax.cli.check import findings
from trl_jax.cli.main import main
from trl_jax.cli.reading import read

SCRIPT = """
import os
import torch
import trl
import trl_jax.tasks as tasks
from trl import OnlineDPOConfig, PPOConfig, PPOTrainer, RewardTrainr, SFTConfig, SFTTrainer, setup_chat_format
from trl.trainer.utils import get_peft_config, split_tensor_dict
from trl_jax.tasks import Batch

class Mine(SFTTrainer):
    def compute_loss(self, model, inputs, return_outputs=False, **how):
        return torch.nn.functional.cross_entropy(model(**inputs).logits, 1)
    def evaluation_loop(self, *args): ...
    def helper(self): ...

args = SFTConfig("out", max_seq_length=32, optim="lomo", learing_rate=1e-3, packing=os.environ.get("P"), bf16=True,
    wrong=os.getcwd(), torch_dtype=os.getcwd(), optim_target_modules=os.getcwd(), packing_strategy="wrapped",
    use_liger_kernel=True, warmup_ratio=0.1, warmup_steps=0.1)
PPOTrainer()
trl.SFTTrainer("m", args=args, tokenizer=None, max_seq_length=2, dataset_text_fild=3, peft_config=None, packing=True)
"""
WORKS, CHANGED, REFUSED = "works", "changed", "refused"
WANTED = {
    "trl.SFTConfig": (WORKS, ""), "trl.setup_chat_format": (WORKS, ""),
    "trl.OnlineDPOConfig": (REFUSED, "OnlineDPOConfig is in trl_jax.experimental.online_dpo, because TRL only has it"),
    "trl.PPOConfig": (CHANGED, "but not used: trl_jax does not implement it. Closest: GRPOTrainer"),
    "trl.PPOTrainer": (REFUSED, "does not implement it"),
    "trl.RewardTrainr": (REFUSED, "did you mean RewardTrainer?"),
    "trl.trainer.utils.get_peft_config": (WORKS, ""),
    "trl.trainer.utils.split_tensor_dict": (CHANGED, "the installed trl"),
    "trl_jax.tasks.Batch": (WORKS, ""),
    "Mine.compute_loss": (CHANGED, "It uses torch"), "Mine.helper": (WORKS, ""),
    "Mine.evaluation_loop": (REFUSED, "which trl_jax never calls"),
    "SFTConfig(max_seq_length=32)": (CHANGED, "use max_length"), "SFTConfig(bf16=True)": (WORKS, ""),
    "SFTConfig(optim='lomo')": (REFUSED, "the closest supported optimizer is adafactor"),
    "SFTConfig(learing_rate=0.001)": (REFUSED, "did you mean learning_rate?"),
    "SFTConfig(use_liger_kernel=True)": (CHANGED, "has no effect in trl_jax"),
    "SFTConfig(packing_strategy='wrapped')": (WORKS, ""), "SFTConfig(packing=...)": (WORKS, ""),
    "SFTConfig(wrong=...)": (REFUSED, "SFTConfig has no argument 'wrong'"),
    "SFTConfig(torch_dtype=...)": (CHANGED, "An old name: use dtype."),
    "SFTConfig(optim_target_modules=...)": (CHANGED, "Refused unless it has its default value: it is for GaLore"),
    "SFTConfig(warmup_ratio=0.1)": (CHANGED, "use warmup_steps"), "SFTConfig(warmup_steps=0.1)": (WORKS, ""),
    "SFTConfig(output_dir='out')": (WORKS, ""), "SFTTrainer(model=...)": (WORKS, ""),
    "trl.SFTTrainer": (WORKS, ""), "SFTTrainer(args=...)": (WORKS, ""), "SFTTrainer(peft_config=...)": (WORKS, ""),
    "SFTTrainer(tokenizer=...)": (CHANGED, "pass it as processing_class"),
    "SFTTrainer(max_seq_length=...)": (CHANGED, "use max_length"),
    "SFTTrainer(packing=...)": (CHANGED, "Now an argument of SFTConfig."),
    "SFTTrainer(dataset_text_fild=...)": (REFUSED, "SFTTrainer has no argument 'dataset_text_fild'"),
}  # fmt: skip


def test_every_use_gets_its_finding():
    found = {one.what: (one.kind, one.text) for one in findings(read(SCRIPT))}
    assert found.keys() == WANTED.keys()
    for what, (kind, text) in WANTED.items():
        assert found[what][0] == kind and text in found[what][1], (what, found[what])


USER_METHODS = """
import jax.numpy as jnp
import torch
from trl import DPOTrainer, GRPOTrainer, SFTTrainer
from trl.experimental.distillation import DistillationTrainer

class Surrogate(GRPOTrainer):
    def _compute_loss(self, model, inputs):
        logps, _, _ = self._get_per_token_logps_and_entropies(model, inputs["prompt_ids"], None, 4)
        self._metrics["train"]["logps"].append(self.accelerator.gather(logps.mean()))
        return super()._compute_loss(model, inputs) / self.current_gradient_accumulation_steps
    def _calculate_rewards(self, inputs, prompts, completions, completion_ids_list):
        return torch.clamp(super()._calculate_rewards(inputs, prompts, completions, completion_ids_list), max=1)
    def _generate_and_score_completions(self, inputs):
        return super()._generate_and_score_completions(inputs)
    def _generate_single_turn(self, prompt_ids): ...
    def prediction_step(self, model, inputs, prediction_loss_only, ignore_keys=None):
        return torch.zeros(1), None, None

class Old(SFTTrainer):
    def compute_loss(self, model, inputs, return_outputs=False):
        return model(**inputs).loss
    def create_optimizer(self):
        return torch.optim.Adamax(self.model.parameters())

class Recorded(GRPOTrainer):
    def compute_loss(self, model, inputs, return_outputs=False, num_items_in_batch=None):
        print(inputs["advantages"].detach())
        return super().compute_loss(model, inputs)

class Groups(SFTTrainer):
    def prediction_step(self, model, inputs, prediction_loss_only, ignore_keys=None):
        return torch.zeros(1), None, None
    def create_optimizer(self):
        return torch.optim.AdamW([{"params": list(self.model.parameters()), "lr": 1e-5}])
    def get_decay_parameter_names(self, model): ...
    def training_step(self, *given): ...
    def _get_train_sampler(self, *given): ...

class Pairs(DPOTrainer):
    def compute_loss(self, model, inputs, return_outputs=False, num_items_in_batch=None):
        return torch.sigmoid(model(**inputs).log_probs).mean()
    def _compute_loss(self, model, inputs, return_outputs):
        return jnp.mean(model(**inputs).log_probs)

class Calling(GRPOTrainer):
    def _compute_loss(self, model, inputs):
        return torch.mean(model(inputs["prompt_ids"]).logits)
    def compute_loss(self, model, inputs, return_outputs=False, num_items_in_batch=None):
        torch.zeros(1).backward()

class CallingOwn(GRPOTrainer):
    def _compute_loss(self, model, inputs):
        return torch.mean(self.model(inputs["prompt_ids"]).logits)

class Compared(DPOTrainer):
    def _compute_loss(self, model, inputs, return_outputs):
        return torch.mean(self.ref_model(**inputs).logits)
    def compute_loss(self, model, inputs, return_outputs=False, num_items_in_batch=None):
        return sum(one.sum() for one in self.model.parameters())

class Taught(DistillationTrainer):
    def _compute_loss(self, unwrapped_student, inputs, num_items_in_batch):
        return torch.zeros(1), torch.zeros(1), torch.zeros(1)

trainer = Surrogate("m", None)
trainer._calculate_rewards = None
"""


def test_methods_that_a_subclass_may_override_are_known():
    found = {one.what: one.kind for one in findings(read(USER_METHODS)) if not one.what.startswith("trl.")}
    assert found == {
        "Surrogate._compute_loss": WORKS, "Surrogate._calculate_rewards": WORKS, "Pairs._compute_loss": WORKS,
        "Surrogate.prediction_step": REFUSED, "Old.compute_loss": REFUSED,
        "Surrogate._generate_and_score_completions": WORKS, "Surrogate._generate_single_turn": REFUSED,
        "Pairs.compute_loss": CHANGED, "Surrogate._calculate_rewards = ...": REFUSED,
        "Calling._compute_loss": CHANGED, "Calling.compute_loss": REFUSED, "Compared._compute_loss": REFUSED,
        "CallingOwn._compute_loss": REFUSED,
        "Compared.compute_loss": REFUSED, "Recorded.compute_loss": CHANGED, "Taught._compute_loss": REFUSED,
        "Groups.prediction_step": CHANGED, "Groups.create_optimizer": WORKS, "Old.create_optimizer": REFUSED,
        "Groups.get_decay_parameter_names": WORKS, "Groups.training_step": WORKS, "Groups._get_train_sampler": WORKS,
    } | {name: kind for name, kind in found.items() if name.startswith("Surrogate(")}  # fmt: skip


def test_arguments_of_unknown_values_keep_the_order_of_the_script():
    names = "seed output_dir num_train_epochs learning_rate max_steps logging_steps save_steps eval_steps".split()
    script = f"import os\nfrom trl import SFTConfig\nSFTConfig({', '.join(f'{name}=os.getpid()' for name in names)})"
    found = [finding.what for finding in findings(read(script)) if "=..." in finding.what]
    assert found == [f"SFTConfig({name}=...)" for name in names]


def test_arguments_that_only_hold_together():
    refused = findings(read("from trl import SFTConfig\nSFTConfig(eval_strategy='steps', load_best_model_at_end=True, "
                            "save_strategy='epoch')"))  # fmt: skip
    assert any(one.kind == REFUSED and "load_best_model_at_end" in one.text for one in refused)
    fine = findings(read("from trl import SFTConfig\nSFTConfig(eval_strategy='steps', save_strategy='steps', "
                         "load_best_model_at_end=True)"))  # fmt: skip
    assert {one.kind for one in fine} == {WORKS}


POLICIES = """
from trl import GRPOConfig, GRPOTrainer, RLOOTrainer
RLOOTrainer(config=None, policy=None, ref_policy=None, reward_model=None, data_collator=None)
GRPOTrainer("m", args=GRPOConfig("out", per_device_train_batch_size=1, gradient_accumulation_steps=8, use_vllm=True),
    tools=[len], environment_factory=len)
"""


def test_arguments_of_policies():
    found = {one.what: (one.kind, one.text) for one in findings(read(POLICIES))}
    old = [text for what, (kind, text) in found.items() if what.startswith("RLOOTrainer(") and kind == CHANGED]
    assert len(old) == 5 and "An old name: use reward_funcs." in old
    assert found["GRPOTrainer(tools=...)"] == found["GRPOTrainer(environment_factory=...)"] == (WORKS, "")
    assert found["GRPOConfig(per_device_train_batch_size=1)"] == (WORKS, "")
    assert "own generator" in found["GRPOConfig(use_vllm=True)"][1]


@pytest.mark.parametrize("name, verdict", [
    (
        "compat_tests/scripts/old_keywords.py",
        "The script runs unchanged, if its data and checkpoints fit; 6 of 20 behave differently here.",
    ),
    ("examples/reward.py", "The script runs unchanged, if its data and checkpoints fit."),
    ("compat_tests/pages.py", "The script uses nothing from trl."),
])  # fmt: skip
def test_scripts_that_run(name, verdict, capsys):
    assert main(["check", str(ROOT / name)]) == 0
    assert capsys.readouterr().out.splitlines()[-1] == verdict


def test_no_run_is_joined_and_no_process_ends(monkeypatch):
    for name, value in {
        "JAX_COORDINATOR_ADDRESS": "localhost:9", "JAX_NUM_PROCESSES": "2", "JAX_PROCESS_ID": "1", "SLURM_NTASKS": "2",
        "RANK": "1", "LOCAL_RANK": "1", "WORLD_SIZE": "2", "LOCAL_WORLD_SIZE": "2",
    }.items():  # fmt: skip
        monkeypatch.setenv(name, value)
    monkeypatch.setattr(jax.distributed, "initialize", lambda *given, **options: pytest.fail("joined a run"))
    monkeypatch.setattr(jax, "devices", lambda *given: pytest.fail("asked for devices"))
    found = findings(read("""
from trl import DistillationConfig, GRPOConfig, RLOOConfig
GRPOConfig(num_generations=8, per_device_train_batch_size=1, coordinator_address="localhost:9", num_processes=2,
    process_id=1)
RLOOConfig(num_generations=1)
RLOOConfig(generation_batch_size=8, steps_per_generation=2)
DistillationConfig(temperature=2.0)
"""))  # fmt: skip
    refused = {one.what: one.text for one in found if one.kind == REFUSED}
    assert set(refused) == {"RLOOConfig(num_generations=1)", "RLOOConfig(...)"}, refused
    assert "requires at least 2 generations" in refused["RLOOConfig(num_generations=1)"]
    assert "can not be both configured" in refused["RLOOConfig(...)"]
    assert os.environ["WORLD_SIZE"] == "2"


@pytest.mark.parametrize("text", [
    "x = " + " + ".join(["'a'"] * 400), "import os; x = os" + ".a" * 400, "SFTConfig(seed=" + "-" * 80 + "1)",
    "SFTConfig(max_length=" + "[" * 80 + "]" * 80 + ")",
])  # fmt: skip
def test_deep_expressions(text, tmp_path, capsys):
    (tmp_path / "deep.py").write_text(f"import trl\nfrom trl import SFTConfig\n{text}\n")
    assert main(["check", str(tmp_path / "deep.py")]) == 0
    assert capsys.readouterr().out.splitlines()[-1] == "The script runs unchanged, if its data and checkpoints fit."


def test_expressions_too_deep_for_python_are_an_error_in_one_line(tmp_path, capsys):
    (tmp_path / "deep.py").write_text("x = a" + ".b" * 100_000)
    assert main(["check", str(tmp_path / "deep.py")]) == 2
    assert capsys.readouterr().err.count("\n") == 1


def test_neither_control_characters_nor_tokens_are_printed(tmp_path, capsys):
    token, escape = "hf_" + "a1" * 17, "\x1b[31m"
    (tmp_path / "it.py").write_text(f"from trl import SFTConfig\nSFTConfig(optim='{escape}{token}', {token}=1)\n")
    assert main(["check", str(tmp_path / "it.py")]) == 0
    assert main(["check", f"{escape} {token}"]) == 2
    (tmp_path / f"{escape}{token}.py").write_text("no python")
    assert main(["check", str(tmp_path / f"{escape}{token}.py")]) == 2
    for line in (["check", "a", f"{escape} {token}"], [f"{escape} {token}"], ["env", f"{escape} {token}"]):
        with pytest.raises(SystemExit):
            main(line)
    said = "".join(capsys.readouterr())
    assert token not in said and escape not in said and said.count("<SECRET>") >= 6, said


def test_no_script(tmp_path, capsys):
    assert main(["check", str(tmp_path / "none.py")]) == 2
    (tmp_path / "text.py").write_text("no python")
    assert main(["check", str(tmp_path / "text.py")]) == 2
    assert "is not valid Python" in capsys.readouterr().err


COLLATE = """
from functools import partial
from transformers import DataCollatorForLanguageModeling
from trl import SFTTrainer
from trl.trainer.sft_trainer import DataCollatorForVisionLanguageModeling
class Collator:
    def __call__(self, examples): ...
def collate_fn(examples): ...
ready, own = DataCollatorForVisionLanguageModeling(processor), Collator()
mine = Collator()
good = DataCollatorForVisionLanguageModeling(processor)
SFTTrainer("m", data_collator=collate_fn)
SFTTrainer("m", data_collator=mine)
SFTTrainer("m", data_collator=partial(collate_fn, processor=None))
SFTTrainer("m", data_collator=lambda examples: examples)
SFTTrainer("m", data_collator=DataCollatorForLanguageModeling(tokenizer, mlm=False))
SFTTrainer("m", data_collator=good)
SFTTrainer("m", data_collator=DataCollatorForVisionLanguageModeling(processor))
SFTTrainer("m", data_collator=lambda examples: processor(images=[one["image"] for one in examples]))
"""


def test_collate_functions_of_a_script():
    found = [one for one in findings(read(COLLATE)) if one.what == "SFTTrainer(data_collator=...)"]
    assert [one.kind for one in found] == [CHANGED] * 5 + [WORKS] * 2 + [REFUSED]
    assert all("for each row on its own" in one.text for one in found if one.kind == CHANGED)
    assert "train on the columns directly" in found[-1].text


def test_a_trainer_of_trls_experimental_package():
    found = {one.what: one.kind for one in findings(read("""
from trl.experimental.gkd import GKDConfig, GKDTrainer
from trl.experimental.online_dpo import OnlineDPOConfig, OnlineDPOTrainer
from trl import GKDTrainer as Absent
GKDTrainer("m", "t", GKDConfig("out", lmbda=0.3, packing=True), seq_kd=True)
OnlineDPOTrainer("m", reward_funcs=[], args=OnlineDPOConfig("out", beta=[0.1, 0.2], use_vllm=True, vllm_mode="server"))
"""))}  # fmt: skip
    assert found == {
        "trl.experimental.gkd.GKDConfig": WORKS, "trl.experimental.gkd.GKDTrainer": WORKS,
        "trl.GKDTrainer": REFUSED, "GKDConfig(lmbda=0.3)": WORKS, "GKDConfig(packing=True)": REFUSED,
        "GKDTrainer(seq_kd=...)": REFUSED,  # belongs in the config
        "GKDConfig(output_dir='out')": WORKS, "GKDTrainer(model=...)": WORKS, "GKDTrainer(args=...)": WORKS,
        "GKDTrainer(teacher_model=...)": WORKS,
        "trl.experimental.online_dpo.OnlineDPOConfig": WORKS, "trl.experimental.online_dpo.OnlineDPOTrainer": WORKS,
        "OnlineDPOTrainer(model=...)": WORKS, "OnlineDPOTrainer(reward_funcs=...)": WORKS,
        "OnlineDPOTrainer(args=...)": WORKS, "OnlineDPOConfig(output_dir='out')": WORKS,
        "OnlineDPOConfig(beta=[0.1, 0.2])": WORKS, "OnlineDPOConfig(use_vllm=True)": CHANGED,
        "OnlineDPOConfig(vllm_mode='server')": WORKS, "OnlineDPOConfig(...)": REFUSED,
    }  # fmt: skip


def test_async_grpo():
    found = {one.what: one.kind for one in findings(read("""
from trl.experimental.async_grpo import AsyncGRPOConfig, AsyncGRPOTrainer
args = AsyncGRPOConfig("out", max_staleness=2, token_budget=4096, beta=0.1)
AsyncGRPOTrainer("m", len, args, rollout_worker=object())
"""))}  # fmt: skip
    start = "trl.experimental.async_grpo."
    wanted = {f"{start}AsyncGRPOConfig": WORKS, f"{start}AsyncGRPOTrainer": WORKS,
              "AsyncGRPOConfig(max_staleness=2)": WORKS, "AsyncGRPOConfig(token_budget=4096)": REFUSED,
              "AsyncGRPOConfig(beta=0.1)": REFUSED}  # fmt: skip
    assert wanted.items() <= found.items()
