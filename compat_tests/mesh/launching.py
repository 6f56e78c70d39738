"""Starts several processes of one run on the loopback (ours, or TRL's ranks), forked from one that has done the
imports."""

from __future__ import annotations

import atexit
import multiprocessing
import os
import socket
import sys
import tempfile
import threading
import time
import traceback
from pathlib import Path

from compat_tests.mesh import rank
from compat_tests.parity import golden

FORKS = multiprocessing.get_context("forkserver")
FORKS.set_forkserver_preload(["compat_tests.mesh.imported"])


def port() -> int:
    with socket.socket() as held:
        held.bind(("localhost", 0))
        return held.getsockname()[1]


def launch(
    whose: str, folder, out, *, config: list[dict], killed: int | None = None, seconds: int = 500
) -> list[tuple[int, str]]:
    """Run a process for each config and return their exit codes and outputs. Process `killed` is killed after a
    step."""
    count, place, started = len(config), str(port()), []
    with tempfile.TemporaryDirectory() as logs:
        said = [Path(logs) / str(number) for number in range(count)]
        for number, given in enumerate(config):
            names = _ours(number, count, place) if whose == "ours" else _trls(number, count, place)
            run = names, said[number], whose, str(folder), str(out), given
            started.append(FORKS.Process(target=_become, args=run))
            started[-1].start()
        end = time.monotonic() + seconds
        while any(process.is_alive() for process in started) and time.monotonic() < end:
            if killed is not None and any("{'loss'" in text.read_text() for text in said if text.exists()):
                started[killed].kill()
            time.sleep(0.1)
        for process in started:
            process.kill()
            process.join()
        return [(process.exitcode, text.read_text()) for process, text in zip(started, said, strict=True)]


def launch_both(folder, out, config: dict, *, ours: dict) -> None:
    """Run two of our processes, and two ranks of TRL unless they are recorded, with the same `config`; all must exit
    with 0."""
    done = {}

    def run(whose: str, **more) -> None:
        done[whose] = launch(whose, folder, out, config=[config | more] * 2)

    threads = [threading.Thread(target=run, args=("ours",), kwargs=ours)]
    if golden.live():
        threads.append(threading.Thread(target=run, args=("trl",)))
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    for results in done.values():
        assert all(code == 0 for code, _ in results), "\n".join(text[-3000:] for _, text in results)


def _ours(number: int, count: int, place: str) -> dict:
    return {"JAX_COORDINATOR_ADDRESS": f"localhost:{place}", "JAX_NUM_PROCESSES": count, "JAX_PROCESS_ID": number}


def _trls(number: int, count: int, place: str) -> dict:
    return {
        "MASTER_ADDR": "localhost", "MASTER_PORT": place, "WORLD_SIZE": count, "LOCAL_WORLD_SIZE": count,
        "RANK": number, "LOCAL_RANK": number, "ACCELERATE_USE_CPU": "true",
    }  # fmt: skip


def _become(names: dict, log: Path, *given) -> None:
    os.environ |= {name: str(value) for name, value in names.items()}
    # Open until the process ends: errors are written at the very end.
    sys.stdout = sys.stderr = log.open("w", buffering=1)
    for standard in (1, 2):
        os.dup2(sys.stdout.fileno(), standard)
    try:
        rank.main(*given)
    except Exception as error:
        sys.last_value = error  # as the interpreter does for an uncaught exception
        traceback.print_exc()
        sys.exit(1)
    finally:
        # `multiprocessing` skips exit handlers, in one of which JAX's processes wait for each other.
        atexit._run_exitfuncs()
