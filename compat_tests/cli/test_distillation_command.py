"""`trl-jax distillation`: a run from flags, flags for the teacher, and its plan."""

from __future__ import annotations

import json

import pytest

from compat_tests.parity.distillation_cases import TEACHER
from compat_tests.parity.dpo_cases import SMALL
from compat_tests.parity.grpo_cases import prompt_rows
from trl_jax.cli.main import main

RUN = {
    "max_steps": 1, "per_device_train_batch_size": 4, "max_completion_length": 4, "use_cpu": True, "bf16": False,
    "report_to": "none", "save_strategy": "no", "logging_steps": 1,
}  # fmt: skip


@pytest.fixture(autouse=True)
def folder(tmp_path, monkeypatch):
    """Change to a folder with prompts."""
    (tmp_path / "prompts.jsonl").write_text("".join(json.dumps(row) + "\n" for row in prompt_rows(8)))
    monkeypatch.chdir(tmp_path)
    # JAX is already initialized in this process.
    monkeypatch.setattr("trl_jax.plan.compile.prepare", lambda place: None)
    return tmp_path


def flags(given: dict) -> list[str]:
    return [text for name, value in given.items() for text in (f"--{name}", str(value))]


def test_a_run(checkpoint, folder, capsys):
    models = {"model_name_or_path": checkpoint(**SMALL), "teacher_model_name_or_path": checkpoint(**TEACHER)}
    more = {"dataset_name": "prompts.jsonl", "output_dir": "out", "teacher_model_init_kwargs": '{"dtype": "bfloat16"}'}
    assert main(["distillation", *flags(models | more | RUN)]) == 0
    told = capsys.readouterr().out
    assert "Model saved to out." in told and "'entropy':" in told and (folder / "out" / "model.safetensors").is_file()


def test_without_a_teacher_the_flag_is_named(checkpoint, capsys):
    given = {"model_name_or_path": checkpoint(**SMALL), "dataset_name": "prompts.jsonl", "output_dir": "out"}
    for command in (["distillation"], ["plan", "--trainer", "distillation", "--topology", "h100:1"]):
        assert main([*command, *flags(given | RUN)]) != 0
        assert "Set it with `--teacher_model_name_or_path`" in capsys.readouterr().err


def test_a_plan_has_the_teacher(checkpoint, folder):
    models = {"model_name_or_path": checkpoint(**SMALL), "teacher_model_name_or_path": checkpoint(**TEACHER)}
    found = []
    for dtype in ("float32", "bfloat16"):
        kwargs = json.dumps({"dtype": dtype})
        more = {"topology": "h100:1", "trainer": "distillation", "max_prompt_length": 64, "json": "plan.json"}
        assert main(["plan", *flags(models | more | RUN | {"teacher_model_init_kwargs": kwargs})]) == 0
        found.append(json.loads((folder / "plan.json").read_text()))
    whole, half = (plan["memory"]["parameters"] for plan in found)
    assert whole - half > 200_000 and whole < 2 * half  # the student, and half of the teacher's bytes
    assert found[0]["generation"]["size"]["completions"] == 4 and found[0]["unread"] == 0
