"""Trackers and the live table: what they wrote or drew is read back."""

from __future__ import annotations

import importlib.machinery
import io
import json
import logging
import sqlite3
import struct
import sys
import types
from pathlib import Path
from types import SimpleNamespace

import numpy as np
import pytest
from safetensors.numpy import load_file
from transformers.integrations import integration_utils
from transformers.trainer_callback import TrainerControl, TrainerState

import trl_jax
from compat_tests.trainer.trainers import FACTS, make, table
from trl_jax.training.callbacks import Callbacks, without_torch


@pytest.fixture(scope="module")
def folder(checkpoint):
    return checkpoint(**FACTS)


@pytest.mark.filterwarnings("ignore::FutureWarning")
def test_tensorboard_has_every_number_that_was_logged(folder, tmp_path, monkeypatch):
    pytest.importorskip("tensorboard")
    from tensorboard.backend.event_processing.event_accumulator import EventAccumulator

    monkeypatch.setenv("TENSORBOARD_LOGGING_DIR", "unset")  # so that monkeypatch restores it: logging_dir sets it
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
    """Two steps and two evaluations with `report_to=tracker`; returns the run's logs with the keys that callbacks
    use."""
    config = {"report_to": tracker, "run_name": "mine", "project": "ours", "max_steps": 2}
    config |= {"eval_strategy": "steps", "eval_steps": 1}
    trainer = make(trl_jax, folder, tmp_path / "run", config=config, eval_dataset=table(4))
    trainer.train()
    trainer.end()
    trainer.end()  # nothing is left open
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
    """Parse a .wandb file: LevelDB's log format in blocks of 32 KiB, after a header of seven bytes."""
    from wandb.proto.wandb_internal_pb2 import Record

    at, held, block = 7, b"", 32768
    while at + 7 <= len(content):
        if block - at % block < 7:  # the rest of a block is too short for a header
            at += block - at % block
            continue
        _, length, kind = struct.unpack("<IHB", content[at : at + 7])
        held, at = held + content[at + 7 : at + 7 + length], at + 7 + length
        if kind in (1, 4):  # a full record, or its last part
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


# ---- trackers that need torch, with fakes for their libraries -----------------------------------------------------


@pytest.fixture
def module(monkeypatch):
    """Creates an importable fake module with these members."""

    def made(name, **members):
        fake = types.ModuleType(name)
        fake.__spec__, fake.__path__ = importlib.machinery.ModuleSpec(name, None), []
        vars(fake).update(members)
        monkeypatch.setitem(sys.modules, name, fake)
        return fake

    return made


class Artifact:
    """A fake wandb artifact that reads its files when they are added."""

    def __init__(self, name, type, metadata):
        self.name, self.metadata, self.files = name, metadata, {}

    def new_file(self, name, mode):
        return io.BytesIO()

    def add_dir(self, path):
        self.files = {file.name: file.read_bytes() for file in Path(path).iterdir() if file.is_file()}


@pytest.fixture
def wandb(module):
    logged = []

    def log_artifact(artifact, aliases):
        logged.append((aliases, artifact))

    def watch(model, **options):
        raise ValueError("Expected a pytorch model (torch.nn.Module).")

    class Config(dict):
        def update(self, values, allow_val_change):
            super().update(values)

    fake = module("wandb", run=None, config=Config(), summary={"train/loss": 0.5, "_step": 3}, watch=watch,
                  Artifact=Artifact, log=lambda values: None, log_artifact=log_artifact)  # fmt: skip

    def init(**options):
        fake.run = SimpleNamespace(id="7", name="mine", url="", summary={}, _label=lambda code: None,
                                   log_artifact=log_artifact)  # fmt: skip

    fake.init, fake.logged = init, logged
    module("wandb.sdk.lib.config_util", ConfigError=type("ConfigError", (Exception,), {}))
    for name in ("wandb.sdk", "wandb.sdk.lib"):
        module(name)
    return fake


def test_wandb_gets_checkpoints_and_the_final_model_and_watch_is_left_out(folder, tmp_path, monkeypatch, wandb, caplog):
    monkeypatch.setenv("WANDB_LOG_MODEL", "checkpoint")
    monkeypatch.setenv("WANDB_WATCH", "all")
    ended = []

    class Mine(integration_utils.WandbCallback):
        def on_train_end(self, *given, **others):
            super().on_train_end(*given, **others)
            ended.append(self)

    mine, config = Mine(), {"max_steps": 1, "save_strategy": "steps", "save_steps": 1, "run_name": "mine"}
    trainer = make(trl_jax, folder, tmp_path, config=config, callbacks=[mine])
    with caplog.at_level(logging.WARNING):
        trainer.train()
    assert "WANDB_WATCH=all is left out: wandb.watch follows the gradients of torch modules" in caplog.text
    assert ended == [mine] and isinstance(mine, Mine) and mine in trainer.callback_handler.callbacks
    [(_, saved), (aliases, final)] = wandb.logged[1:]
    assert [aliases for aliases, _ in wandb.logged] == [
        ["base_model"], ["epoch_0.25", "checkpoint_global_step_1"], ["final_model"]]  # fmt: skip
    assert final.metadata == {"train/loss": 0.5, "final_model": True} and final.name == "model-mine"
    assert {"config.json", "tokenizer.json", "training_args.json"} < final.files.keys()
    assert final.files["model.safetensors"] == saved.files["model.safetensors"]
    trainer.remove_callback(mine)
    assert trainer.pop_callback(integration_utils.WandbCallback) is None


def test_dvclive_gets_the_final_model(folder, tmp_path, module):
    calls = []

    class Live:
        def log_params(self, params):
            calls.append("params")

        def log_artifact(self, path, **options):
            calls.append((path, options, load_file(f"{path}/model.safetensors")))

        def log_metric(self, name, value):
            calls.append(name)

        def next_step(self):
            pass

        def end(self):
            calls.append("end")

    module("dvclive", Live=Live)
    module("dvclive.plots", Metric=SimpleNamespace(could_log=lambda value: True))
    module("dvclive.utils", standardize_metric_name=lambda name, framework: name)
    callback = integration_utils.DVCLiveCallback(log_model=True)
    trainer = make(trl_jax, folder, tmp_path, config={"max_steps": 1}, callbacks=[callback])
    trainer.train()
    *_, (path, options, weights), last = calls
    assert (calls[0], last, path) == ("params", "end", str(tmp_path / "last")) and "loss" in calls
    assert options == {"name": "last", "type": "model", "copy": True}
    np.testing.assert_array_equal(weights["score.weight"], trainer.model.params["score.weight"])


def test_trackers_that_name_torch_do_without_it(module, monkeypatch):
    monkeypatch.delattr(integration_utils, "torch", raising=False)  # as if it were not installed
    for name in ("torch.utils.tensorboard", "tensorboardX"):
        monkeypatch.setitem(sys.modules, name, None)
    logged = []
    limits = SimpleNamespace(MAX_PARAM_VAL_LENGTH=100, MAX_PARAMS_TAGS_PER_BATCH=9)
    module("mlflow", utils=SimpleNamespace(validation=limits), active_run=lambda: None,
           log_metrics=lambda metrics, **options: logged.append(metrics))  # fmt: skip
    module("codecarbon", EmissionsTracker=SimpleNamespace)
    monkeypatch.setattr(integration_utils, "is_mlflow_available", lambda: True)
    given = [integration_utils.MLflowCallback, integration_utils.CodeCarbonCallback]
    handler = Callbacks(given, None, None, None, None)
    mlflow, carbon = handler.callbacks
    mlflow._initialized, mlflow._async_log = True, False
    args, state, control = SimpleNamespace(output_dir="out"), TrainerState(), TrainerControl()
    handler.on_log(args, state, control, {"reward": None, "loss": 0.5})
    handler.on_init_end(args, state, control)
    assert logged == [{"loss": 0.5}] and carbon.tracker.output_dir == "out"
    monkeypatch.setattr(integration_utils, "is_tensorboard_available", lambda: True)
    with pytest.raises(ImportError, match="^report_to='tensorboard' writes with tensorboardX where torch is not ins"):
        handler.add_callback(integration_utils.TensorBoardCallback)


def test_dagshub_gets_the_output_folder_without_a_dataset_that_torch_would_write(module, monkeypatch, tmp_path, caplog):
    monkeypatch.delattr(integration_utils, "torch", raising=False)  # as if it were not installed
    added = []
    directory = SimpleNamespace(add_dir=added.append)
    module("dagshub.upload", Repo=lambda **place: SimpleNamespace(directory=lambda path: directory))
    module("dagshub")
    limits = SimpleNamespace(MAX_PARAM_VAL_LENGTH=100, MAX_PARAMS_TAGS_PER_BATCH=9)
    module("mlflow", utils=SimpleNamespace(validation=limits))
    for name in ("is_mlflow_available", "is_dagshub_available"):
        monkeypatch.setattr(integration_utils, name, lambda: True)
    monkeypatch.setenv("MLFLOW_TRACKING_URI", "https://dagshub.com/me/project.mlflow")
    monkeypatch.setenv("HF_DAGSHUB_LOG_ARTIFACTS", "1")
    monkeypatch.setattr(integration_utils.MLflowCallback, "setup", lambda self, *given: None)
    handler = Callbacks([integration_utils.DagsHubCallback], None, None, None, None)
    [dagshub] = handler.callbacks
    dagshub.setup()
    dagshub._auto_end_run = False  # which the skipped part of setup() sets
    args, state, control = SimpleNamespace(output_dir=str(tmp_path)), TrainerState(), TrainerControl()
    handler.on_train_end(args, state, control)
    assert added == [str(tmp_path)] and "left out" not in caplog.text
    dagshub.train_dataloader = SimpleNamespace(dataset=[1])
    handler.on_train_end(args, state, control)
    assert added == [str(tmp_path)] * 2 and "DagsHubCallback.train_dataloader is left out" in caplog.text


def test_other_callbacks_keep_their_class():
    wandb = without_torch(integration_utils.WandbCallback)
    for kind in (integration_utils.NeptuneCallback, trl_jax.BEMACallback, wandb):
        assert without_torch(kind) is kind
    assert issubclass(without_torch(integration_utils.DagsHubCallback), integration_utils.DagsHubCallback)


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
    trainer.evaluate()  # after the end it draws nothing and does not fail
    assert drawn.getvalue() == shown


def test_without_rich_the_callback_says_what_to_install(monkeypatch):
    monkeypatch.setattr("importlib.util.find_spec", lambda name: None)
    with pytest.raises(ImportError, match="draws with rich, which is not installed: pip install rich."):
        trl_jax.RichProgressCallback()
