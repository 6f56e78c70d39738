"""`trl-jax score` loses no data: existing files are kept, interrupted runs resume, and bad rows are named."""

from __future__ import annotations

import errno
import fcntl
import io
import json
import os
import shutil
import sys

import pytest

from compat_tests.tiny import preference_rows
from compat_tests.trainer.trainers import FACTS
from trl_jax.cli.main import main
from trl_jax.hub.auto import find_checkpoint
from trl_jax.hub.peft_config import LoraConfig
from trl_jax.hub.pretrained import PreTrainedModel, ScoreOutput
from trl_jax.scripts import rows, score


@pytest.fixture(scope="module")
def folder(checkpoint):
    return checkpoint(**FACTS, tokenizer={"chat_template": True})


@pytest.fixture
def scored(folder, tmp_path, capsys):
    """scored(rows, *flags, model=...) -> (exit status, stderr) of a run from in.jsonl to out.jsonl."""

    def run(rows=None, *flags, model=folder, out="out.jsonl"):
        source = tmp_path / "in.jsonl"
        if rows is not None:
            source.write_bytes(rows if isinstance(rows, bytes) else lines(rows))
        status = main(["score", str(model), str(source), "-o", str(tmp_path / out), "--quiet", *flags])
        return status, capsys.readouterr().err

    return run


def lines(rows):
    return b"".join(json.dumps(row, ensure_ascii=False).encode() + b"\n" for row in rows)


def read(path):
    return [json.loads(line) for line in path.read_bytes().split(b"\n")[:-1]]


class Spy:
    """Counts the scored rows, and simulates Ctrl-C after `until`."""

    def __init__(self, monkeypatch, until=None):
        self.rows = 0
        plain = score.Scorer.__call__

        def spied(scorer, rows):
            if until is not None and self.rows >= until:
                raise KeyboardInterrupt
            self.rows += len(rows)
            return plain(scorer, rows)

        monkeypatch.setattr(score.Scorer, "__call__", spied)


@pytest.fixture
def cut_off(scored, tmp_path, monkeypatch):
    """A run over ten pairs that was interrupted after four, within the fifth line."""
    with monkeypatch.context() as patched:
        Spy(patched, until=4)
        status, told = scored(preference_rows(10), "--batch_size", "2")
    partial = tmp_path / "out.jsonl.partial"
    assert status == 130 and f"4 rows are scored and kept in {partial}. Run the same command to continue." in told
    assert not (tmp_path / "out.jsonl").exists()
    with open(partial, "ab") as file:
        file.write(partial.read_bytes()[:20])
    return partial


def test_a_run_that_was_cut_off_goes_on_where_it_stopped(cut_off, scored, tmp_path, monkeypatch):
    spy = Spy(monkeypatch)
    status, told = scored()
    assert (status, spy.rows) == (0, 6) and "over 10 pairs" in told
    assert not list(tmp_path.glob("*.partial*"))
    assert scored(out="whole.jsonl") == (0, told)
    for mine, wanted in zip(read(tmp_path / "out.jsonl"), read(tmp_path / "whole.jsonl"), strict=True):
        assert mine.keys() == wanted.keys()
        assert mine["chosen_reward"] == pytest.approx(wanted["chosen_reward"], abs=1e-5)


@pytest.mark.parametrize("content", [b'{"text": "x", "reward": 1.0}', b"mine\nalso mine", b""])
def test_a_file_that_is_there_stays_and_is_replaced_where_asked_for(content, scored, tmp_path):
    out = tmp_path / "out.jsonl"
    out.write_bytes(content)
    status, told = scored([{"text": "x"}])
    assert status == 2 and f"--output {out} already exists. Choose another --output, or pass --overwrite" in told
    assert out.read_bytes() == content
    assert scored(None, "--overwrite")[0] == 0 and [row["text"] for row in read(out)] == ["x"]


def test_what_is_replaced_is_there_until_the_new_one_is_complete(scored, tmp_path, monkeypatch):
    out = tmp_path / "out.jsonl"
    out.write_text("mine")
    with monkeypatch.context() as patched:
        Spy(patched, until=2)
        assert scored(preference_rows(4), "--overwrite", "--batch_size", "2")[0] == 130
    assert out.read_text() == "mine"
    spy = Spy(monkeypatch)
    assert scored(None, "--overwrite")[0] == 0 and spy.rows == 2 and len(read(out)) == 4


@pytest.mark.parametrize("overwrite", [[], ["--overwrite"]])
@pytest.mark.parametrize("out", ["in.jsonl", "link.jsonl", "hard.jsonl"])
def test_the_rows_to_score_are_no_output(out, overwrite, scored, tmp_path):
    source = tmp_path / "in.jsonl"
    source.write_bytes(lines(preference_rows(3)))
    (tmp_path / "link.jsonl").symlink_to("in.jsonl")
    (tmp_path / "hard.jsonl").hardlink_to(source)
    status, told = scored(None, *overwrite, out=out)
    assert status == 2 and "is the file of rows to score. Choose another --output." in told
    assert source.read_bytes() == lines(preference_rows(3))


def test_rows_of_another_run_are_not_gone_on_with(cut_off, scored, folder, tmp_path, monkeypatch):
    kept = cut_off.read_bytes()
    other = shutil.copytree(folder, tmp_path / "other")
    config = json.loads((other / "config.json").read_text())
    (other / "config.json").write_text(json.dumps(config | {"rms_norm_eps": 1e-3}))
    rows = preference_rows(10)
    for told_of, run in (
        ("MODEL/config.json. Use the same settings to resume", lambda: scored(model=other)),
        ("--dtype.", lambda: scored(None, "--dtype", "bfloat16")),
        ("--trust_remote_code.", lambda: scored(None, "--trust_remote_code")),
        ("FILE.", lambda: scored([*rows[:9], {"text": "x"}])),
    ):
        status, told = run()
        assert status == 2 and f"{cut_off} belongs to a run with a different {told_of}" in told
        assert cut_off.read_bytes() == kept
    spy = Spy(monkeypatch)
    assert scored(rows, "--overwrite", model=other)[0] == 0 and spy.rows == 10


@pytest.mark.parametrize("name", ["out.jsonl.partial", "out.jsonl.partial.mark"])
@pytest.mark.parametrize("overwrite", [[], ["--overwrite"]])
def test_files_of_the_users_own_are_not_taken_for_a_runs(name, overwrite, scored, tmp_path):
    (tmp_path / name).write_text("mine")
    status, told = scored([{"text": "x"}], *overwrite)
    assert status == 2 and f"{tmp_path / name} is in the way: according to out.jsonl.partial.mark" in told
    assert (tmp_path / name).read_text() == "mine"


@pytest.mark.parametrize(
    ("change", "told_of"),
    [
        (
            lambda row: {"chosen": row["chosen"], "rejected": row["rejected"]},
            "chosen_reward must be a score, got None.",
        ),
        (lambda row: row | {"rejected_reward": None}, "rejected_reward must be a score, got None."),
        (lambda row: row | {"chosen": "other"}, "does not match"),
    ],
)
def test_a_line_without_its_score_does_not_count_as_done(change, told_of, cut_off, scored):
    done = read(cut_off)
    done[2] = change(done[2])
    cut_off.write_bytes(lines(done))
    status, told = scored()
    assert status == 2 and f"{cut_off}, line 3" in told and told_of in told
    assert "Remove out.jsonl.partial to start over" in told and cut_off.read_bytes() == lines(done)


def test_any_text_that_json_can_hold_is_scored_and_gone_on_with(scored, tmp_path, monkeypatch):
    rows = [{"text": text} for text in ("a\u2028b", "c\u0085d", "e\x0bf\x1cg", "h\r\ni", "\ufeffj", "last")]
    rows[0]["number"] = float("nan")  # not equal to itself
    with monkeypatch.context() as patched:
        Spy(patched, until=5)
        assert scored(b"\xef\xbb\xbf" + lines(rows).replace(b"\n", b"\r\n"), "--batch_size", "1")[0] == 130
    spy = Spy(monkeypatch)
    assert scored()[0] == 0 and spy.rows == 1
    assert [row["text"] for row in read(tmp_path / "out.jsonl")] == [row["text"] for row in rows]


@pytest.mark.parametrize(
    ("line", "told_of"),
    [
        (
            b'{"text": "a", "reward": 1}',
            "already has a column 'reward', where the result would go. Rename or remove that column",
        ),
        (b'{"chosen": "a", "rejected": "b", "chosen_reward": 1}', "already has a column 'chosen_reward'"),
        (b'{"text": "\\ud83d"}', "contains '\\ud83d', an unpaired surrogate. Export"),
        ('{"text": "é"}'.encode("latin-1"), "is not UTF-8: byte 0xe9 in column 11. Save the file as UTF-8"),
        ('{"text": "a"}'.encode("utf-16"), "is not UTF-8: byte 0xff in column 1."),
        ('{"text": "a"}'.encode("utf-16-be"), "Expected one row per line. It has NUL bytes: save the file as UTF-8."),
        (
            b'{"text": "a", "b": ' + b"[" * 100_000 + b"]" * 100_000 + b"}",
            "is nested too deeply for Python's JSON parser.",
        ),
        (b'{"text": "a", "b": 1' + b"0" * 5000 + b"}", "is not JSON: Exceeds the limit"),
        (
            b'{"text": 5}',
            "column 'chosen': must be a string, or a non-empty list of messages, each with a 'role' and a 'content', "
            "got 5 (int)",
        ),
        (b"{}", "must have the columns text, messages"),
    ],
)
def test_a_bad_row_is_named_before_any_is_scored(line, told_of, scored, tmp_path, monkeypatch):
    spy = Spy(monkeypatch)
    status, told = scored(lines([{"text": "a"}]) * 9 + line)
    assert status == 2 and f"{tmp_path / 'in.jsonl'}, line 10" in told and told_of in told
    assert spy.rows == 0 and sorted(os.listdir(tmp_path)) == ["in.jsonl"]


def test_a_text_that_is_too_long_is_named(scored, checkpoint, tmp_path):
    status, told = scored(
        [{"text": "a"}, {"text": "long " * 600}], model=checkpoint("gpt2", num_hidden_layers=1), out="gpt2.jsonl"
    )
    assert status == 2 and "in.jsonl, line 2 has" in told and "but the model supports at most 512. Shorten" in told
    assert sorted(os.listdir(tmp_path)) == ["in.jsonl"]  # nothing was scored, so nothing is kept


def test_a_column_of_another_kind_of_row_is_no_score(scored, tmp_path):
    assert scored([{"text": "a", "chosen_reward": 1}, {"chosen": "a", "rejected": "b", "reward": "x"}])[0] == 0
    assert read(tmp_path / "out.jsonl")[0]["chosen_reward"] == 1


def test_a_score_that_is_no_number_is_not_written(scored, tmp_path, monkeypatch):
    monkeypatch.setattr(score.Scorer, "_ids", lambda self, row: [[1]])
    monkeypatch.setattr(PreTrainedModel, "__call__", lambda *given: ScoreOutput([[float("nan")]] * len(given[1])))
    status, told = scored([{"text": "a"}])
    assert status == 2 and "in.jsonl, line 1: reward must be finite, got nan." in told
    assert sorted(os.listdir(tmp_path)) == ["in.jsonl"]


def test_rows_that_change_while_they_are_scored_are_told_of(scored, tmp_path, monkeypatch):
    plain = score.Scorer.__call__

    def changing(scorer, rows):
        (tmp_path / "in.jsonl").write_bytes(lines([{"text": "b"}]))
        return plain(scorer, rows)

    monkeypatch.setattr(score.Scorer, "__call__", changing)
    status, told = scored([{"text": "a"}])
    assert status == 2 and "in.jsonl changed while it was being scored." in told
    assert not (tmp_path / "out.jsonl").exists() and read(tmp_path / "out.jsonl.partial")[0]["text"] == "a"


def test_two_runs_do_not_write_one_file(cut_off, scored):
    kept = cut_off.read_bytes()
    with open(f"{cut_off}.mark") as mark:
        fcntl.flock(mark, fcntl.LOCK_EX)
        status, told = scored()
    assert status == 2 and f"another run is writing {cut_off}. Wait for it to end" in told
    assert cut_off.read_bytes() == kept


def test_a_full_disk_is_told_with_the_file_and_rows_stay(cut_off, scored, monkeypatch):
    class Full(io.FileIO):
        def write(self, data):
            raise OSError(errno.ENOSPC, "No space left on device")

    def opening(path, mode="r", **how):
        return Full(path, mode) if mode == "ab" and how else open(path, mode, **how)

    monkeypatch.setattr(rows, "open", opening, raising=False)
    status, told = scored()
    assert status == 2 and f"No space left on device: '{cut_off}'" in told and "4 rows are scored and kept" in told
    monkeypatch.undo()
    assert scored()[0] == 0


@pytest.mark.parametrize(
    ("out", "told_of"),
    [
        ("no/where.jsonl", "there is no folder"),
        (".", "is not a regular file. Omit --output to write to stdout."),
        ("/dev/null", "is not a regular file."),
    ],
)
def test_outputs_that_cannot_be(out, told_of, scored, tmp_path):
    status, told = scored([{"text": "a"}], out=out)
    assert status == 2 and told_of in told


def test_an_output_behind_a_link_is_where_the_link_leads(scored, tmp_path):
    (tmp_path / "deep").mkdir()
    (tmp_path / "link.jsonl").symlink_to("deep/real.jsonl")
    assert scored([{"text": "a"}], out="link.jsonl")[0] == 0
    assert (tmp_path / "link.jsonl").is_symlink() and len(read(tmp_path / "deep/real.jsonl")) == 1


def test_stdout_is_utf8_whatever_the_terminal_is(folder, tmp_path, monkeypatch):
    (tmp_path / "in.jsonl").write_bytes(lines([{"text": "é"}]))
    stdout = io.TextIOWrapper(io.BytesIO(), encoding="ascii")
    monkeypatch.setattr(sys, "stdout", stdout)
    assert main(["score", str(folder), str(tmp_path / "in.jsonl"), "--quiet"]) == 0
    assert json.loads(stdout.buffer.getvalue().decode())["text"] == "é"


def test_an_adapters_own_tokenizer_and_files_count(scored, folder, tmp_path, monkeypatch):
    model = find_checkpoint(str(folder)).load_adapted(LoraConfig(r=2, task_type="SEQ_CLS"), 0)
    model.save_pretrained(tmp_path / "adapter")
    for name in ("tokenizer.json", "tokenizer_config.json"):
        shutil.copy(folder / name, tmp_path / "adapter")
    words = json.loads((tmp_path / "adapter/tokenizer_config.json").read_text())
    (tmp_path / "adapter/tokenizer_config.json").write_text(json.dumps(words | {"eos_token": "<pad>"}))
    assert scored([{"text": "a"}])[0] == 0
    assert scored(None, model=tmp_path / "adapter", out="adapted.jsonl")[0] == 0
    mine, plain = (read(tmp_path / name)[0]["reward"] for name in ("adapted.jsonl", "out.jsonl"))
    assert mine != pytest.approx(plain, abs=1e-4)  # the new adapter has no effect yet, but the other EOS token has
    with monkeypatch.context() as patched:
        Spy(patched, until=2)
        assert scored(preference_rows(4), "--batch_size", "2", model=tmp_path / "adapter", out="new.jsonl")[0] == 130
    find_checkpoint(str(folder)).load_adapted(LoraConfig(r=2, task_type="SEQ_CLS"), 1).save_pretrained(
        tmp_path / "adapter"
    )
    status, told = scored(model=tmp_path / "adapter", out="new.jsonl")
    assert status == 2 and "a different ADAPTER/adapter_model.safetensors." in told
