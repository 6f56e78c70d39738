"""The completions table of each mode: printed as by TRL, written to Parquet, and passed to trackers."""

from __future__ import annotations

import importlib.util
import math
import random
import types

import huggingface_hub
import numpy as np
import pandas as pd
import pytest

from trl_jax.rollout import completions_log
from trl_jax.rollout.completions_log import CompletionsLog, CompletionsRepo, plain, print_completions, trackers

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
    monkeypatch.setattr("rich.console.Console._environ", {"COLUMNS": "150"})  # rich captures os.environ at import
    prompts, completions, extra = [TALK, "plain"], [ANSWER, "text"], {"note": ["a", None]}
    rewards, advantages = {"accuracy": [1.0, 0.333], "form": [float("nan"), -2.0]}, [0.5, -0.5]
    utils.print_prompt_completions_sample(prompts, completions, rewards, advantages, 42, extra=extra)
    wanted = capsys.readouterr().out
    table = {"step": [42, 42], "prompt": prompts, "completion": completions, **rewards, **extra}
    print_completions(table | {"advantage": advantages}, NAMES, 42)
    assert capsys.readouterr().out == wanted and "add(a=1, b=1)" in wanted
    for seed in range(4):  # both draw the row from the `random` module
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


SELF = [1]
SELF.append(SELF)
DEEP: list = []
for _ in range(60):
    DEEP = [DEEP, DEEP]  # 2**60 items in all


class Unprintable:
    def __str__(self):
        raise RuntimeError("no text")


def call(arguments, **more):
    return {"type": "function", "function": {"name": "look", "arguments": arguments}, **more}


def answer(*calls, content=""):
    return [{"role": "assistant", "content": content, "tool_calls": list(calls)}]


# The completion -> its text in the printed table.
WRITTEN = {
    "no arguments": (answer(call({})), "look()"),
    "text for arguments": (answer(call("at once")), "look(at once)"),
    "text that is JSON": (answer(call('{"a": 1}')), "look(a=1)"),
    "JSON of another kind": (answer(call("[1, 2]")), "look([1, 2])"),
    "a number for arguments": (answer(call(3)), "look(3)"),
    "many brackets": (answer(call("[" * 100_000)), "look("),
    "calls that are none": (answer("look", 3, {"name": "look"}, {"function": "look"}), "'look'"),
    "one call, not in a list": ([{"role": "assistant", "content": "", "tool_calls": "look"}], "look"),
    "a list from a tool": ([{"role": "tool", "content": [1, "b", None, ["c"]]}], "['c']"),
    "blocks without text": ([{"role": "tool", "content": [{"type": "text"}, {"type": "text", "text": 7}]}], "7"),
    "no content": ([{"role": "assistant", "content": None}], "ASSISTANT"),
    "half of a character": (answer(call({"a": "\ud800"}), content="b\udfff"), "b\\udfff"),
    "a list that contains itself": ([{"role": "tool", "content": SELF}], "..."),
}


@pytest.mark.parametrize("kind", WRITTEN)
def test_nothing_that_a_model_writes_ends_a_run(kind, tmp_path, capsys, caplog):
    cell, shown = WRITTEN[kind]
    given = []
    made = log(folder=tmp_path, trackers=[given.append])
    usual = answer(call({"a": 1}), call({"b": [2]}))
    made.add("train", [TALK] * 2, [usual, cell], np.ones((2, 2), np.float32), np.ones(2))
    made.log("train", 1)
    assert shown in capsys.readouterr().out.replace("\n", "") and not caplog.records
    written = pd.read_parquet(tmp_path / "completions_00001.parquet")
    assert len(written) == 2 and list(written["prompt"][0]) == TALK and len(given) == 1
    again = log(num_to_print=0)
    again.restore(made.state())
    assert repr(again.table("train", 1)) == repr(made.table("train", 1))


def test_arguments_of_calls_are_json_text_so_that_those_of_one_tool_do_not_show_up_in_another(tmp_path):
    made = log(folder=tmp_path, num_to_print=0)
    completions = [answer(call({"a": 1})), answer(call({})), answer(call("text"))]
    made.add("train", [TALK] * 3, completions, np.ones((3, 2), np.float32), np.ones(3))
    made.log("train", 1)
    rows = pd.read_parquet(tmp_path / "completions_00001.parquet")["completion"]
    assert [row[0]["tool_calls"][0]["function"]["arguments"] for row in rows] == ['{"a": 1}', "{}", "text"]


EXTRA = {
    "mixed": ([1, "a", {"b": 2}, None], ["1", '"a"', '{"b": 2}', None]),
    "nested": ([{"a": 1}, {"b": 2}, {}, None], ['{"a": 1}', '{"b": 2}', "{}", None]),
    "lists": ([[1], ["a"], [], (2,)], ["[1]", '["a"]', "[]", "[2]"]),
    "numbers": ([1, 2.5, np.float32(0.5), np.int64(3)], [1.0, 2.5, 0.5, 3.0]),
    "bools and numbers": ([True, 1, False, 0], ["true", "1", "false", "0"]),
    "texts": (["a", None, "\ud800", b"c"], ["a", None, "\\ud800", "b'c'"]),
    "arrays": ([np.ones(1), np.zeros((1, 1)), np.float64(2), None], ["[1.0]", "[[0.0]]", "2.0", None]),
    "large": ([2**63, -1, 1.5, None], ["9223372036854775808", "-1", "1.5", None]),
    "containing themselves": ([SELF, {"a": SELF}, 1, None], ['[1, "..."]', '{"a": [1, "..."]}', "1", None]),
    "of classes": ([Unprintable(), Exception("b"), 10**5000 > 1, None], ['"<Unprintable>"', '"b"', "true", None]),
}


@pytest.mark.parametrize("kind", EXTRA)
def test_mixed_and_nested_values_become_json_text(kind, tmp_path, caplog):
    values, wanted = EXTRA[kind]
    given = []
    made = log(folder=tmp_path, trackers=[given.append])
    add(made, count=4, **{"note [/b]": values})
    made.log("train", 1)
    again = log(folder=tmp_path)
    again.restore(made.state())
    again.log("train", 2)  # a resumed run writes the same table
    for frame in (given[0], *(pd.read_parquet(tmp_path / f"completions_0000{step}.parquet") for step in (1, 2))):
        found = frame["note [/b]"].tolist()
        assert [None if isinstance(one, float) and math.isnan(one) else one for one in found] == wanted
    assert not caplog.records


def test_values_are_kept_within_limits():
    many, whole, deep = plain([0] * 10**6), plain(10**5000), plain(DEEP)
    assert len(many) <= 10**5 + 1 and many[-1] == "..." and whole == hex(10**5000) and len(str(deep)) < 10**7


def test_what_cannot_be_shown_or_written_is_a_warning_and_the_rest_goes_on(tmp_path, caplog, monkeypatch):
    seen = []

    def broken(frame):
        raise ConnectionError("the tracker is away")

    (tmp_path / "file").write_text("")
    made = log(folder=tmp_path / "file", trackers=[broken, seen.append])
    monkeypatch.setattr(completions_log, "print_completions", lambda *given: 1 / 0)
    add(made)
    for step in (1, 2):
        made.log("train", step)
    told = [record.message for record in caplog.records]
    assert [len(frame) for frame in seen] == [2, 2] and len(told) == 3  # one warning each
    for text, what in zip(told, ("shown", "written", "sent to a tracker"), strict=True):
        assert f"the completions table could not be {what}; training continues. " in text
    assert told[0].endswith("ZeroDivisionError: division by zero") and "the tracker is away" in told[2]


def test_a_reward_function_may_have_another_name_when_a_run_is_resumed():
    before, after = log(), CompletionsLog(["accuracy", "shape"], 4)
    add(before)
    after.restore(before.state())
    table = after.table("train", 1)
    assert table["accuracy"] == [0.0, 1.0] and all(map(math.isnan, table["shape"])) and "form" not in table


def test_what_a_terminal_would_obey_is_shown_as_text(capsys):
    made = log()
    made.add("train", ["p"], ["\x1b[2Jgone"], np.ones((1, 2), np.float32), np.ones(1))
    made.log("train", 1)
    assert "\x1b[2J" not in capsys.readouterr().out


class Hub:
    """A fake `huggingface_hub.HfApi` that records created repositories and the file sizes of each commit."""

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
    assert len(Hub.commits) == 1  # later files wait: there is at most one commit every two minutes
    made.finish()
    names = [sorted(files) for repo_id, kind, files in Hub.commits if (repo_id, kind) == ("somebody/mine", "dataset")]
    assert names == [["README.md", "completions_00001.parquet"],
                     ["README.md", "completions_00002.parquet", "completions_00003.parquet"]]  # fmt: skip
    made.finish()
    assert len(Hub.commits) == 2 and all(size for _, _, files in Hub.commits for size in files.values())
