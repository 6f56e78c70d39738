"""Runs test files in a process with eight devices, because the number is fixed when JAX is initialized."""

from __future__ import annotations

import subprocess
import sys
from pathlib import Path

HERE = Path(__file__).parent
FILES = {path.stem.removeprefix("eight_") for path in HERE.glob("eight_*.py")}


def check(names: set[str]) -> None:
    """Run these files in one process, so that imports are paid once."""
    files = sorted(str(HERE / f"eight_{name}.py") for name in names)
    command = [sys.executable, "-m", "compat_tests.light", "pytest", "-n", "0", "-q", "-x", *files]
    run = subprocess.run(command, capture_output=True, text=True, cwd=HERE.parents[1])
    assert run.returncode == 0, run.stdout[-6000:] + run.stderr[-2000:]
