"""Several processes of one run on the loopback, ours or TRL's ranks."""

from __future__ import annotations

import json
import os
import socket
import subprocess
import sys
import threading
from pathlib import Path

ROOT = Path(__file__).parents[2]


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
