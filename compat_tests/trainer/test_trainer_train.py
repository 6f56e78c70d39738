"""train() against TRL for what the parity tests lack: streams, a second run, callbacks, the best checkpoint."""

from __future__ import annotations

import logging
import math
import threading
from functools import partial

import numpy as np
import pytest
from datasets import Dataset
from transformers import TrainerCallback
from transformers.trainer_callback import EarlyStoppingCallback

import trl_jax
from compat_tests.effort import THOROUGH, only_thorough, usual
from compat_tests.parity.marks import assert_same_curve, assert_same_weights, steps_of, timeless
from compat_tests.parity.reference import read_weights
from compat_tests.trainer.trainers import FACTS, make, stream, table
from compat_tests.training.runs import Recorder
from trl_jax.training import layout, step

EVERYTHING = {
    "eval_strategy": "steps",
    "eval_steps": 2,
    "save_strategy": "steps",
    "save_steps": 3,
    "gradient_accumulation_steps": 2,
    "num_train_epochs": 3,
    "logging_steps": 4,
    "eval_on_start": True,
    "pad_to_multiple_of": None,
    "disable_tqdm": False,
}


@pytest.fixture(scope="module")
def folder(checkpoint):
    return checkpoint(**FACTS)


def weights(trainer, out):
    trainer.save_model(str(out))
    return read_weights(out)


@pytest.fixture(scope="module")
def whole(folder, tmp_path_factory):
    """(ours, TRL's): trainer, recorded events and the result of train(), for a run that uses most features."""
    trl = pytest.importorskip("trl")
    found = []
    for package in (trl_jax, trl):
        recorder, out = Recorder(), tmp_path_factory.mktemp("whole")
        arguments = {"train": table(22), "eval_dataset": table(8, seed=1), "callbacks": [recorder]}
        trainer = make(package, folder, out, config=EVERYTHING, **arguments)
        found.append((trainer, recorder.events, trainer.train()))
    return found


def test_every_event_of_a_run_is_trls(whole):
    (_, ours, _), (_, theirs, _) = whole
    assert ours == theirs
    assert [ours[0][0], ours[-1][0]] == ["on_init_end", "on_train_end"]


def test_the_logs_of_a_run_with_everything_are_trls(whole):
    """The final entry lacks the metrics of a step that was followed by an evaluation."""
    (ours, *_), (theirs, *_) = whole
    assert_same_curve(ours.state.log_history, theirs.state.log_history)


def test_an_epochs_log_after_an_evaluation_has_its_metrics(folder, tmp_path):
    """TRL logs only the loss, because the model is still in evaluation mode, and adds the metrics to the next epoch's
    entry."""
    config = {"logging_strategy": "epoch", "eval_strategy": "steps", "eval_steps": 2, "num_train_epochs": 2}
    trainer = make(trl_jax, folder, tmp_path, config=config, train=table(8), eval_dataset=table(4, seed=1))
    trainer.train()
    assert [log["num_tokens"] > 0 for log in steps_of(trainer.state.log_history)] == [True, True]


@only_thorough
def test_a_schedule_free_optimizer_warms_up_over_a_share_of_the_steps(folder, tmp_path):
    """transformers passes 0.5 to it as a number of steps: its first step is twice as large."""
    how = {"optim": "schedule_free_adamw", "lr_scheduler_type": "constant", "max_steps": 4}
    share, steps = (make(trl_jax, folder, tmp_path / str(n), config=how | {"warmup_steps": n}) for n in (0.5, 2))
    share.train(), steps.train()
    assert [timeless(log) for log in share.state.log_history] == [timeless(log) for log in steps.state.log_history]


def test_what_train_returns_is_trls(whole):
    (_, _, ours), (_, _, theirs) = whole
    assert (ours.global_step, list(ours.metrics)) == (theirs.global_step, list(theirs.metrics))
    assert abs(ours.training_loss - theirs.training_loss) < 1e-5 and ours.metrics["train_loss"] == ours.training_loss
    assert ours.metrics["total_flos"] == theirs.metrics["total_flos"] > 0
    speed = [run.metrics["train_samples_per_second"] * run.metrics["train_runtime"] for run in (ours, theirs)]
    assert speed == pytest.approx([66, 66], rel=0.02)


def test_the_state_after_a_run_is_trls(whole):
    (ours, *_), (theirs, *_) = whole
    for name in [
        "global_step",
        "epoch",
        "max_steps",
        "num_train_epochs",
        "train_batch_size",
        "logging_steps",
        "eval_steps",
        "save_steps",
        "total_flos",
        "best_metric",
        "best_global_step",
        "best_model_checkpoint",
    ]:
        assert getattr(ours.state, name) == getattr(theirs.state, name), name


def test_a_second_run_goes_on_as_trls_does(folder, tmp_path):
    """It starts from the trained weights, with Adam's state and the token count; everything else is reset."""
    trl = pytest.importorskip("trl")
    ours, theirs = (make(package, folder, tmp_path / package.__name__) for package in (trl_jax, trl))
    for trainer in (ours, theirs):
        trainer.train()
        trainer.train()
    assert_same_curve(ours.state.log_history, theirs.state.log_history)
    assert_same_weights(weights(ours, tmp_path / "a"), weights(theirs, tmp_path / "b"))


@usual("True")
@pytest.mark.parametrize("drop_last", [False, True])
def test_a_stream_shorter_than_max_steps_begins_again(folder, tmp_path, drop_last):
    """5 batches, the last of 2 pairs, which TRL never drops from a stream; epochs are fractions of max_steps."""
    trl = pytest.importorskip("trl")
    config = {"max_steps": 7, "dataloader_drop_last": drop_last}
    ours, theirs = (make(package, folder, tmp_path, train=stream(18), config=config) for package in (trl_jax, trl))
    for trainer in (ours, theirs):
        trainer.train()
    assert_same_curve(ours.state.log_history, theirs.state.log_history)
    epochs = [entry["epoch"] for entry in steps_of(ours.state.log_history)]
    assert epochs == pytest.approx([1 / 7, 2 / 7, 3 / 7, 4 / 7, 5 / 7, 8 / 7, 9 / 7])


def test_the_ragged_end_of_a_stream_is_a_step_of_its_own(folder, tmp_path):
    """In TRL it is not a step: its gradient is added to the first step of the next epoch, which then has three
    batches."""
    config = {"max_steps": 4, "gradient_accumulation_steps": 2}
    trainer = make(trl_jax, folder, tmp_path, train=stream(18), config=config)
    trainer.train()
    steps = steps_of(trainer.state.log_history)
    assert [round(8 * entry["epoch"], 9) for entry in steps] == [2, 4, 5, 10]
    assert steps[3]["loss"] < 1.1 * steps[0]["loss"]


def test_weights_that_are_no_numbers_are_logged_as_such(folder, tmp_path):
    """TRL's filter would log a loss of 0."""
    model = trl_jax.AutoModelForSequenceClassification.from_pretrained(folder)
    model.params["score.weight"] = model.params["score.weight"] * float("nan")
    trainer = make(trl_jax, model, tmp_path, train=table(8), processing_class=tokenizer(folder))
    returned = trainer.train()
    assert all(math.isnan(entry["loss"]) for entry in steps_of(trainer.state.log_history))
    assert math.isnan(returned.training_loss)


def tokenizer(folder):
    from transformers import AutoTokenizer

    return AutoTokenizer.from_pretrained(folder)


def test_no_epochs(folder, tmp_path):
    trainer = make(trl_jax, folder, tmp_path, config={"num_train_epochs": 0})
    returned = trainer.train()
    assert (returned.global_step, returned.training_loss, returned.metrics["epoch"]) == (0, 0.0, 0)


def test_the_model_scores_before_and_after(folder, tmp_path):
    trainer = make(trl_jax, folder, tmp_path)
    ids = [[5, 6, 7, 8]]
    before = float(trainer.model(ids).logits[0, 0])
    assert trainer.train().global_step == 4
    after = float(trainer.model(ids).logits[0, 0])
    assert abs(after - before) > 1e-3
    again = trl_jax.AutoModelForSequenceClassification.from_pretrained(folder)
    assert float(again(ids).logits[0, 0]) == before, "the checkpoint it came from was written to"


def test_a_model_that_was_loaded_before_is_the_one_that_is_trained(folder, tmp_path):
    model = trl_jax.AutoModelForSequenceClassification.from_pretrained(folder)
    head = np.asarray(model.params["score.weight"])
    trainer = make(trl_jax, model, tmp_path, train=table(4))
    trainer.train()
    assert trainer.model is model and not np.array_equal(model.params["score.weight"], head)


class Seen(TrainerCallback):
    """Records the keyword arguments of each event, by name."""

    def __init__(self):
        self.given = {}

    def on_train_begin(self, args, state, control, **kwargs):
        self.given["on_train_begin"] = kwargs

    def on_log(self, args, state, control, **kwargs):
        self.given.setdefault("on_log", kwargs | {"logs": dict(kwargs["logs"])})

    def on_evaluate(self, args, state, control, **kwargs):
        self.given["on_evaluate"] = kwargs

    def on_predict(self, args, state, control, **kwargs):
        self.given["on_predict"] = kwargs


def test_callbacks_are_given_what_they_look_for(folder, tmp_path):
    seen = Seen()
    config = {"eval_strategy": "steps", "eval_steps": 4}
    trainer = make(trl_jax, folder, tmp_path, eval_dataset=table(4), callbacks=[seen], config=config)
    trainer.train()
    trainer.predict(table(4))
    begin, log, evaluate = (seen.given[name] for name in ("on_train_begin", "on_log", "on_evaluate"))
    for given in (begin, log, evaluate):
        assert given["model"] is trainer.model and given["processing_class"] is trainer.processing_class
    assert len(begin["train_dataloader"]) == 4 and len(evaluate["eval_dataloader"]) == 1
    assert log["logs"] == {k: v for k, v in trainer.state.log_history[0].items() if k != "step"}
    assert timeless(evaluate["metrics"]).items() <= trainer.state.log_history[4].items()
    assert list(timeless(seen.given["on_predict"]["metrics"])) == ["test_loss"]


def test_the_best_model_is_loaded_and_kept_alone(folder, tmp_path):
    values = iter([0.0, 1.0, 5.0, 2.0, 3.0])  # the first value is for the trial of metrics before training
    config = {
        "eval_strategy": "steps",
        "eval_steps": 1,
        "save_strategy": "steps",
        "save_steps": 1,
        "save_total_limit": 1,
        "load_best_model_at_end": True,
        "metric_for_best_model": "mine",
        "greater_is_better": True,
        "num_train_epochs": 3,
    }
    trainer = make(
        trl_jax,
        folder,
        tmp_path,
        config=config,
        eval_dataset=table(4),
        callbacks=[EarlyStoppingCallback(2)],
        compute_metrics=lambda _: {"mine": next(values)},
    )
    trainer.train()
    assert trainer.state.global_step == 4 and trainer.state.best_metric == 5.0
    assert trainer.state.best_model_checkpoint == str(tmp_path / "checkpoint-2")
    assert [path.name for path in tmp_path.glob("checkpoint-*")] == ["checkpoint-2"]
    assert_same_weights(weights(trainer, tmp_path / "final"), read_weights(tmp_path / "checkpoint-2"), 0.0)


def test_an_unknown_metric_for_the_best_is_named(folder, tmp_path):
    config = {
        "eval_strategy": "steps",
        "eval_steps": 1,
        "save_strategy": "no",
        "metric_for_best_model": "acuracy",
    }
    trainer = make(trl_jax, folder, tmp_path, config=config, eval_dataset=table(4))
    with pytest.raises(
        KeyError, match="asks for eval_acuracy, which the evaluation does not report. Reported: eval_loss"
    ):
        trainer.train()


def test_one_program_a_shape(folder, tmp_path, caplog):
    """A ragged last step and a short last micro-batch are padded to the shape of the others."""
    config = {"gradient_accumulation_steps": 2, "num_train_epochs": 2, "remat_policy": "nothing_saveable"}
    trainer = make(trl_jax, folder, tmp_path, train=table(18), config=config)
    with caplog.at_level(logging.INFO, "trl_jax"):
        trainer.train()
    assert trainer.state.global_step == 6
    assert len([text for text in caplog.messages if text.startswith("The step compiles for shape")]) == 1


@only_thorough  # the next test covers it
def test_programs_made_beside_the_steps_are_those_of_the_steps(folder, tmp_path, monkeypatch):
    """As on a TPU, whose host is idle: the results are bitwise the same, also after resuming."""
    found, asked, rows, real = {}, set(), table(24), step.Programs.program_for
    monkeypatch.setattr(layout, "_ON_CPUS", 0.0)  # many different lengths

    def program_for(self, *given):
        asked.add((threading.current_thread() is threading.main_thread(), given[2].tokens.shape))
        return real(self, *given)

    monkeypatch.setattr(step.Programs, "program_for", program_for)
    for ahead in (False, True):
        monkeypatch.setattr(step, "compiles_ahead", lambda device, ahead=ahead: ahead)
        out, config = tmp_path / str(ahead), {"save_strategy": "steps", "save_steps": 4}
        whole = make(trl_jax, folder, out, train=rows, config=config)
        whole.train()
        rest = make(trl_jax, folder, out, train=rows, config=config)
        rest.train(resume_from_checkpoint=str(out / "checkpoint-4"))
        for run in (whole, rest):
            found.setdefault(ahead, []).append(steps_of(run.state.log_history))
    assert found[True] == found[False] and found[True][0] == found[True][1]
    assert len(asked) >= 4 and {shape for main, shape in asked if main} == {shape for main, shape in asked if not main}


def dearly(plan_layout, *given, **how):
    """Plan with compile costs equal to 2,000 tokens per program."""
    return plan_layout(*given, **how | {"bucket_cost": 2000})


def test_a_longer_program_serves_until_one_is_made(folder, tmp_path, monkeypatch):
    """The results are the same up to rounding, and bitwise the same when resumed."""
    monkeypatch.setattr(layout, "plan_layout", partial(dearly, layout.plan_layout))
    monkeypatch.setattr(layout, "PROGRAMS_AT_ONCE", 1)
    rows = Dataset.from_list([
        {side: f"{' '.join(words)} {side}" for side in ("chosen", "rejected")}
        for length in (400, 10, 10, 400, 10, 10) for words in [["bread"] * length] * 4
    ])  # fmt: skip
    how = {"save_strategy": "steps", "save_steps": 2, "train_sampling_strategy": "sequential", "max_length": None}
    runs, lengths = [], []
    for ahead, resumed in ((False, None), (True, None), (True, str(tmp_path / "True" / "checkpoint-2"))):
        for package in (layout, step):
            monkeypatch.setattr(package, "compiles_ahead", lambda device, ahead=ahead: ahead)
        trainer = make(trl_jax, folder, tmp_path / str(ahead), train=rows, config=how)
        trainer.train(resume_from_checkpoint=resumed)
        runs.append([log["loss"] for log in steps_of(trainer.state.log_history)])
        lengths.append([step.arrays.tokens.shape[-1] for step in trainer.get_train_dataloader().steps])
    (long, short, *_), served = lengths[0], lengths[1]
    assert lengths[0] == [long, short, short] * 2 and served == lengths[2] != lengths[0]
    assert runs[1] == runs[2] and runs[1] == pytest.approx(runs[0], rel=0, abs=2e-6)


def test_gradient_checkpointing_changes_nothing(folder, tmp_path, monkeypatch, caplog):
    """Under every policy; if nothing fits, the default recomputes whole layers and logs it."""
    losses, ways = [], [({"gradient_checkpointing": False}, 1), ({}, 1)]
    if THOROUGH:
        ways += [({"remat_policy": "nothing_saveable"}, 1), ({}, 1 << 40)]
    for config, room in ways:
        monkeypatch.setattr(step, "device_memory_limit", lambda device, room=room: room)
        trainer = make(trl_jax, folder, tmp_path, config=config)
        caplog.clear()
        with caplog.at_level(logging.INFO, "trl_jax"):
            trainer.train()
        assert ("recomputes whole layers" in caplog.text) == (config == {} and room == 1)
        losses.append([entry["loss"] for entry in steps_of(trainer.state.log_history)])
    for other in losses[1:]:
        assert losses[0] == pytest.approx(other, rel=0, abs=1e-6)


def test_a_remat_policy_that_is_not_is_refused():
    with pytest.raises(ValueError, match="remat_policy='all' is not in this release of trl_jax; supported: auto, noth"):
        trl_jax.RewardConfig("out", remat_policy="all")


def test_an_error_in_training_leaves_the_trainer_out_of_it(folder, tmp_path):
    class Fails(TrainerCallback):
        def on_step_end(self, args, state, control, **kwargs):
            raise RuntimeError("mine")

    trainer = make(trl_jax, folder, tmp_path, callbacks=[Fails()])
    with pytest.raises(RuntimeError, match="mine"):
        trainer.train()
    assert trainer.is_in_train is False
    assert np.isfinite(trainer.model([[5, 6]]).logits).all()
