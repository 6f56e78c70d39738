"""Online DPO against TRL: each completion, each logged number, and the final weights."""

from __future__ import annotations

import json

import numpy as np
import pytest
from datasets import Dataset

from compat_tests.effort import usually
from compat_tests.parity.grpo_cases import length_reward, prompt_rows, vowels
from compat_tests.parity.marks import timeless
from compat_tests.parity.reference import BASE, read_weights, spied_completions
from compat_tests.parity.test_grpo_curve import WEIGHTS
from compat_tests.tiny import tiny_model, tiny_tokenizer

MODEL = {"head": "causal", "num_hidden_layers": 1, "hidden_size": 32, "intermediate_size": 48}
ENDS = [1, *range(300, 340)]  # so that some completions end early
STEPS = {name: value for name, value in BASE.items() if name != "pad_to_multiple_of"}
STEPS |= {"learning_rate": 3e-3, "max_new_tokens": 8, "per_device_train_batch_size": 3, "max_steps": 4}
# Two epochs of two steps; some prompts lose their first tokens.
TEXTS = {
    "gradient_accumulation_steps": 2, "max_length": 18, "missing_eos_penalty": 0.5, "reward_weights": [1.0, 2.0],
    "beta": [0.3], "rewards": [length_reward, vowels], "ends": ENDS, "rows": 12,
}  # fmt: skip
CASES = {
    "texts": TEXTS,
    "chats": {
        "loss_type": "ipo", "beta": [0.5], "top_p": 0.9, "top_k": 50, "temperature": 0.7, "model": True, "lora": True,
        "kind": "chat", "rows": 12,
    },
}  # fmt: skip
# TRL includes the padding after a completion that ends early.
OF_PADDING = ("objective/kl", "objective/entropy", "objective/non_score_reward", "objective/rlhf_reward")


@pytest.fixture(scope="module")
def folders(tmp_path_factory):
    """A policy, the same with more EOS ids, and a reward model."""
    made = [tmp_path_factory.mktemp(name) for name in ("policy", "ending", "reward")]
    for folder in made[:2]:
        tiny_model(folder, **MODEL, tokenizer={"chat_template": True})
    file = made[1] / "generation_config.json"
    file.write_text(json.dumps(json.loads(file.read_text()) | {"eos_token_id": ENDS}))
    tiny_model(made[2], seed=1, **MODEL | {"head": "classifier"}, tokenizer={"chat_template": True})
    return made


def trainer_of(
    package, folders, out, *, rewards=(), ends=None, rows=10, kind="text", lora=False, model=False, **config
):
    """A trainer of trl.experimental.online_dpo or of trl_jax."""
    from peft import LoraConfig

    policy, ending, scorer = map(str, folders)
    adapter = LoraConfig(r=4, lora_alpha=8, target_modules=["q_proj", "v_proj"], task_type="CAUSAL_LM")
    return package.OnlineDPOTrainer(
        policy if ends is None else ending, reward_funcs=[scorer] if model else list(rewards),
        args=package.OnlineDPOConfig(str(out), **STEPS | config),
        train_dataset=Dataset.from_list(prompt_rows(rows, kind)),
        processing_class=tiny_tokenizer(chat_template=True), peft_config=adapter if lora else None,
    )  # fmt: skip


def run(trainer, written):
    """(logs, weights, completions)"""
    trainer.train()
    logs, folder = list(trainer.state.log_history), f"{trainer.args.output_dir}/final"
    trainer.save_model(folder)
    return logs, read_weights(folder), written


def by_trl(monkeypatch, *given, **config):
    import torch
    from trl.experimental import online_dpo

    torch.set_num_threads(1)
    written, generate = [], online_dpo.OnlineDPOTrainer._generate

    def spied(*given):
        found = generate(*given)
        _, _, ids, mask, _ = found
        written.append([row[own.bool()].tolist() for row, own in zip(ids, mask, strict=True)])
        return found

    monkeypatch.setattr(online_dpo.OnlineDPOTrainer, "_generate", spied)
    return run(trainer_of(online_dpo, *given, **config), written)


@pytest.mark.parametrize("name", usually(lambda name: name == "texts", list(CASES)))
def test_completions_curve_and_weights_are_trls(folders, tmp_path, monkeypatch, name):
    pytest.importorskip("trl")
    from trl_jax.experimental import online_dpo

    logs, weights, written = by_trl(monkeypatch, folders, tmp_path / "theirs", **CASES[name])
    made, out = spied_completions(monkeypatch), tmp_path / "ours"
    resumable = {"save_strategy": "steps", "save_steps": 1} if name == "texts" else {}
    ours = run(trainer_of(online_dpo, folders, out, **CASES[name], **resumable), made)
    assert made == written, "other tokens were drawn"
    assert len(ours[0]) == len(logs)
    for mine, other in zip(ours[0], logs, strict=True):
        mine, other = timeless(mine), timeless(other)
        assert [key for key in mine if key != "num_tokens"] == list(other)
        for key, value in other.items():
            if key not in OF_PADDING or name != "texts":
                # TRL rounds the logged loss to four digits.
                mark = 1e-5 if key == "train_loss" else 6e-5 if key == "loss" else 2e-4
                assert mine[key] == pytest.approx(value, abs=mark), key
    for key, tensor in weights.items():
        np.testing.assert_allclose(ours[1][key], tensor, rtol=0, atol=WEIGHTS, err_msg=key)
    if name == "texts":
        assert len({len(ids) for batch in written for ids in batch}) > 3
        assert any(log["val/contain_eos_token"] not in (0, 1) for log in logs if "loss" in log)
        _resumes(online_dpo, folders, out, ours, made)


def _resumes(package, folders, out, whole, made):
    """A run resumed in the middle of its first epoch ends like the uninterrupted one: completions, numbers and
    weights."""
    completions = list(made)
    made.clear()
    trainer = trainer_of(package, folders, out, **TEXTS, save_strategy="no")
    trainer.train(resume_from_checkpoint=str(out / "checkpoint-1"))
    assert 0 < len(made) < len(completions) and completions[-len(made) :] == made
    steps = [timeless(log) for log in trainer.state.log_history if "loss" in log]
    assert steps == [timeless(log) for log in whole[0] if "loss" in log]
    trainer.save_model(str(out / "again"))
    for name, tensor in read_weights(out / "again").items():
        np.testing.assert_array_equal(whole[1][name], tensor, err_msg=name)
