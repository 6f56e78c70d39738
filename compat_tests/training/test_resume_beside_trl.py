"""Resumed runs against TRL: with `ignore_data_skip`, which restarts the epoch, and with more steps than before."""

from __future__ import annotations

import numpy as np
import pytest
from datasets import Dataset

import trl_jax
from compat_tests.effort import thorough
from compat_tests.parity.dpo_cases import SMALL
from compat_tests.parity.grpo_cases import STEPS, length_reward, prompt_rows
from compat_tests.parity.marks import timeless
from compat_tests.parity.reference import BASE
from compat_tests.tiny import text_rows
from compat_tests.trainer.vision_models import tiny_llava

ROWS = {"GRPO": prompt_rows(8), "SFT": text_rows(16)}  # four steps per epoch for each
CONFIG = BASE | {"save_strategy": "steps", "save_steps": 1, "lr_scheduler_type": "constant"}
OF = {"GRPO": STEPS | {"num_generations": 4}, "SFT": {"max_length": 64}}


def taken_up_again(package, kind, folder, out, step, rows, last):
    """The logs of a run resumed after `step` that trains until `last` on other rows, and the prompts that it
    completes."""
    seen = []

    def look(prompts, completions, **columns):
        seen.append(prompts)
        return length_reward(completions)

    rewards = [look] if kind == "GRPO" else []
    for source, config in ((ROWS[kind], {"max_steps": step}), (rows, {"max_steps": last, "ignore_data_skip": True})):
        seen.clear()
        args = getattr(package, f"{kind}Config")(str(out), **CONFIG | OF[kind] | config)
        trainer = getattr(package, f"{kind}Trainer")(
            str(folder), *rewards, args=args, train_dataset=Dataset.from_list(source)
        )
        trainer.train(resume_from_checkpoint="ignore_data_skip" in config)
    return [timeless(log) for log in trainer.state.log_history if "loss" in log], seen


@pytest.mark.parametrize(("kind", "step", "last"), [("GRPO", 2, 4), thorough("SFT", 2, 4), ("SFT", 4, 5)])
def test_the_epoch_begins_again_as_trls_does(kind, step, last, checkpoint, tmp_path):
    trl, folder = pytest.importorskip("trl"), checkpoint(**SMALL)
    (ours, mine), (theirs, other) = (
        taken_up_again(package, kind, folder, tmp_path / package.__name__, step, ROWS[kind], last)
        for package in (trl_jax, trl)
    )
    assert mine == other and len(ours) == len(theirs) == last
    for name in ("loss", "grad_norm", "epoch", "step"):
        np.testing.assert_allclose([log[name] for log in ours], [log[name] for log in theirs], rtol=1e-4, atol=1e-6)


# TRL starts each resumed epoch with the order of the first.
@pytest.mark.parametrize("rows", [thorough(8), 5])
def test_behind_an_epoch_the_next_one_begins_with_prompts_that_there_are(rows, checkpoint, tmp_path):
    logs, seen = taken_up_again(trl_jax, "GRPO", checkpoint(**SMALL), tmp_path, 4, prompt_rows(20)[-rows:], 6)
    assert [log["step"] for log in logs] == [1, 2, 3, 4, 5, 6] and logs[4]["epoch"] == 1 + 1 / (rows // 2)
    assert {prompt for prompts in seen for prompt in prompts} <= {row["prompt"] for row in prompt_rows(20)[-rows:]}


def sft(package, folder, out, **config):
    """A trainer whose learning rate decays to 0, saved at each step."""
    args = package.SFTConfig(str(out), **CONFIG | OF["SFT"] | {"lr_scheduler_type": "linear"} | config)
    return package.SFTTrainer(str(folder), args=args, train_dataset=Dataset.from_list(ROWS["SFT"]))


def rates(trainer):
    return [log["learning_rate"] for log in trainer.state.log_history if "learning_rate" in log]


def test_a_run_that_is_made_longer_goes_on_at_the_longer_ones_rate(checkpoint, tmp_path):
    """TRL's first step uses the final rate of the shorter run, which is 0. A finished run can be continued."""
    trl, folder, found = pytest.importorskip("trl"), checkpoint(**SMALL), []
    for package in (trl, trl_jax):
        out = tmp_path / package.__name__
        sft(package, folder, out, max_steps=2).train()
        over, longer = (sft(package, folder, out, max_steps=steps) for steps in (2, 4))
        longer.train(resume_from_checkpoint=str(out / "checkpoint-2"))
        over.train(resume_from_checkpoint=str(out / "checkpoint-2"))
        found.append((rates(longer), over.state.global_step))
    peak, (theirs, ours) = CONFIG["learning_rate"], found
    assert theirs == ([peak, peak / 2, 0.0, peak / 4], 3)
    assert ours == ([peak, peak / 2, peak / 2, peak / 4], 2)


def test_another_rate_counts_in_a_second_run(checkpoint, tmp_path):
    """TRL's optimizer keeps the rate of the first run."""
    trl, found = pytest.importorskip("trl"), []
    for package in (trl, trl_jax):
        trainer = sft(package, checkpoint(**SMALL), tmp_path, max_steps=2, save_strategy="no")
        trainer.train()
        trainer.args.learning_rate = 0.01
        trainer.train()
        found.append(rates(trainer)[-2:])
    assert found == [[CONFIG["learning_rate"], CONFIG["learning_rate"] / 2], [0.01, 0.005]]


@pytest.mark.parametrize("model_type", ["qwen2_moe", thorough("llava")])
def test_a_resumed_run_has_the_trained_weights(model_type, checkpoint, tmp_path):
    """A checkpoint names each expert, and the weights of llava, otherwise than TRL's model: it loads none of them."""
    trl, found = pytest.importorskip("trl"), []
    of_experts = model_type != "llava"
    folder = checkpoint(**SMALL | {"model_type": model_type}) if of_experts else tiny_llava(tmp_path / "llava")
    for package in (trl, trl_jax):
        out = tmp_path / package.__name__
        whole, resumed = (sft(package, folder, out, max_steps=2) for _ in range(2))
        whole.train()
        resumed.train(resume_from_checkpoint=str(out / "checkpoint-1"))
        runs = [[log["loss"] for log in one.state.log_history if "loss" in log] for one in (whole, resumed)]
        assert runs[0][0] == runs[1][0]
        found.append((runs[0][1], runs[1][1]))
    theirs, ours = found
    assert ours[0] == pytest.approx(theirs[0], abs=1e-5) and ours[1] == ours[0]
    assert abs(theirs[1] - theirs[0]) > 1e-3
