"""Fuzzes every file reader for a short time; compat_tests/faults/fuzz.py itself can run longer."""

from __future__ import annotations

import json
import random
import subprocess
import sys

import pytest

from compat_tests.effort import THOROUGH
from compat_tests.faults import fuzz
from compat_tests.faults.test_saving import ROOT


def test_every_reader_answers_or_refuses():
    flags = ["--cases", str(4200 if THOROUGH else 600), "--rows", "10", "--seed", "1"]
    command = [sys.executable, "-m", "compat_tests.light", "compat_tests.faults.fuzz", *flags]
    done = subprocess.run(command, capture_output=True, text=True, cwd=ROOT, timeout=400)
    assert done.returncode == 0, done.stderr[-3000:]
    told = json.loads(done.stdout.splitlines()[-1])
    assert all(counts["refused"] for counts in told.values())
    assert told["manifest"]["taken"] == 0  # it must not differ in a single byte


def test_the_fuzzer_notices_a_reader_that_fails(tmp_path, monkeypatch):
    watcher = fuzz.Watcher(tmp_path)
    path = tmp_path / "file"

    def run(call):
        return fuzz._run("mine", 1, random.Random(0), watcher, call, path, b"{}")

    with pytest.raises(AssertionError, match=r"mine, case 0: KeyError\('x'\) for b"):
        run(lambda: {}["x"])
    with pytest.raises(AssertionError, match="opened /etc/passwd"):
        run(lambda: open("/etc/passwd").close())
    watcher.faults.clear()
    monkeypatch.setattr(fuzz, "BYTES", 1_000_000)
    with pytest.raises(AssertionError, match="bytes more for"):
        run(lambda: bytearray(b"x") * 900_000_000)
