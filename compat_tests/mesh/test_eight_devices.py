"""Runs files of tests where there are eight devices, or two: JAX settles how many a process has once."""

from __future__ import annotations

import subprocess
import sys
from pathlib import Path

import pytest

FILES = (
    "eight_devices.py", "eight_experts.py", "eight_references.py", "eight_token_heads.py", "eight_trl.py",
    "eight_whole_runs.py", "two_branches.py",
)  # fmt: skip

@pytest.mark.parametrize("name", FILES)
def test_eight_devices(name):
    file = Path(__file__).with_name(name)
    run = subprocess.run(
        [sys.executable, "-m", "pytest", "-n", "0", "-q", "-x", str(file)],
        capture_output=True,
        text=True,
        cwd=file.parents[2],
    )
    assert run.returncode == 0, run.stdout[-6000:] + run.stderr[-2000:]
