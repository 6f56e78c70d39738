"""A run that writes its rows itself, taken up again, is the run that was never broken: completions, rewards, logs and
weights, bit for bit."""

from __future__ import annotations

import shutil
import subprocess
import sys
from pathlib import Path

import jax
import numpy as np
import pytest

from compat_tests.effort import usually
from compat_tests.parity.dpo_cases import SMALL
from compat_tests.run.rollout_run import trainer_of
from trl_jax import RLOOTrainer

STEPS = 10
CLOCK = ("runtime", "per_second", "step_time")


def history(trainer):
    return [{k: v for k, v in log.items() if not k.endswith(CLOCK)} for log in trainer.state.log_history]


def assert_same(one, other):
    jax.tree.map(np.testing.assert_array_equal, one.model.params, other.model.params)
    states = [run.parts.run.progress.optimizer_state for run in (one, other)]
    jax.tree.map(np.testing.assert_array_equal, *states)
    for mine, theirs in zip(history(one), history(other), strict=True):
        assert list(mine) == list(theirs)
        np.testing.assert_array_equal(list(mine.values()), list(theirs.values()))
    assert one.state.global_step == other.state.global_step
    assert one.state.num_input_tokens_seen == other.state.num_input_tokens_seen


@pytest.fixture(scope="module")
def folder(checkpoint):
    return checkpoint(**SMALL)


@pytest.fixture(scope="module")
def whole(folder, tmp_path_factory):
    """The unbroken run, its completions, and its folder."""
    out = tmp_path_factory.mktemp("whole")
    trainer, seen = trainer_of(folder, out)
    trainer.train()
    return trainer, seen, out


def only(out, step, to):
    """A run's folder as it was when that checkpoint was its newest."""
    shutil.copytree(out / f"checkpoint-{step}", to / f"checkpoint-{step}")
    return to


def test_the_run_has_what_could_be_lost(whole):
    trainer, seen, out = whole
    assert trainer.state.global_step == STEPS and len(seen) == 3  # in the midst of two, and in the second epoch
    assert len({str(rows) for rows in seen}) == 3
    coefficients = {log["entropy_coef"] for log in history(trainer) if "entropy_coef" in log}
    assert len(coefficients) > 1 and max(log.get("kl", 0) for log in history(trainer)) > 0
    assert len(list((out / "completions").glob("*.parquet"))) >= 3


# In the midst of a generation, at its end, behind the next one's first step, and in the second epoch.
@pytest.mark.parametrize("step", usually({2, 4, 5, 9}.__contains__, range(1, STEPS)))
def test_from_any_step_the_rest_is_the_same(step, whole, folder, tmp_path):
    trainer, seen, out = whole
    again, more = trainer_of(folder, only(out, step, tmp_path))
    again.train(resume_from_checkpoint=True)
    assert_same(trainer, again)
    assert more == seen[len(seen) - len(more) :]
    assert len(more) == sum(4 * number >= step for number in range(3))
    if again.ref_model is not None:
        jax.tree.map(np.testing.assert_array_equal, trainer.ref_model.params, again.ref_model.params)
    for file in sorted(path.name for path in (tmp_path / "completions").glob("*")):
        assert (tmp_path / "completions" / file).read_bytes() == (out / "completions" / file).read_bytes()


def test_a_run_killed_while_rewards_are_asked_for(whole, folder, tmp_path):
    trainer, seen, _ = whole
    program = [sys.executable, "-m", "compat_tests.run.rollout_run", str(folder), str(tmp_path), "2"]
    run = subprocess.run(program, capture_output=True, text=True, cwd=Path(__file__).parents[2])
    assert run.returncode == -9, run.stderr[-3000:]
    again, more = trainer_of(folder, tmp_path)
    again.train(resume_from_checkpoint=True)
    assert_same(trainer, again)
    assert more == seen[1:]


def test_a_run_of_rloo_goes_on(folder, tmp_path):
    options = {
        "kind": RLOOTrainer, "max_steps": 4, "use_adaptive_entropy": None, "entropy_coef": None, "entropy_target": None
    }  # fmt: skip
    whole, seen = trainer_of(folder, tmp_path / "whole", **options)
    whole.train()
    for step in (1, 3):
        again, more = trainer_of(folder, only(tmp_path / "whole", step, tmp_path / str(step)), **options)
        again.train(resume_from_checkpoint=True)
        assert_same(whole, again)
        assert more == seen[1:]


def test_a_second_train_writes_new_completions(folder, tmp_path):
    trainer, seen = trainer_of(folder, tmp_path, max_steps=1, save_strategy="no")
    trainer.train()
    trainer.train()
    assert len(seen) == 2 and seen[0] != seen[1]


def test_what_was_thrown_by_a_reward_function_leaves_a_run_that_goes_on(whole, folder, tmp_path):
    def broken(generation):
        if generation == 2:
            raise RuntimeError("the judge is out")

    trainer, _ = trainer_of(folder, tmp_path, judged=broken)
    with pytest.raises(RuntimeError, match="the judge is out"):
        trainer.train()
    again, more = trainer_of(folder, tmp_path)
    again.train(resume_from_checkpoint=True)
    assert_same(whole[0], again)
    assert more == whole[1][1:]
