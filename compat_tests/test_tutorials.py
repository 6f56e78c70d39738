"""Runs the tutorials' code in order, and checks what the pages for users of other libraries say about our arguments."""

from __future__ import annotations

import dataclasses
import os
import re
import subprocess
import sys

import pytest

import trl_jax
from compat_tests import pages
from compat_tests.effort import only_thorough
from compat_tests.pages import FOLDER, ROOT

CONFIGS = [trl_jax.SFTConfig, trl_jax.DPOConfig, trl_jax.GRPOConfig, trl_jax.RewardConfig]
OTHERS = [FOLDER / "from-easydel.md", FOLDER / "from-tunix.md"]
ELSEWHERE = {"compute_loss_func", "environment_factory", "log_metric", "save_model"}
NOT_IN_CONFIGS = {"peft_config", "quantization_config", "optimizers", "resume_from_checkpoint"}


@only_thorough
@pytest.mark.parametrize(
    ("name", "asked", "wanted"),
    [
        ("sft", "Name the capital of Japan.", "tokyo"),
        ("dpo", "Name the capital of Peru.", "lima"),
        ("grpo", "Name three digits.", r"\d \d \d"),
    ],
)
def test_a_tutorial_ends_with_a_model_that_answers(tmp_path, name, asked, wanted):
    page = FOLDER / f"tutorial-{name}.md"
    env = {**os.environ, "PYTHONPATH": str(ROOT), "JAX_PLATFORMS": "cpu", "HF_HUB_OFFLINE": "1"}

    def run(*command: str, typed: str = "") -> str:
        done = subprocess.run(
            [sys.executable, *command], input=typed, capture_output=True, text=True, env=env, cwd=tmp_path
        )
        assert done.returncode == 0, done.stderr[-3000:]
        return done.stdout

    commands = [block.code.strip() for block in pages.blocks(page, "bash")]
    install, example, chat = [line.split() for line in commands]
    assert install[:3] == ["pip", "install", "."] and example[0] == chat[0] == "trl-jax"
    run("-m", "trl_jax.cli.main", *example[1:])
    (tmp_path / "blocks.py").write_text("\n".join(block.code for block in pages.blocks(page, "python")))
    shown = run("blocks.py")
    answer = run("-m", "trl_jax.cli.main", *chat[1:], typed=f"{asked}\n/exit\n")
    assert re.search(wanted, answer.lower()), answer
    if name == "dpo":
        before, after = [line for line in shown.splitlines() if line.startswith("[")]
        assert "look it up" in before and "look it up" not in after
    if name == "grpo":
        rewards = [float(one) for one in re.findall(r"^\d+ (\d\.\d+)$", shown, flags=re.M)]
        assert rewards[-1] > rewards[0] + 0.3, rewards


def fields() -> dict[str, set]:
    """Argument -> its defaults in the configs that have it."""
    found: dict[str, set] = {}
    for config in CONFIGS:
        for field in dataclasses.fields(config):
            if field.default is not dataclasses.MISSING:
                found.setdefault(field.name, set()).add(repr(field.default))
    return found


@pytest.mark.parametrize("page", OTHERS, ids=[page.name for page in OTHERS])
def test_arguments_of_ours_exist_and_have_the_defaults_that_are_told(page):
    known, defaults = fields(), 0
    names = set(known) | {field.name for config in CONFIGS for field in dataclasses.fields(config)} | NOT_IN_CONFIGS
    for row in (row for found in pages.tables(pages.read(page)) for row in found):
        cell = row.get("trl_jax", "")
        settings = re.findall(r"`(\w+)=([^`]+)`", cell)
        assert {name for name, _ in settings} <= names, f"{page.name}: {cell}"
        named = set(re.findall(r"`([a-z]+(?:_[a-z0-9]+)+)`", cell))
        assert named <= names | ELSEWHERE, f"{page.name}: {cell}"
        if row.get("note", "").startswith("a different default"):
            for name, value in settings:
                defaults += 1
                told = {value.replace('"', "'"), value}
                assert told & known[name], f"{page.name}: {name}={value}, but {known[name]}"
    assert defaults >= 6
