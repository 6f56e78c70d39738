"""A reader can follow a run: how many files of the package it enters, and how large they are."""

from __future__ import annotations

import subprocess
import sys
from pathlib import Path

import pytest

import trl_jax

PACKAGE = Path(trl_jax.__file__).parent


@pytest.mark.parametrize(("run", "most"), [("dpo", 101), ("grpo", 110)])
def test_a_run_enters_few_files(run, most):
    command = [sys.executable, "-m", "compat_tests.trace_run", run]
    ran = subprocess.run(command, cwd=PACKAGE.parent, capture_output=True, text=True, check=True)
    name, _, counts = ran.stdout.splitlines()[-1].partition(": ")
    assert name == run and int(counts.split()[0]) <= most, ran.stdout


def test_the_package_has_few_files_of_a_readable_size():
    lines = {path: path.read_text(encoding="utf-8").count("\n") for path in PACKAGE.rglob("*.py")}
    assert len(lines) <= 282
    assert {path.name: count for path, count in lines.items() if count > 1_000} == {}
