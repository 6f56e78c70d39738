"""A script under torchrun: only one process continues, and its result equals that of an ordinary run."""

from __future__ import annotations

import json
import os
import runpy
import subprocess
import sys
from pathlib import Path

import pytest
from datasets import Dataset

from compat_tests.light import IMPORTS
from compat_tests.tiny import preference_rows

pytest.importorskip("torch")
ROOT = Path(__file__).parents[2]

SCRIPT = """
import os, sys
from datasets import load_dataset
from trl_jax import RewardConfig, RewardTrainer
sys.stdout.write(f"begun {os.environ.get('RANK')}\\n")  # as one piece, beside another process
sys.stdout.flush()
config = RewardConfig(
    sys.argv[2], per_device_train_batch_size=4, max_steps=2, logging_steps=1, report_to="none", disable_tqdm=True,
    save_strategy="no",
)
trainer = RewardTrainer(sys.argv[1], config, train_dataset=load_dataset("json", data_files=sys.argv[3], split="train"))
trainer.train()
trainer.save_model()
print("losses", [log["loss"] for log in trainer.state.log_history if "loss" in log], flush=True)
"""


@pytest.fixture(scope="module")
def given(checkpoint, tmp_path_factory):
    """A script, a model and rows."""
    folder = tmp_path_factory.mktemp("script")
    (folder / "train.py").write_text(SCRIPT)
    (folder / "launched.py").write_text(IMPORTS + SCRIPT)
    Dataset.from_list(preference_rows(16)).to_json(folder / "rows.jsonl")
    return folder, str(checkpoint("llama", num_hidden_layers=1))


def run(launcher: list[str], given, out: Path) -> str:
    folder, model = given
    command = [sys.executable, *launcher, str(folder / "launched.py"), model, str(out), str(folder / "rows.jsonl")]
    done = subprocess.run(command, capture_output=True, text=True, env=os.environ | {"PYTHONPATH": str(ROOT)}, cwd=out)
    assert done.returncode == 0, done.stderr[-3000:]
    return done.stdout + done.stderr


def losses(text: str) -> list[float]:
    [line] = [line for line in text.splitlines() if line.startswith("losses ")]
    return json.loads(line.removeprefix("losses "))


def run_here(given, out: Path, monkeypatch, capsys) -> str:
    folder, model = given
    script = str(folder / "train.py")
    monkeypatch.setattr(sys, "argv", [script, model, str(out), str(folder / "rows.jsonl")])
    runpy.run_path(script, run_name="__main__")
    return capsys.readouterr().out


def test_one_of_torchruns_processes_trains(given, tmp_path, monkeypatch, capsys):
    """Compared with a run of the script in this process."""
    (tmp_path / "alone").mkdir(), (tmp_path / "launched").mkdir()
    alone = run_here(given, tmp_path / "alone", monkeypatch, capsys)
    launcher = ["-m", "torch.distributed.run", "--nproc_per_node", "2", "--master_port", "0"]
    launched = run(launcher, given, tmp_path / "launched")
    assert sorted(line for line in launched.splitlines() if line.startswith("begun")) == ["begun 0", "begun 1"]
    assert losses(launched) == losses(alone) and len(losses(alone)) == 2
    assert (
        launched.count("2 processes were started. One process drives all devices of a host, so the others have ended")
        == 1
    )
    assert "1 x 4 rows instead of 2 x 4. Set per_device_train_batch_size=8" in launched
    weights = [(tmp_path / way / "model.safetensors").read_bytes() for way in ("alone", "launched")]
    assert weights[0] == weights[1]
