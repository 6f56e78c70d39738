"""Resuming from TRL's checkpoints: the next steps match those of TRL."""

from __future__ import annotations

import importlib
import logging

import pytest
from datasets import Dataset

import trl_jax
from compat_tests.effort import thorough, usual
from compat_tests.mesh.rank import rows_of
from compat_tests.parity.dpo_cases import SMALL
from compat_tests.parity.reference import BASE
from compat_tests.parity.test_dpo_curve import assert_same
from compat_tests.trainer.trainers import FACTS

STEPS = {"max_steps": 4, "learning_rate": 3e-3, "max_length": 64, "save_strategy": "steps", "save_steps": 2}
TASKS = {"Reward": "SEQ_CLS", "SFT": "CAUSAL_LM", "DPO": "CAUSAL_LM", "KTO": "CAUSAL_LM"}
CASES = [
    thorough("SFT", "untied"), thorough("SFT", "tied"), thorough("SFT", "lora"),
    thorough("DPO", "tied"), ("DPO", "lora"), ("KTO", "untied"), ("Reward", "lora"),
]  # fmt: skip


def trained(package, kind, model, out, lora, resume=None):
    args = getattr(package, f"{kind}Config")(str(out), **BASE | STEPS)
    adapter = {}
    if lora:
        peft = importlib.import_module("peft") if package is not trl_jax else trl_jax
        extra = {"modules_to_save": ["score"]} if kind == "Reward" else {}
        adapter = {"peft_config": peft.LoraConfig(r=4, target_modules="all-linear", task_type=TASKS[kind], **extra)}
    rows = Dataset.from_list(rows_of(kind, 16))
    trainer = getattr(package, f"{kind}Trainer")(str(model), args=args, train_dataset=rows, **adapter)
    trainer.train(resume_from_checkpoint=resume)
    return [log for log in trainer.state.log_history if "loss" in log]


@usual("SFT-untied", "SFT-tied", "SFT-lora", "DPO-tied", "KTO-untied", "Reward-lora")
@pytest.mark.parametrize(("kind", "how"), CASES)
def test_the_next_steps_are_trls(kind, how, checkpoint, tmp_path, caplog):
    trl = pytest.importorskip("trl")
    model = checkpoint(**FACTS if kind == "Reward" else SMALL | {"tie": how == "tied"})
    theirs = trained(trl, kind, model, tmp_path / "trl", how == "lora")
    with caplog.at_level(logging.WARNING, logger="trl_jax"):
        ours = trained(trl_jax, kind, model, tmp_path / "ours", how == "lora", str(tmp_path / "trl" / "checkpoint-2"))
    assert [log["step"] for log in ours] == [1, 2, 3, 4]
    assert not [text for text in caplog.messages if "drawn" in text or "restart" in text]
    for mine, other in zip(ours[2:], theirs[2:], strict=True):
        both = [{name: value for name, value in log.items() if name != "num_tokens"} for log in (mine, other)]
        assert_same(*both)
