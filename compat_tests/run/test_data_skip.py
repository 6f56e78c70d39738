"""`ignore_data_skip`: a resumed run begins the epoch that is under way again, as in TRL; one that is over stays so."""

from __future__ import annotations

import numpy as np
import pytest
from datasets import Dataset

import trl_jax
from compat_tests.parity.dpo_cases import SMALL
from compat_tests.parity.grpo_cases import STEPS, length_reward, prompt_rows
from compat_tests.parity.marks import timeless
from compat_tests.parity.reference import BASE
from compat_tests.tiny import text_rows

ROWS = {"GRPO": prompt_rows(8), "SFT": text_rows(16)}  # four steps an epoch, of each
CONFIG = BASE | {"save_strategy": "steps", "save_steps": 1, "lr_scheduler_type": "constant"}
OF = {"GRPO": STEPS | {"num_generations": 4}, "SFT": {"max_length": 64}}


def taken_up_again(package, kind, folder, out, step, rows, last):
    """The logs of a run that goes on behind `step` to the `last`, with other rows; and what prompts it completes."""
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


@pytest.mark.parametrize(("kind", "step", "last"), [("GRPO", 2, 4), ("SFT", 2, 4), ("SFT", 4, 5)])
def test_the_epoch_begins_again_as_trls_does(kind, step, last, checkpoint, tmp_path):
    trl, folder = pytest.importorskip("trl"), checkpoint(**SMALL)
    (ours, mine), (theirs, other) = (
        taken_up_again(package, kind, folder, tmp_path / package.__name__, step, ROWS[kind], last)
        for package in (trl_jax, trl)
    )
    assert mine == other and len(ours) == len(theirs) == last
    for name in ("loss", "grad_norm", "epoch", "step"):
        np.testing.assert_allclose([log[name] for log in ours], [log[name] for log in theirs], rtol=1e-4, atol=1e-6)


# TRL begins each resumed epoch with the first one's order.
@pytest.mark.parametrize("rows", [8, 5])
def test_behind_an_epoch_the_next_one_begins_with_prompts_that_there_are(rows, checkpoint, tmp_path):
    logs, seen = taken_up_again(trl_jax, "GRPO", checkpoint(**SMALL), tmp_path, 4, prompt_rows(20)[-rows:], 6)
    assert [log["step"] for log in logs] == [1, 2, 3, 4, 5, 6] and logs[4]["epoch"] == 1 + 1 / (rows // 2)
    assert {prompt for prompts in seen for prompt in prompts} <= {row["prompt"] for row in prompt_rows(20)[-rows:]}
