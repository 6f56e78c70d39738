"""GKD against TRL: each completion, each logged number, and the final weights."""

from __future__ import annotations

import json
import random

import numpy as np
import pytest
from datasets import Dataset

from compat_tests.effort import usually
from compat_tests.parity.reference import BASE, read_weights, spied_completions
from compat_tests.parity.test_grpo_curve import WEIGHTS, assert_same, timeless
from compat_tests.tiny import text_rows, tiny_model, tiny_tokenizer

STUDENT = {"head": "causal", "num_hidden_layers": 1, "hidden_size": 32, "intermediate_size": 48}
ENDS = [1, *range(300, 340)]  # so that some completions end early
ROWS = text_rows(20, "chat", seed=3)
CONFIG = {"learning_rate": 3e-3, "max_new_tokens": 8, "per_device_train_batch_size": 3, "max_steps": 4}
# Two epochs of two steps each, with a smaller last micro-batch, and all three sources of completions.
MIXED = {"seq_kd": True, "gradient_accumulation_steps": 4, "eval_strategy": "steps", "eval_steps": 2, "max_length": 50}
CASES = {
    "mixed": MIXED,
    "on-policy adapter": {"lmbda": 1.0, "beta": 1.0, "temperature": 1.0, "lora": True},
    "off-policy": {"lmbda": 0.0, "beta": 0.0, "prompts": True},
}


@pytest.fixture(scope="module")
def folders(tmp_path_factory):
    """The folders of the student and the teacher."""
    made = [tmp_path_factory.mktemp(name) for name in ("student", "teacher")]
    for seed, folder in enumerate(made):
        facts = STUDENT | {"tokenizer": {"chat_template": True}, "hidden_size": 32 * (seed + 1)}
        tiny_model(folder, seed=seed, **facts)
        file = folder / "generation_config.json"
        file.write_text(json.dumps(json.loads(file.read_text()) | {"eos_token_id": ENDS}))
    return made


def trainer_of(package, folders, out, *, lora=False, prompts=False, **config):
    """A trainer of trl.experimental.gkd or of trl_jax."""
    from peft import LoraConfig

    student, teacher = map(str, folders)
    rows = ROWS
    if prompts:
        rows = [row | {"prompt": f"user: {row['messages'][0]['content']}</s>\nassistant:"} for row in ROWS]
    adapter = LoraConfig(r=4, lora_alpha=8, target_modules=["q_proj", "v_proj"], task_type="CAUSAL_LM")
    args = package.GKDConfig(str(out), **BASE | CONFIG | config)
    return package.GKDTrainer(
        student, teacher, args, train_dataset=Dataset.from_list(rows), eval_dataset=Dataset.from_list(rows[:4]),
        processing_class=tiny_tokenizer(chat_template=True), peft_config=adapter if lora else None,
    )  # fmt: skip


def run(trainer, written):
    """(logs, weights, completions, Python's next random number)"""
    trainer.train()
    drawn = random.random()
    logs, folder = list(trainer.state.log_history), f"{trainer.args.output_dir}/final"
    trainer.save_model(folder)
    return logs, read_weights(folder), written, drawn


def by_trl(monkeypatch, *given, **config):
    import torch
    from trl.experimental import gkd

    torch.set_num_threads(1)
    written, generate = [], gkd.GKDTrainer.generate_on_policy_outputs

    def spied(*given):
        ids, mask, labels = generate(*given)
        written.append([row[own != -100].tolist() for row, own in zip(ids, labels, strict=True)])
        return ids, mask, labels

    monkeypatch.setattr(gkd.GKDTrainer, "generate_on_policy_outputs", staticmethod(spied))
    return run(trainer_of(gkd, *given, **config), written)


def without_tokens(log):
    return {key: value for key, value in timeless(log).items() if not key.endswith("num_tokens")}


def assert_same_weights(ours, theirs):
    assert ours.keys() == theirs.keys()
    for name, tensor in theirs.items():
        np.testing.assert_allclose(ours[name], tensor, rtol=0, atol=WEIGHTS, err_msg=name)


@pytest.mark.parametrize("name", usually(lambda name: name == "mixed", list(CASES)))
def test_completions_curve_and_weights_are_trls(folders, tmp_path, monkeypatch, name):
    from trl_jax.experimental import gkd

    logs, weights, written, drawn = by_trl(monkeypatch, folders, tmp_path / "theirs", **CASES[name])
    out, resumable = tmp_path / "ours", {"save_strategy": "steps", "save_steps": 1} if name == "mixed" else {}
    made = spied_completions(monkeypatch)
    trainer = trainer_of(gkd, folders, out, **CASES[name], **resumable)
    ours = run(trainer, made)
    assert made == written, "other tokens were drawn"
    assert ours[3] == drawn
    assert len(ours[0]) == len(logs)
    for mine, other in zip(ours[0], logs, strict=True):
        assert_same(without_tokens(mine), without_tokens(other), same_order=True)
        if "loss" in other:
            assert mine["loss"] == pytest.approx(other["loss"], abs=1e-5)
    assert_same_weights(ours[1], weights)
    if name == "off-policy":
        assert not written
        return
    lengths = {len(ids) for batch in written for ids in batch}
    assert len(written) >= 4 and len(lengths) > 3
    if name == "mixed":
        _resumes(gkd, folders, out, ours, made)


def _resumes(gkd, folders, out, whole, made):
    """A run resumed in the middle of its first epoch ends like the uninterrupted one: completions, numbers and
    weights."""
    completions = list(made)
    made.clear()
    trainer = trainer_of(gkd, folders, out, **MIXED, save_strategy="no")
    trainer.train(resume_from_checkpoint=str(out / "checkpoint-1"))
    assert 0 < len(made) < len(completions) and completions[-len(made) :] == made
    steps = [timeless(log) for log in trainer.state.log_history if "loss" in log or "eval_loss" in log]
    assert steps == [timeless(log) for log in whole[0] if "loss" in log or "eval_loss" in log]
    trainer.save_model(str(out / "again"))
    again = read_weights(out / "again")
    for name, tensor in whole[1].items():
        np.testing.assert_array_equal(again[name], tensor, err_msg=name)
