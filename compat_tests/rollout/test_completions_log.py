"""The table of completions: shown as TRL shows it, written and given to trackers, one for each mode."""

from __future__ import annotations

import importlib.util
import math
import random
import types

import huggingface_hub
import numpy as np
import pandas as pd
import pytest

from trl_jax.rollout.completions.log import CompletionsLog, trackers
from trl_jax.rollout.completions.repo import CompletionsRepo
from trl_jax.rollout.completions.table import print_completions

NAMES = ["accuracy", "form"]
TALK = [{"role": "user", "content": "What is 1 + 1?"}]
ANSWER = [{"role": "assistant", "reasoning_content": "Easy.", "content": [
    {"type": "image"}, {"type": "text", "text": "Two."}], "tool_calls": [
    {"function": {"name": "add", "arguments": '{"a": 1, "b": 1}'}}, {"function": {"name": "done"}}]}]  # fmt: skip


def log(**options):
    return CompletionsLog(NAMES, 4, **options)


def add(made, mode="train", first=0, count=2, **extra):
    texts = [f"{mode} {number}" for number in range(first, first + count)]
    rewards = np.asarray([[number, np.nan] for number in range(first, first + count)], np.float32)
    made.add(mode, [f"p {text}" for text in texts], texts, rewards, rewards[:, 0] - 0.5, extra)


def test_the_last_ones_are_kept_and_a_column_is_none_where_it_was_not_given():
    made = log()
    add(made, count=2)
    add(made, first=2, note=["a", "b"])
    add(made, first=4, count=1, other=[7])
    table = made.table("train", 9)
    assert list(table) == ["step", "prompt", "completion", *NAMES, "note", "other", "advantage"]
    assert table["completion"] == ["train 1", "train 2", "train 3", "train 4"] and table["step"] == [9] * 4
    assert table["note"] == [None, "a", "b", None] and table["other"] == [None, None, None, 7]
    assert table["accuracy"] == [1, 2, 3, 4] and table["advantage"] == [0.5, 1.5, 2.5, 3.5]
    assert all(map(math.isnan, table["form"]))


def test_an_evaluation_leaves_the_table_and_the_file_of_training(tmp_path):
    told = []
    made = log(folder=tmp_path / "completions", repo=told.append, num_to_print=0)
    made.log("eval", 3)
    assert told == []  # nothing was written yet
    add(made)
    add(made, "eval", count=1, note=["x"])
    made.log("train", 3)
    made.log("eval", 3)
    assert [path.name for path in told] == ["completions_00003.parquet", "eval_completions_00003.parquet"]
    train, evaluated = map(pd.read_parquet, told)
    assert list(train) == ["step", "prompt", "completion", *NAMES, "advantage"] and len(train) == 2
    assert evaluated["note"].tolist() == ["x"] and evaluated["completion"].tolist() == ["eval 0"]


def test_messages_are_written(tmp_path):
    made = log(folder=tmp_path, num_to_print=0)
    made.add("train", [TALK], [[{"role": "assistant", "content": "2"}]], np.ones((1, 2), np.float32), np.ones(1))
    made.log("train", 12)
    [row] = pd.read_parquet(tmp_path / "completions_00012.parquet").to_dict("records")
    assert list(row["prompt"]) == TALK and row["completion"][0]["content"] == "2"


def test_trackers_get_each_prompt_once_where_that_is_asked_for():
    seen, once = [], []
    for unique, tables in ((False, seen), (True, once)):
        made = log(num_to_print=0, unique_prompts=unique, trackers=[tables.append])
        made.add("train", [TALK, TALK], ["a", "b"], np.ones((2, 2), np.float32), np.ones(2))
        made.log("train", 1)
    assert [len(seen[0]), len(once[0])] == [2, 1]
    assert trackers(["tensorboard"]) == [] and len(trackers(["wandb", "trackio", "none"])) == 2


def test_what_is_kept_is_saved_and_taken_up():
    made, again = log(), log()
    add(made, note=[{"a": 1}, None])
    add(made, "eval", count=1)
    again.restore(made.state())
    for mode in ("train", "eval"):
        assert repr(again.table(mode, 5)) == repr(made.table(mode, 5))
    add(made, first=2, count=4)
    add(again, first=2, count=4)
    assert repr(again.table("train", 5)) == repr(made.table("train", 5))  # the last four


pytestmark = pytest.mark.skipif(importlib.util.find_spec("rich") is None, reason="rich is not installed")


def test_it_is_shown_as_in_trl(capsys, monkeypatch):
    utils = pytest.importorskip("trl.trainer.utils")
    monkeypatch.setattr("rich.console.Console._environ", {"COLUMNS": "150"})  # rich keeps what it was imported with
    prompts, completions, extra = [TALK, "plain"], [ANSWER, "text"], {"note": ["a", None]}
    rewards, advantages = {"accuracy": [1.0, 0.333], "form": [float("nan"), -2.0]}, [0.5, -0.5]
    utils.print_prompt_completions_sample(prompts, completions, rewards, advantages, 42, extra=extra)
    wanted = capsys.readouterr().out
    table = {"step": [42, 42], "prompt": prompts, "completion": completions, **rewards, **extra}
    print_completions(table | {"advantage": advantages}, NAMES, 42)
    assert capsys.readouterr().out == wanted and "add(a=1, b=1)" in wanted
    for seed in range(4):  # the same row, of the generator that both draw from
        random.seed(seed)
        utils.print_prompt_completions_sample(prompts, completions, rewards, advantages, 42, 1, extra)
        wanted = capsys.readouterr().out
        random.seed(seed)
        print_completions(table | {"advantage": advantages}, NAMES, 42, 1)
        assert capsys.readouterr().out == wanted and wanted.count("│") > 5


def test_some_of_them_are_drawn(capsys):
    made = log(num_to_print=2)
    add(made, count=4)
    made.log("train", 1)
    shown = capsys.readouterr().out
    assert sum(f"p train {number}" in shown for number in range(4)) == 2
    made.num_to_print = 9
    made.log("train", 1)
    assert all(f"p train {number}" in capsys.readouterr().out or number for number in range(4))


def test_what_a_terminal_would_obey_is_shown_as_text(capsys):
    made = log()
    made.add("train", ["p"], ["\x1b[2Jgone"], np.ones((1, 2), np.float32), np.ones(1))
    made.log("train", 1)
    assert "\x1b[2J" not in capsys.readouterr().out


class Hub:
    """huggingface_hub's HfApi, as far as it is called: what was made, and the files of each commit."""

    made, commits = [], []

    def __init__(self, token):
        self.token = token

    def create_repo(self, name, **how):
        self.made.append((name, self.token, how))
        return types.SimpleNamespace(repo_id=f"somebody/{name}")

    def upload_folder(self, *, repo_id, folder_path, allow_patterns, repo_type, **how):
        sizes = {name: (folder_path / name).stat().st_size for name in allow_patterns}
        self.commits.append((repo_id, repo_type, sizes))


def test_files_go_to_a_dataset_on_the_hub_once_in_a_while_and_at_the_end(tmp_path, monkeypatch):
    monkeypatch.setattr(huggingface_hub, "HfApi", Hub)
    repo = CompletionsRepo("mine", token="hf_secret", private=True)
    assert Hub.made == [("mine", "hf_secret", {"private": True, "exist_ok": True, "repo_type": "dataset"})]
    made = log(folder=tmp_path / "completions", repo=repo, num_to_print=0)
    for step in (1, 2, 3):
        made.add("train", ["p"], ["c"], np.ones((1, 2), np.float32), np.zeros(1))
        made.log("train", step)
        repo._publisher.wait()
    assert len(Hub.commits) == 1  # the others came within two minutes
    made.finish()
    names = [sorted(files) for repo_id, kind, files in Hub.commits if (repo_id, kind) == ("somebody/mine", "dataset")]
    assert names == [["README.md", "completions_00001.parquet"],
                     ["README.md", "completions_00002.parquet", "completions_00003.parquet"]]  # fmt: skip
    made.finish()
    assert len(Hub.commits) == 2 and all(size for _, _, files in Hub.commits for size in files.values())
