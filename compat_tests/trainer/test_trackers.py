"""Trackers and the live table, for real: what they wrote or drew is read back."""

from __future__ import annotations

import io

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
