"""Two real processes on the loopback, beside two ranks of TRL; and what they say when they do not fit together."""

from __future__ import annotations

import json
import os
import socket
import subprocess
import sys
import threading
from pathlib import Path

import pytest

from compat_tests.parity.marks import assert_same_curve, assert_same_weights
from compat_tests.parity.reference import read_weights

ROOT = Path(__file__).parents[2]
CONFIG = {"gradient_accumulation_steps": 2, "max_steps": 4}


def port() -> int:
    with socket.socket() as held:
        held.bind(("localhost", 0))
        return held.getsockname()[1]


def launch(
    whose: str, folder, out, *, config: list[dict], killed: int | None = None, seconds: int = 500
) -> list[tuple[int, str]]:
    """Start a process for each config; their exit codes and what they wrote. `killed` dies after a step."""
    count, place, started = len(config), str(port()), []
    for number, given in enumerate(config):
        ours = {"JAX_COORDINATOR_ADDRESS": f"localhost:{place}", "JAX_NUM_PROCESSES": count, "JAX_PROCESS_ID": number}
        trl = {
            "MASTER_ADDR": "localhost", "MASTER_PORT": place, "WORLD_SIZE": count, "LOCAL_WORLD_SIZE": count,
            "RANK": number, "LOCAL_RANK": number, "ACCELERATE_USE_CPU": "true",
        }  # fmt: skip
        names = {name: str(value) for name, value in (ours if whose == "ours" else trl).items()}
        command = [sys.executable, "-m", "compat_tests.mesh.rank", whose, str(folder), str(out), json.dumps(given)]
        how = {"cwd": ROOT, "env": os.environ | names, "text": True}
        started.append(subprocess.Popen(command, stdout=subprocess.PIPE, stderr=subprocess.STDOUT, **how))
    said: list[str] = [""] * count

    def listen(number: int) -> None:
        for line in started[number].stdout:
            said[number] += line
            if killed is not None and line.startswith("{'loss'"):
                started[killed].kill()

    listeners = [threading.Thread(target=listen, args=(number,)) for number in range(count)]
    for listener in listeners:
        listener.start()
    for listener in listeners:
        listener.join(seconds)
    for process in started:
        process.kill()
    return [(process.wait(), text) for process, text in zip(started, said, strict=True)]


def test_two_processes_are_two_ranks_of_trl(checkpoint, tmp_path):
    pytest.importorskip("trl")
    folder, done = checkpoint("llama"), {}

    def run(whose: str, **more) -> None:
        done[whose] = launch(whose, folder, tmp_path, config=[CONFIG | more] * 2)

    ours = {"mesh_shape": "fsdp:2", "save_strategy": "steps", "save_steps": 3}
    threads = [threading.Thread(target=run, args=("trl",)), threading.Thread(target=run, args=("ours",), kwargs=ours)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    for results in done.values():
        assert all(code == 0 for code, _ in results), "\n".join(text[-3000:] for _, text in results)
    ours, theirs = (json.loads((tmp_path / f"{whose}.json").read_text()) for whose in ("ours", "trl"))
    assert_same_curve(ours, theirs)
    assert_same_weights(*(read_weights(tmp_path / whose / "final") for whose in ("ours", "trl")))
    assert (tmp_path / "ours" / "checkpoint-3" / "manifest.json").is_file()


def test_row47_a_process_that_has_gone_is_named(checkpoint, tmp_path):
    results = launch("ours", checkpoint("llama"), tmp_path, config=[{"max_steps": 100_000}] * 2, killed=1)
    code, text = results[0]
    assert code != 0 and "RuntimeError: Process 1 of 2 has gone (its own log says why), so this one, number 0" in text
    assert "start all processes again with resume_from_checkpoint=True" in text


def test_row48_processes_with_other_arguments_are_told_at_the_start(checkpoint, tmp_path):
    results = launch("ours", checkpoint("llama"), tmp_path, config=[{"seed": 1}, {"seed": 2}])
    for code, text in results:
        assert code == 1
        assert "ValueError: The processes of this run differ in arguments: 1 (on " in text, text[-3000:]
        assert "from process 0. Start the same script with the same arguments, data and release" in text
