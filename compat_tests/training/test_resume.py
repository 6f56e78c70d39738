"""A resumed run equals the uninterrupted run bitwise: weights, moments and every logged number."""

from __future__ import annotations

import logging
import random
import re
import shutil

import jax
import numpy as np
import pytest
from transformers import EarlyStoppingCallback, TrainerCallback

import trl_jax
from compat_tests.effort import usual, usually
from compat_tests.trainer.trainers import FACTS, checkpoints, make, stream, table
from trl_jax.data.loader import epoch_order

CONFIG = {
    "save_strategy": "steps",
    "save_steps": 1,
    "num_train_epochs": 2,
    "gradient_accumulation_steps": 2,
    "per_device_train_batch_size": 2,
    "logging_steps": 3,
    "eval_strategy": "steps",
    "eval_steps": 4,
}
CLOCK = ("runtime", "per_second")


class Draws(TrainerCallback):
    """Logs draws from Python's and NumPy's generators, as a user's metric might."""

    def on_log(self, args, state, control, logs, **kwargs):
        state.log_history[-1]["drawn"] = [random.random(), float(np.random.random())]


def logs(trainer):
    """The log history without timings."""
    return [{k: v for k, v in log.items() if not k.endswith(CLOCK)} for log in trainer.state.log_history]


def same(one, other):
    states = [run.parts.setup.progress.optimizer_state for run in (one, other)]
    for ours, theirs in ((one.model.params, other.model.params), states):
        jax.tree.map(np.testing.assert_array_equal, ours, theirs)
    assert logs(one) == logs(other)
    facts = ["global_step", "epoch", "total_flos", "best_metric", "best_global_step", "stateful_callbacks"]
    assert [getattr(one.state, name) for name in facts] == [getattr(other.state, name) for name in facts]


@pytest.fixture(scope="module")
def folder(checkpoint):
    return checkpoint(**FACTS, attention_dropout=0.2)


@pytest.fixture
def train(folder, tmp_path):
    def run(name, resume=None, rows=None, callbacks=(), **config):
        data = table(13) if rows is None else rows
        given = {"callbacks": [*callbacks, Draws()], "eval_dataset": table(4, seed=1)}
        trainer = make(trl_jax, folder, tmp_path / name, train=data, config=CONFIG | config, **given)
        if resume is None:
            random.seed(5), np.random.seed(5)
        trainer.train(resume_from_checkpoint=resume)
        return trainer

    return run


def only(tmp_path, step, name="again"):
    """A copy of the run's folder as of that checkpoint."""
    shutil.rmtree(tmp_path / name, ignore_errors=True)
    for earlier in range(1, step + 1):
        if (tmp_path / "whole" / f"checkpoint-{earlier}").exists():
            shutil.copytree(tmp_path / f"whole/checkpoint-{earlier}", tmp_path / name / f"checkpoint-{earlier}")
    return name


RUNS = {
    "accumulation, shuffled, within and between epochs": ({}, [3, 4, 8]),
    "a stream": ({"max_steps": 8}, [3]),
    "weights saved in bfloat16": ({"model_init_kwargs": {"dtype": "bfloat16"}}, [3]),
    "bfloat16, dropout": ({"bf16": True, "disable_dropout": False, "max_steps": 3, "eval_steps": 9}, [2]),
    "noise on embeddings, averaged weights": (
        {"neftune_noise_alpha": 5.0, "optim": "schedule_free_adamw", "max_steps": 3, "eval_steps": 9}, [2]),
    "sequential, cosine, one log an epoch": (
        {"train_sampling_strategy": "sequential", "lr_scheduler_type": "cosine", "logging_strategy": "epoch",
         "weight_decay": 0.1, "warmup_steps": 2, "eval_strategy": "epoch"}, [3, 4]),  # also before the end of an epoch
    "saved by epoch": ({"save_strategy": "epoch", "eval_strategy": "epoch"}, [4]),
    "saved when best": (
        {"save_strategy": "best", "metric_for_best_model": "loss", "eval_steps": 1, "load_best_model_at_end": True},
        [2],
    ),
}  # fmt: skip


@usual("accumulation, shuffled, within and between epochs", "a stream", "bfloat16, dropout")
@pytest.mark.parametrize("name", usually(lambda name: name not in {"saved by epoch", "saved when best"}, RUNS))
def test_from_any_step_the_rest_is_the_same(name, train, tmp_path):
    config, steps = RUNS[name]
    rows = {"rows": stream(9)} if name == "a stream" else {}
    whole = train("whole", **rows, **config)
    for step in steps:
        same(whole, train(only(tmp_path, step), True, **rows, **config))


def test_what_a_callback_had_counted_goes_on(train, tmp_path):
    config = {"eval_steps": 1, "metric_for_best_model": "loss", "greater_is_better": True, "num_train_epochs": 3}
    whole = train("whole", callbacks=[EarlyStoppingCallback(4)], **config)
    assert whole.state.global_step == 5  # the metric falls with the loss, so the first value stays the best
    same(whole, train(only(tmp_path, 3), True, callbacks=[EarlyStoppingCallback(4)], **config))
    # As in TRL, a run that a callback stopped continues, here until the next evaluation stops it again: scripts that
    # stop at a time limit rely on this.
    assert train(only(tmp_path, 5), True, callbacks=[EarlyStoppingCallback(4)], **config).state.global_step == 6


class StopAt(TrainerCallback):
    def __init__(self, step):
        self.step = step

    def on_step_end(self, args, state, control, **kwargs):
        control.should_training_stop |= state.global_step == self.step


def test_an_epoch_that_a_callback_cut_short_goes_on(train, tmp_path):
    config = {"save_strategy": "epoch", "logging_steps": 1, "eval_strategy": "no"}
    train("again", callbacks=[StopAt(2)], **config)
    again, whole = train("again", True, **config), train("whole", **config)
    assert again.state.global_step == whole.state.global_step == 8
    losses = [[log["loss"] for log in run.state.log_history if "loss" in log] for run in (again, whole)]
    assert losses[0] == losses[1]


def test_restoring_callbacks_wholly_takes_how_they_were_set_up_too(train, tmp_path):
    config = {"eval_steps": 1, "metric_for_best_model": "loss", "greater_is_better": True, "num_train_epochs": 3}
    train("whole", callbacks=[EarlyStoppingCallback(4)], **config)
    assert train(only(tmp_path, 3), True, callbacks=[EarlyStoppingCallback(9)], **config).state.global_step == 10
    config["restore_callback_states_from_checkpoint"] = True
    assert train(only(tmp_path, 3), True, callbacks=[EarlyStoppingCallback(9)], **config).state.global_step == 5


def test_other_steps_of_logs_and_checkpoints_take_effect(train, tmp_path):
    """transformers goes on with those of the checkpoint, and warns."""
    train("whole", logging_steps=1, eval_strategy="no")
    again = train(only(tmp_path, 2), True, logging_steps=3, save_steps=4, eval_strategy="no")
    assert [log["step"] for log in again.state.log_history if "loss" in log] == [1, 2, 3, 6]
    assert checkpoints(again.args.output_dir) == [f"checkpoint-{step}" for step in (1, 2, 4, 8)]


def test_with_more_steps_a_finished_run_goes_on(train, tmp_path):
    train("whole", max_steps=3)
    longer = train(only(tmp_path, 3), True, max_steps=6, learning_rate=1e-3, lr_scheduler_type="constant")
    assert longer.state.global_step == 6
    rates = [log["learning_rate"] for log in longer.state.log_history if "learning_rate" in log]
    assert rates[0] < 5e-4 and rates[-1] == 1e-3  # the new argument is used
    # With fewer steps the run is already finished.
    assert train(only(tmp_path, 3), True, max_steps=2).state.global_step == 3


def test_with_another_batch_size_no_row_is_seen_twice(train, tmp_path):
    train("whole", num_train_epochs=1)
    seen = []

    class Rows(TrainerCallback):
        def on_train_begin(self, args, state, control, train_dataloader, **kwargs):
            layout = train_dataloader.steps.step_layout
            step = layout.step
            counting = lambda *given: [made := step(*given), seen.extend(made.rows)][0]  # noqa: E731
            object.__setattr__(layout, "step", counting)

    train(only(tmp_path, 2), True, callbacks=[Rows()], num_train_epochs=1, gradient_accumulation_steps=1)
    assert seen == epoch_order(13, seed=42, epoch=0, shuffle=True)[8:].tolist()


def test_the_path_of_the_best_follows_a_folder_that_moved(train, tmp_path):
    best = {"metric_for_best_model": "loss", "eval_steps": 1, "load_best_model_at_end": True}
    train("whole", **best)
    again = train(only(tmp_path, 5), str(tmp_path / "again/checkpoint-5"), **best)
    assert again.state.best_model_checkpoint == str(tmp_path / "again" / "checkpoint-8")


def test_another_model_is_refused(train, tmp_path, checkpoint):
    train("whole", max_steps=1)
    other = make(trl_jax, checkpoint(**FACTS | {"hidden_size": 64}), tmp_path / "other", train=table(13))
    with pytest.raises(ValueError, match=f"{re.escape(str(tmp_path))}/whole/checkpoint-1 holds another model than"):
        other.train(resume_from_checkpoint=str(tmp_path / "whole" / "checkpoint-1"))


def test_another_optimizer_is_refused(train, tmp_path, folder):
    optax = pytest.importorskip("optax")

    class Mine(trl_jax.RewardTrainer):
        def create_optimizer(self):
            return optax.chain(optax.trace(0.9), optax.scale(-1e-4))

    train("whole", max_steps=1)
    args = trl_jax.RewardConfig(str(tmp_path / "mine"), use_cpu=True, report_to="none", bf16=False)
    with pytest.raises(ValueError, match="arrays.safetensors is of another run: optimizer/.* and the optimizer it was"):
        Mine(str(folder), args, train_dataset=table(13)).train(str(tmp_path / "whole" / "checkpoint-1"))


def test_a_second_train_goes_on_with_weights_and_moments(train):
    trainer = train("whole", max_steps=2, save_strategy="no")
    before = jax.device_get(trainer.parts.setup.progress.optimizer_state)
    trainer.train()
    assert trainer.state.global_step == 2 and before is not None


def test_what_is_resumed_is_said(train, tmp_path, caplog):
    train("whole", max_steps=2)
    with caplog.at_level(logging.WARNING, logger="trl_jax"):
        train(only(tmp_path, 1), True, max_steps=2)
    assert f"Resuming from {tmp_path}/again/checkpoint-1: step 1 of 2." in caplog.text
