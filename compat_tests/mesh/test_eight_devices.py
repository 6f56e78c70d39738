"""Runs files of tests where there are eight devices: JAX settles how many a process has once."""

from __future__ import annotations

import subprocess
import sys
from pathlib import Path

HERE = Path(__file__).parent


def test_eight_devices():
    """All of them in one process, which imports once."""
    files = sorted(map(str, HERE.glob("eight_*.py")))
    assert len(files) >= 7
    command = [sys.executable, "-m", "pytest", "-n", "0", "-q", "-x", *files]
    run = subprocess.run(command, capture_output=True, text=True, cwd=HERE.parents[1])
    assert run.returncode == 0, run.stdout[-6000:] + run.stderr[-2000:]
