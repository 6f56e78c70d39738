"""An exception in one of two processes ends both: quickly, with exit code 1, and with its message printed once."""

from __future__ import annotations

import os
import subprocess
import sys
import time
from pathlib import Path

import pytest

from compat_tests.effort import only_thorough, usual
from compat_tests.mesh.launching import port

ROOT = str(Path(__file__).parents[2])
SENTENCE = "the very sentence"
MOST = 40  # seconds from the exception until both have exited
SILENCE = 30  # seconds without output from one of them meanwhile


def run(fault, who, folder, out):
    """The exit codes and outputs of both processes; from the first exception on, the seconds to the last end, and the
    longest silence of one process."""
    env = os.environ | {"JAX_COORDINATOR_ADDRESS": f"localhost:{port()}", "JAX_NUM_PROCESSES": "2", "PYTHONPATH": ROOT}
    logs, processes = [out / "0.log", out / "1.log"], []
    for number, log in enumerate(logs):
        command = [sys.executable, "-m", "compat_tests.light", "compat_tests.mesh.one_raises"]
        command += [fault, str(who), str(folder), str(out / "run")]
        with log.open("w") as file:
            own = env | {"JAX_PROCESS_ID": str(number)}
            processes.append(subprocess.Popen(command, env=own, stdout=file, stderr=subprocess.STDOUT))
    began, raised = time.monotonic(), None
    sizes, spoke, silence = [0, 0], [began, began], 0.0
    while any(process.poll() is None for process in processes) and time.monotonic() < began + 500:
        now = time.monotonic()
        if raised is None and SENTENCE in logs[who].read_text():
            raised, spoke = now, [now, now]
        for number, log in enumerate(logs):
            if log.stat().st_size != sizes[number] or processes[number].poll() is not None:
                sizes[number], spoke[number] = log.stat().st_size, now
            elif raised is not None:
                silence = max(silence, now - spoke[number])
        time.sleep(0.1)
    seconds = time.monotonic() - (raised or began)
    for process in processes:
        process.kill()
        process.wait()
    print(f"{fault} in process {who}: {seconds:.0f} s, {silence:.0f} s of silence")
    return [process.returncode for process in processes], [log.read_text() for log in logs], seconds, silence


@usual("callback-1-RuntimeError")  # each takes 20 s of two processes
@pytest.mark.parametrize(
    ("fault", "who", "kind"),
    [
        ("callback", 1, "RuntimeError"), ("save", 0, "OSError"), ("log", 0, "RuntimeError"),
        ("exit", 1, "SystemExit"), ("before", 1, "RuntimeError"), ("between", 0, "RuntimeError"),
    ],
)  # fmt: skip
def test_an_exception_of_one_process_ends_both(fault, who, kind, checkpoint, tmp_path):
    codes, texts, seconds, silence = run(fault, who, checkpoint(), tmp_path)
    assert codes == [1, 1] and seconds < MOST and silence < SILENCE, (codes, seconds, silence, texts)
    assert [text.count(SENTENCE) for text in texts] == ([1, 0] if who == 0 else [0, 1]), texts
    sentence = f"Process {who} of 2 ended with {kind} (see its own log), so this process, number {1 - who}, exits"
    assert [text.count(sentence) for text in texts] == ([0, 1] if who == 0 else [1, 0]), texts


@only_thorough
def test_a_script_that_catches_the_exception_is_left_by_the_others(checkpoint, tmp_path):
    codes, texts, *_ = run("caught", 1, checkpoint(), tmp_path)
    assert codes[0] == 1 and "Process 1 of 2 ended with RuntimeError" in texts[0], texts


@only_thorough
def test_an_exception_of_all_processes_may_be_caught(checkpoint, tmp_path):
    codes, texts, *_ = run("alike", 0, checkpoint(), tmp_path)
    assert codes == [0, 0] and all("went on" in text for text in texts), texts
