"""What a user sees of online training: the text beside the progress bar, and the plot."""

from __future__ import annotations

import io
import re
import sys
from xml.etree import ElementTree

import pytest
from datasets import Dataset

from compat_tests.parity.dpo_cases import SMALL
from compat_tests.parity.grpo_cases import length_reward, prompt_rows
from compat_tests.parity.reference import BASE
from trl_jax.rollout import completions_log
from trl_jax.trainer.grpo_trainer import GRPOTrainer
from trl_jax.training import logging

SVG = "{http://www.w3.org/2000/svg}"
CONFIG = {
    "max_steps": 2, "num_generations": 4, "max_completion_length": 20, "per_device_train_batch_size": 8, "beta": 0.1,
    "per_device_eval_batch_size": 8, "eval_strategy": "steps", "eval_steps": 1, "disable_tqdm": False,
}  # fmt: skip


class Terminal(io.StringIO):
    def isatty(self):
        return True


@pytest.fixture(scope="module")
def trainer(checkpoint, tmp_path_factory):
    args = GRPOTrainer.config_class(str(tmp_path_factory.mktemp("seen")), **BASE | CONFIG)
    rows = Dataset.from_list(prompt_rows(8))
    return GRPOTrainer(str(checkpoint(**SMALL)), length_reward, args, rows, rows.take(2))


@pytest.mark.parametrize("stream", [Terminal, io.StringIO])
def test_a_terminal_says_what_goes_on_and_a_log_does_not(stream, trainer, monkeypatch):
    monkeypatch.setattr(sys, "stderr", stream())
    monkeypatch.setattr(logging, "_SECONDS", 0)
    trainer.train()
    text, shown = sys.stderr.getvalue(), stream is Terminal
    assert "2/2" in text  # the bar itself
    assert bool(re.search(r"generating [0-7]/8, [\d,]+ tokens/s", text)) == shown
    assert bool(re.search(r"generating 8/8, [\d,]+ tokens/s", text)) == shown
    for words in ("rewards of 8 completions", "reward 3", "training", "evaluating"):
        assert (words in text) == shown, words


def test_the_picture_has_what_was_logged(trainer, tmp_path):
    history = [
        {"step": step, "reward": step / 2, "completions/mean_length": 7.0, "entropy": 3.0 - step, "kl": None}
        for step in (1, 2, 3)
    ] + [{"step": 2, "eval_reward": 1}, {"step": 3, "reward": float("nan"), "train_loss": 0.1}]
    completions_log.write_picture(tmp_path, history)
    root = ElementTree.parse(tmp_path / "training.svg").getroot()
    lines = [line.get("points").split() for line in root.iter(f"{SVG}polyline")]
    assert list(map(len, lines)) == [3, 1, 3, 3]  # reward and its evaluations, length, entropy
    heights = [[float(point.split(",")[1]) for point in line] for line in lines]
    assert heights[0] == sorted(heights[0], reverse=True) and heights[3] == sorted(heights[3])
    assert len(set(heights[2])) == 1 and len(list(root.iter(f"{SVG}circle"))) == 10
    assert "KL" not in (tmp_path / "training.svg").read_text()


def test_a_run_draws_as_it_logs(trainer):
    path = trainer.args.output_dir + "/training.svg"
    titles = [text.text for text in ElementTree.parse(path).getroot().iter(f"{SVG}text") if text.get("font-weight")]
    assert [title.partition(",")[0] for title in titles] == [
        "mean reward (green: evaluation)", "mean completion length", "entropy", "KL from the reference"
    ]  # fmt: skip


def test_long_runs_are_thinned_and_nothing_is_drawn_of_nothing(tmp_path):
    completions_log.write_picture(tmp_path, [{"step": 1, "loss": 0.5}, {"step": 1, "reward": None}])
    assert not list(tmp_path.iterdir())
    completions_log.write_picture(tmp_path, [{"step": step, "reward": 0.0} for step in range(1, 10_001)])
    root = ElementTree.parse(tmp_path / "training.svg").getroot()
    [line] = [line.get("points").split() for line in root.iter(f"{SVG}polyline")]
    assert 300 < len(line) <= 402 and line[-1].startswith("616.0,")
