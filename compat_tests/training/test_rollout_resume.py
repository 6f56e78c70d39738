"""A resumed online run equals the uninterrupted run bitwise: completions, rewards, logs and weights."""

from __future__ import annotations

import shutil
import subprocess
import sys
from pathlib import Path

import jax
import numpy as np
import pytest
from datasets import Dataset

from compat_tests.effort import only_thorough, thorough, usual, usually
from compat_tests.parity.dpo_cases import SMALL
from compat_tests.parity.grpo_cases import prompt_rows
from compat_tests.parity.reference import BASE
from compat_tests.training.rollout_run import CONFIG, trainer_of
from trl_jax.rollout.steps import RolloutSteps
from trl_jax.trainer.grpo_trainer import GRPOTrainer
from trl_jax.trainer.rloo_trainer import RLOOTrainer

STEPS = 10
CLOCK = ("runtime", "per_second", "step_time")


def history(trainer):
    return [{k: v for k, v in log.items() if not k.endswith(CLOCK)} for log in trainer.state.log_history]


def assert_same(one, other):
    jax.tree.map(np.testing.assert_array_equal, one.model.params, other.model.params)
    states = [run.parts.setup.progress.optimizer_state for run in (one, other)]
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
    """The uninterrupted run, its completions, and its folder."""
    out = tmp_path_factory.mktemp("whole")
    trainer, seen = trainer_of(folder, out)
    trainer.train()
    return trainer, seen, out


def only(out, step, to):
    """A copy of the run's folder as of that checkpoint."""
    shutil.copytree(out / f"checkpoint-{step}", to / f"checkpoint-{step}")
    return to


def test_the_run_has_what_could_be_lost(whole):
    trainer, seen, out = whole
    assert trainer.state.global_step == STEPS and len(seen) == 3  # the third is in the second epoch and not used up
    assert len({str(rows) for rows in seen}) == 3
    coefficients = {log["entropy_coef"] for log in history(trainer) if "entropy_coef" in log}
    assert len(coefficients) > 1 and max(log.get("kl", 0) for log in history(trainer)) > 0
    assert len(list((out / "completions").glob("*.parquet"))) >= 3


# In the middle of a generation, at its end, after the first step of the next one, and in the second epoch.
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


def test_from_a_checkpoint_of_an_earlier_version_the_logs_are_the_same(whole, folder, tmp_path, monkeypatch):
    """It has the losses of the steps since the last log, but not among the metrics."""
    trainer, _, out = whole
    restore, of_loss = RolloutSteps.restore, {"entropy", "kl", "policy_loss", "clip_ratio/low_mean"}

    def restore_earlier(self, arrays, facts, unlogged):
        assert of_loss <= facts["metrics"].keys() and len(unlogged) == 2
        kept = ("completions/", "reward", "frac_reward", "num_tokens")
        metrics = {name: values for name, values in facts["metrics"].items() if name.startswith(kept)}
        return restore(self, arrays, facts | {"metrics": metrics, "generated": "before"}, unlogged)

    monkeypatch.setattr(RolloutSteps, "restore", restore_earlier)
    again, _ = trainer_of(folder, only(out, 5, tmp_path))
    again.train(resume_from_checkpoint=True)
    ours, theirs = ([{name: log.get(name) for name in of_loss} for log in history(run)] for run in (again, trainer))
    assert ours == theirs


def test_an_evaluation_at_the_start_of_a_resumed_run_changes_no_completion(whole, folder, tmp_path):
    """As in TRL, it draws the same random numbers as an evaluation at the start of a new run; the steps use the saved
    state."""
    trainer, seen, out = whole
    options = {"eval_on_start": True, "eval_strategy": "steps", "eval_steps": 100, "per_device_eval_batch_size": 4,
               "eval_rows": 2}  # fmt: skip
    again, more = trainer_of(folder, only(out, 4, tmp_path), **options)
    again.train(resume_from_checkpoint=True)
    assert more[2:4] == seen[1:] and len(more) == 6  # includes the evaluation at the end
    jax.tree.map(np.testing.assert_array_equal, trainer.model.params, again.model.params)
    new, first = trainer_of(folder, tmp_path / "new", **options, max_steps=1)
    new.train()
    assert np.mean(np.asarray(first[0]) == np.asarray(more[0])) > 0.5  # the weights differ


def test_a_run_killed_while_rewards_are_asked_for(whole, folder, tmp_path):
    trainer, seen, _ = whole
    program = [
        sys.executable,
        "-m",
        "compat_tests.light",
        "compat_tests.training.rollout_run",
        str(folder),
        str(tmp_path),
        "2",
    ]
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


PLAIN = {"use_adaptive_entropy": None, "entropy_coef": None, "entropy_target": None, "sync_ref_model": None,
         "ref_model_sync_steps": None, "ref_model_mixup_alpha": None, "log_completions": None,
         "num_completions_to_print": None, "pad_to_multiple_of": None}  # fmt: skip


def prompts_of(kind, folder, out, resume=False, rows=16, **config):
    """A small run over prompts in order, and the distinct prompts of each generation."""
    given = BASE | CONFIG | PLAIN | {"beta": 0.0, "shuffle_dataset": False} | config
    seen, table = [], Dataset.from_list(prompt_rows(rows))

    def spy(prompts, **columns):
        seen.append(list(dict.fromkeys(map(str, prompts))))
        return [float(number % 3) for number in range(len(prompts))]

    args = kind.config_class(str(out), **{name: value for name, value in given.items() if value is not None})
    trainer = kind(str(folder), spy, args, table)
    trainer.train(resume_from_checkpoint=resume)
    order = [str(prompt) for prompt in table["prompt"]]
    return trainer, [[order.index(prompt) for prompt in prompts] for prompts in seen]


ONE = {"gradient_accumulation_steps": 2, "steps_per_generation": 2, "num_iterations": 1, "num_generations": 2}


# Two prompts per generation, one generation per step; other sizes after the second step.
@usual("GRPOTrainer-changed0-wanted0")
@pytest.mark.parametrize(
    ("changed", "wanted"),
    [
        ({"num_generations": 4}, [[4], [5]]),
        ({"num_iterations": 2}, [[4, 5]]),
        ({"steps_per_generation": 4}, [[4, 5, 6, 7]]),
        ({"per_device_train_batch_size": 4}, [[4, 5, 6, 7], [8, 9, 10, 11]]),
    ],
)
@pytest.mark.parametrize("kind", [GRPOTrainer, thorough(RLOOTrainer)])
def test_behind_a_generation_other_sizes_go_on_with_the_next_prompts(kind, changed, wanted, folder, tmp_path):
    _, first = prompts_of(kind, folder, tmp_path, max_steps=2, **ONE)
    assert first == [[0, 1], [2, 3]]
    again, then = prompts_of(kind, folder, tmp_path, True, max_steps=4, **ONE | changed)
    assert then == wanted and again.state.global_step == 4
    prompts = 4 + 2 * len(wanted[0]) / (changed.get("num_iterations", 1) * changed.get("steps_per_generation", 2) / 2)
    assert again.state.epoch == prompts / 16


@pytest.mark.parametrize("changed", [{"num_generations": 4}, {"num_iterations": 1}, {"steps_per_generation": 2}])
def test_in_a_generation_other_sizes_complete_its_prompts_again(changed, folder, tmp_path, caplog):
    two = ONE | {"num_iterations": 2, "steps_per_generation": 4}
    _, first = prompts_of(GRPOTrainer, folder, tmp_path, max_steps=3, **two)
    assert first == [[0, 1, 2, 3]]
    _, then = prompts_of(GRPOTrainer, folder, tmp_path, True, max_steps=4, **two | changed)
    assert then[0] == [0, 1, 2, 3][: len(then[0])]
    [name] = changed
    assert "Resuming in the middle of a generation with changed arguments" in caplog.text and f"{name} " in caplog.text


@pytest.mark.parametrize("kind", [GRPOTrainer, thorough(RLOOTrainer)])
@pytest.mark.parametrize("betas", [(0.0, 0.1), (0.1, 0.0)])
def test_another_beta_in_a_generation_writes_its_completions_again(kind, betas, folder, tmp_path, caplog):
    one = ONE | {"steps_per_generation": 4}
    prompts_of(kind, folder, tmp_path, max_steps=1, beta=betas[0], **one)
    again, then = prompts_of(kind, folder, tmp_path, True, max_steps=3, beta=betas[1], **one)
    assert then == [[0, 1, 2, 3], [4, 5, 6, 7]] and again.state.epoch == 6 / 16
    assert "beta, from or to 0): its completions are dropped and its prompts are completed again." in caplog.text


@usual("2-1")
@pytest.mark.parametrize(("before", "after"), [(2, 4), thorough(1, 8), (2, 1)])
def test_other_micro_batches_of_a_step_in_a_generation(before, after, folder, tmp_path, caplog):
    """If a step uses up whole generations before or after the change, a new generation starts; otherwise the old one
    goes on."""
    one = ONE | {"steps_per_generation": 4}
    prompts_of(GRPOTrainer, folder, tmp_path, max_steps=1, **one | {"gradient_accumulation_steps": before})
    again, then = prompts_of(
        GRPOTrainer, folder, tmp_path, True, max_steps=3, **one | {"gradient_accumulation_steps": after}
    )
    assert again.state.global_step == 3
    if after == 1:
        assert then == [] and "completed again" not in caplog.text
    else:
        assert then[0] == [0, 1, 2, 3] and len(then) == after // 2
        assert "gradient_accumulation_steps, whose steps use up a generation or do not" in caplog.text


def test_steps_that_would_leave_prompts_out_are_refused(folder, tmp_path):
    epoch = {"max_steps": None, "num_train_epochs": 1.0}
    prompts_of(GRPOTrainer, folder, tmp_path, max_steps=4, **ONE)
    with pytest.raises(ValueError, match=r"is at step 4.* 4 steps, and the prompts so far 2.* max_steps=6"):
        prompts_of(GRPOTrainer, folder, tmp_path, True, **ONE | epoch | {"per_device_train_batch_size": 4})
    _, then = prompts_of(GRPOTrainer, folder, tmp_path, True, max_steps=6, **ONE | {"per_device_train_batch_size": 4})
    assert then == [[8, 9, 10, 11], [12, 13, 14, 15]]


@only_thorough
def test_a_bonus_that_the_checkpoint_lacks_begins(folder, tmp_path):
    prompts_of(GRPOTrainer, folder, tmp_path, max_steps=1, **ONE)
    again, _ = prompts_of(GRPOTrainer, folder, tmp_path, True, max_steps=2, entropy_coef=0.01, **ONE)
    assert again.state.global_step == 2


@only_thorough
def test_other_prompts_as_a_stream_begin_the_epoch_again(folder, tmp_path):
    prompts_of(GRPOTrainer, folder, tmp_path, max_steps=2, **ONE)
    given = BASE | CONFIG | PLAIN | ONE | {"max_steps": 3, "ignore_data_skip": True, "shuffle_dataset": False}
    args = GRPOTrainer.config_class(str(tmp_path), **{name: v for name, v in given.items() if v is not None})
    stream, seen = Dataset.from_list(prompt_rows(4)).to_iterable_dataset(), []

    def spy(prompts, **columns):
        seen.append(list(dict.fromkeys(prompts)))
        return [0.0] * len(prompts)

    GRPOTrainer(str(folder), spy, args, stream).train(resume_from_checkpoint=True)
    assert seen == [[row["prompt"] for row in prompt_rows(4)[:2]]]
