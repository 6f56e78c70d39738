"""`trl-jax sft`, `dpo` and `kto`: with flags, with YAML, as scripts written for TRL, and their plans."""

from __future__ import annotations

import json
import os
import subprocess
import sys

import pytest
import yaml

from compat_tests.effort import only_thorough, usually
from compat_tests.mesh.rank import rows_of
from compat_tests.parity.dpo_cases import SMALL
from trl_jax.cli.main import main

KINDS = ("SFT", "DPO", "KTO")
RUN = {
    "max_steps": 1, "per_device_train_batch_size": 2, "use_cpu": True, "bf16": False, "report_to": "none",
    "logging_steps": 1, "learning_rate": 1e-3, "max_length": 48,
}  # fmt: skip
SCRIPT = """
import trl
from datasets import load_dataset
for kind in {kinds}:
    args = getattr(trl, f"{{kind}}Config")("out", save_strategy="no", **{run})
    rows = load_dataset("json", data_files=f"{{kind}}.jsonl", split="train")
    trainer = getattr(trl, f"{{kind}}Trainer")({model!r}, args=args, train_dataset=rows)
    trainer.train()
    print("found", kind, type(trainer).__module__, trainer.state.log_history[0]["loss"])
"""


@pytest.fixture
def folder(tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    return tmp_path


def given(kind, folder, model):
    rows = "".join(json.dumps(row) + "\n" for row in rows_of(kind, 6))
    (folder / f"{kind}.jsonl").write_text(rows)
    return RUN | {"model_name_or_path": str(model), "dataset_name": f"{kind}.jsonl"}


def first_loss(checkpoint):
    return json.loads((checkpoint / "trainer_state.json").read_text())["log_history"][0]["loss"]


@pytest.mark.parametrize("kind", usually("DPO".__eq__, KINDS))
def test_flags_and_yaml_give_one_loss(kind, checkpoint, folder):
    values = given(kind, folder, checkpoint(**SMALL)) | {"save_steps": 1}
    flags = [text for name, value in values.items() for text in (f"--{name}", str(value))]
    assert main([kind.lower(), *flags, "--output_dir", "flags"]) == 0
    (folder / "run.yaml").write_text(yaml.safe_dump(values | {"output_dir": "yaml"}))
    assert main([kind.lower(), "--config", "run.yaml"]) == 0
    assert first_loss(folder / "yaml" / "checkpoint-1") == first_loss(folder / "flags" / "checkpoint-1") > 0


@only_thorough  # by default, test_main_module covers the names, and test_scripts.py runs of reward trainers
def test_a_script_for_trl_trains_as_the_commands_do(checkpoint, folder):
    """One process for all trainers, because most of the time is Python's startup."""
    model, wanted, kinds = checkpoint(**SMALL), {}, ("DPO", "KTO")
    for kind in kinds:
        values = given(kind, folder, model) | {"save_steps": 1, "output_dir": kind}
        flags = [text for name, value in values.items() for text in (f"--{name}", str(value))]
        assert main([kind.lower(), *flags]) == 0
        wanted[kind] = first_loss(folder / kind / "checkpoint-1")
    (folder / "script.py").write_text(SCRIPT.format(kinds=kinds, run=RUN, model=str(model)))
    done = subprocess.run(
        [sys.executable, "-m", "trl_jax", "script.py"], capture_output=True, text=True,
        env=os.environ | {"PYTHONPATH": os.pathsep.join(sys.path)},
    )  # fmt: skip
    assert done.returncode == 0, done.stderr
    found = [line.split()[1:] for line in done.stdout.splitlines() if line.startswith("found ")]
    assert [kind for kind, _, _ in found] == [*kinds]
    for kind, module, loss in found:
        assert module.startswith("trl_jax.") and float(loss) == pytest.approx(wanted[kind], abs=1e-6)


@pytest.mark.parametrize("kind", KINDS)
def test_a_plan(kind, checkpoint, folder, capsys, monkeypatch):
    monkeypatch.setattr("trl_jax.plan.compile.prepare", lambda place: None)
    flags = f"--model_name_or_path {checkpoint(**SMALL)} --topology h100:1 --max_length 64 --batch_layout padded"
    assert main(["plan", "--trainer", kind.lower(), *flags.split()]) == 0
    assert "Whether it fits is unknown: weights" in capsys.readouterr().out
