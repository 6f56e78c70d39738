"""Trackers and the live table, for real: what they wrote or drew is read back."""

from __future__ import annotations

import io
import json
import sqlite3
import struct

import pytest

import trl_jax
from compat_tests.trainer.trainers import FACTS, make, table


@pytest.fixture(scope="module")
def folder(checkpoint):
    return checkpoint(**FACTS)


@pytest.mark.filterwarnings("ignore::FutureWarning")
def test_tensorboard_has_every_number_that_was_logged(folder, tmp_path, monkeypatch):
    pytest.importorskip("tensorboard")
    from tensorboard.backend.event_processing.event_accumulator import EventAccumulator

    monkeypatch.setenv("TENSORBOARD_LOGGING_DIR", "unset")  # restored afterwards: logging_dir sets it
    config = {
        "report_to": "tensorboard",
        "logging_dir": str(tmp_path / "logs"),
        "eval_strategy": "steps",
        "eval_steps": 2,
        "max_steps": 2,
    }
    trainer = make(trl_jax, folder, tmp_path, config=config, eval_dataset=table(4))
    trainer.train()
    trainer.end()
    read = EventAccumulator(str(tmp_path / "logs"))
    read.Reload()
    losses = [(event.step, event.value) for event in read.Scalars("train/loss")]
    assert losses == [
        (log["step"], pytest.approx(log["loss"], rel=1e-6)) for log in trainer.state.log_history if "loss" in log
    ]
    assert {"train/margin", "train/accuracy", "train/grad_norm", "eval/loss", "eval/accuracy"} <= set(
        read.Tags()["scalars"]
    )
    assert '"learning_rate": 0.0005' in read.Tensors("args/text_summary")[0].tensor_proto.string_val[0].decode()


def run_with(tracker, folder, tmp_path):
    """Two steps and two evaluations under `report_to=tracker`, and what the run logged in its callbacks' names."""
    config = {"report_to": tracker, "run_name": "mine", "project": "ours", "max_steps": 2}
    config |= {"eval_strategy": "steps", "eval_steps": 1}
    trainer = make(trl_jax, folder, tmp_path / "run", config=config, eval_dataset=table(4))
    trainer.train()
    trainer.end()
    trainer.end()  # nothing is open any more
    return trainer, [_renamed(log) for log in trainer.state.log_history if "train_loss" not in log]


def _renamed(log):
    step = {"train/global_step": log["step"], "train/epoch": log["epoch"]}
    named = {
        f"eval/{name.removeprefix('eval_')}" if name.startswith("eval_") else f"train/{name}": value
        for name, value in log.items()
        if name not in ("step", "epoch")
    }
    return named | step


def test_wandb_has_offline_what_was_logged(folder, tmp_path, monkeypatch):
    monkeypatch.setenv("WANDB_MODE", "offline")
    monkeypatch.setenv("WANDB_DIR", str(tmp_path))
    wandb = pytest.importorskip("wandb", reason="wandb is not installed")
    trainer, logged = run_with("wandb", folder, tmp_path)
    wandb.teardown()
    [file] = tmp_path.glob("wandb/offline-run-*/run-*.wandb")
    records = list(_records(file.read_bytes()))
    [run] = [record.run for record in records if record.WhichOneof("record_type") == "run"]
    assert run.display_name == "mine"
    history = [
        {item.key or item.nested_key[0]: json.loads(item.value_json) for item in record.history.item}
        for record in records
        if record.WhichOneof("record_type") == "history"
    ]
    assert [{name: row[name] for name in log} for row, log in zip(history, logged, strict=False)] == logged
    assert history[-1]["train/global_step"] == 2
    told = {
        (item.key or item.nested_key[0]): json.loads(item.value_json)
        for record in records
        for update in (record.run.config.update, record.config.update)
        for item in update
    }
    assert told["learning_rate"] == 5e-4 and told["model_type"] == "llama"
    assert told["model/num_parameters"] == trainer.model.num_parameters()


def _records(content):
    """A .wandb file: LevelDB's log format, blocks of 32 KiB, behind a header of seven bytes."""
    from wandb.proto.wandb_internal_pb2 import Record

    at, held, block = 7, b"", 32768
    while at + 7 <= len(content):
        if block - at % block < 7:  # what is left of a block holds no header
            at += block - at % block
            continue
        _, length, kind = struct.unpack("<IHB", content[at : at + 7])
        held, at = held + content[at + 7 : at + 7 + length], at + 7 + length
        if kind in (1, 4):  # whole, or the last part
            yield Record.FromString(held)
            held = b""


def test_trackio_has_locally_what_was_logged(folder, tmp_path, monkeypatch):
    monkeypatch.setenv("TRACKIO_DIR", str(tmp_path / "trackio"))
    trackio = pytest.importorskip("trackio", reason="trackio is not installed")
    trainer, logged = run_with("trackio", folder, tmp_path)
    rows = sqlite3.connect(tmp_path / "trackio/ours.db").execute("select run_name, metrics from metrics order by id")
    held = [(name, json.loads(metrics)) for name, metrics in rows]
    assert {name for name, _ in held} == {"mine"}
    assert [{key: row[key] for key in log} for (_, row), log in zip(held, logged, strict=False)] == logged
    [run] = trackio.Api().runs("ours")
    assert run.config["learning_rate"] == 5e-4 and run.config["model_type"] == "llama"
    assert run.config["model/num_parameters"] == trainer.model.num_parameters()


def test_the_rich_callback_draws_bars_and_the_last_log(folder, tmp_path, monkeypatch):
    rich = pytest.importorskip("rich")
    drawn = io.StringIO()
    console = rich.console.Console if "console" in vars(rich) else __import__("rich.console").console.Console
    monkeypatch.setattr("rich._console", console(file=drawn, force_terminal=True, width=100), raising=False)
    config = {"eval_strategy": "steps", "eval_steps": 1, "max_steps": 2}
    callback = trl_jax.RichProgressCallback()
    trainer = make(trl_jax, folder, tmp_path, config=config, eval_dataset=table(4), callbacks=[callback])
    trainer.train()
    shown = drawn.getvalue()
    for words in ("Training", "Evaluation", "Step 1", "Step 2", "grad_norm", "eval_accuracy", "Metric", "Value"):
        assert words in shown, words
    trainer.evaluate()  # after the end it draws nothing, and does no harm
    assert drawn.getvalue() == shown


def test_without_rich_the_callback_says_what_to_install(monkeypatch):
    monkeypatch.setattr("importlib.util.find_spec", lambda name: None)
    with pytest.raises(ImportError, match="draws with rich, which is not installed: pip install rich."):
        trl_jax.RichProgressCallback()
