"""Runs eight_devices.py where there are eight devices: JAX settles how many a process has once."""

from __future__ import annotations

import subprocess
import sys
from pathlib import Path


def test_eight_devices():
    file = Path(__file__).with_name("eight_devices.py")
    run = subprocess.run(
        [sys.executable, "-m", "pytest", "-n", "0", "-q", "-x", str(file)],
        capture_output=True,
        text=True,
        cwd=file.parents[2],
    )
    assert run.returncode == 0, run.stdout[-6000:] + run.stderr[-2000:]
