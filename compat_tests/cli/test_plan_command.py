"""`trl-jax plan`, from the shell's side."""

import json
import os
import subprocess
import sys

import pytest

from compat_tests.tiny import preference_rows
from trl_jax.cli.main import main


@pytest.fixture(autouse=True)
def begun(monkeypatch):
    """This process's JAX has begun, and keeps its settings."""
    monkeypatch.setattr("trl_jax.engine.ahead.prepare", lambda place: None)


def test_pretended_devices_from_the_shell(checkpoint, tmp_path):
    """A process of its own: JAX is told how many devices to pretend before it looks for any."""
    written = tmp_path / "plan.json"
    flags = f"--model_name_or_path {checkpoint()} --topology cpu:2 --mesh_shape fsdp:2 --json {written}"
    flags += " --max_length 64 --per_device_train_batch_size 2 --batch_layout padded"
    done = subprocess.run(
        [sys.executable, "-m", "trl_jax.cli.main", "plan", *flags.split()],
        capture_output=True, text=True, cwd=tmp_path, env=os.environ | {"PYTHONPATH": os.pathsep.join(sys.path)},
    )  # fmt: skip
    assert done.returncode == 0, done.stderr
    assert "on cpu:2: 2 device(s), pretended, of no size; mesh fsdp:2." in done.stdout
    found = json.loads(written.read_text())
    gathered = [one for one in found["compiled"]["cost"]["collectives"] if one["kind"] == "all-gather"]
    assert sum(one["bytes"] for one in gathered) > 2 * found["memory"]["parameters"]  # forward and backward
    assert found["memory"]["parameters"] < 0.6 * 4 * found["parameters"] and found["levers"] == []
    assert sorted(path.name for path in tmp_path.iterdir()) == ["plan.json"]


def test_levers_from_the_shell(checkpoint, capsys):
    flags = f"--model_name_or_path {checkpoint()} --topology a100:1 --max_length 50000 --per_device_train_batch_size 2"
    assert main(["plan", *flags.split()]) == 0
    told = capsys.readouterr().out
    assert "It does not fit by arithmetic alone" in told
    assert "- --per_device_train_batch_size 1 --gradient_accumulation_steps 2: It" in told
    assert "- --max_length 25000: It fits" in told
    assert main(["plan", *flags.split(), "--levers", "false"]) == 0
    assert "- --max_length" not in capsys.readouterr().out


def test_rows_of_a_file_tell_the_lengths(checkpoint, capsys, tmp_path):
    rows = tmp_path / "pairs.jsonl"
    rows.write_text("".join(json.dumps(row) + "\n" for row in preference_rows(12)))
    flags = f"--model_name_or_path {checkpoint()} --topology h100:1 --dataset_name {rows}"
    assert main(["plan", *flags.split(), "--per_device_train_batch_size", "4"]) == 0
    told = capsys.readouterr().out
    assert "Lengths of steps: 32" in told or "Lengths of steps: 64" in told
    assert "(x" in told and "It fits by arithmetic alone" in told


def test_mistakes_are_told_in_a_line(checkpoint, capsys):
    assert main(["plan", "--model_name_or_path", str(checkpoint()), "--topology", "v9:1"]) == 2
    assert "--topology v9:1 is unknown. Known are v5e:AxB" in capsys.readouterr().err
    assert main(["plan", "--topology", "v5e:2x2", "--max_length", "64"]) == 2
    assert "--model_name_or_path is missing" in capsys.readouterr().err
    assert main(["plan", "--topology", "v5e:2x2", "--model_name_or_path", "x", "--use_peft"]) == 2
    assert "--use_peft: a plan is of the whole model" in capsys.readouterr().err
