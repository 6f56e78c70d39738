"""Failures in a run of two processes: both exit within seconds with code 1 and an error message that names the
cause."""

from __future__ import annotations

import os
import signal
import subprocess
import sys
import time
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass
from itertools import pairwise
from pathlib import Path
from types import SimpleNamespace

import jax
import pytest

from compat_tests.mesh.launching import port
from trl_jax.mesh import joining, processes, watch

SCRIPT = Path(__file__).with_name("faulty.py")
ROOT = str(Path(__file__).parents[2])
# In seconds: without output from one process; from the end of the first process to that of the last.
SILENCE, END = 30, 60
LOST = "has died or cannot be reached (see its own log)"
RESUME = "Checkpoints are never partial: restart all processes with resume_from_checkpoint=True."


@dataclass
class Ended:
    """For each process its exit code and output; over all, the longest silence and the seconds between the ends."""

    codes: list[int]
    texts: list[str]
    silence: float
    between: float


def run(
    out: Path, fault: str, *places: tuple[int, int], timeout: int = 60, hosts: Hosts | None = None, unplug: int = 0
) -> Ended:
    """Run processes with these (num_processes, process_id) until they exit.

    Args:
        hosts: each process runs on its own host. The network of host `unplug` fails once all of them have begun.
    """
    env = {name: value for name, value in os.environ.items() if not name.startswith("JAX_")}
    env |= {"PYTHONPATH": ROOT, "JAX_PLATFORMS": "cpu"}
    address, logs, started = f"{'localhost' if hosts is None else hosts.address}:{port()}", [], []
    for index, place in enumerate(places):
        logs.append(out / f"{index}.log")
        command = [] if hosts is None else hosts.prefix(index)
        command += [sys.executable, str(SCRIPT), fault, address, *map(str, (*place, timeout))]
        with logs[-1].open("w") as file:
            started.append(subprocess.Popen(command, env=env, stdout=file, stderr=subprocess.STDOUT))
    now = time.monotonic()
    sizes, spoke, ends, silence = [0] * len(places), [now] * len(places), [0.0] * len(places), 0.0
    while not all(ends) and time.monotonic() < now + 300:
        time.sleep(0.05)
        if hosts is not None and not hosts.unplugged and all("began" in log.read_text() for log in logs):
            time.sleep(4)  # until the lifelines have connected
            hosts.unplug(unplug)
        for index, process in enumerate(started):
            size, alive = logs[index].stat().st_size, process.poll() is None
            if size != sizes[index] or (not alive and not ends[index]):
                silence = max(silence, time.monotonic() - spoke[index])
                sizes[index], spoke[index] = size, time.monotonic()
            if not alive and not ends[index]:
                ends[index] = time.monotonic()
    for process in started:
        process.kill()
        process.wait()
    between = max(ends) - min(ends)
    print(f"{fault}, {places}: {between:.1f} s between the ends, {silence:.1f} s of silence")
    return Ended([process.returncode for process in started], [log.read_text() for log in logs], silence, between)


class Hosts:
    """Two hosts on one machine, each with a network, a name and a /dev/shm of its own. Needs root and iproute2."""

    address = "10.77.0.1"  # of the first one

    def __init__(self, folder: Path):
        self.unplugged, self._names = False, folder / "hosts"
        self._names.write_text("127.0.0.1 localhost\n10.77.0.1 host0\n10.77.0.2 host1\n")

    def __enter__(self) -> Hosts:
        _ip("link add bridge77 type bridge")
        _ip("link set bridge77 up")
        for number in (0, 1):
            _ip(f"netns add host{number}")
            _ip(f"link add veth77{number} type veth peer name eth0 netns host{number}")
            _ip(f"link set veth77{number} master bridge77 up")
            _ip(f"-n host{number} addr add 10.77.0.{number + 1}/24 dev eth0")
            for device in ("lo", "eth0"):
                _ip(f"-n host{number} link set {device} up")
        return self

    def __exit__(self, *error: object) -> None:
        for number in (0, 1):
            _ip(f"link del veth77{number}")
            _ip(f"netns del host{number}")
        _ip("link del bridge77")

    def prefix(self, number: int) -> list[str]:
        """The beginning of a command that runs on a host."""
        own = f"hostname host{number}; mount -t tmpfs tmpfs /dev/shm; mount --bind {self._names} /etc/hosts"
        enter = ["ip", "netns", "exec", f"host{number}", "unshare", "-m", "-u"]
        return [*enter, "sh", "-c", f'{own}; exec "$@"', "sh"]

    def unplug(self, number: int) -> None:
        _ip(f"-n host{number} link set eth0 down")
        self.unplugged = True


def _ip(command: str) -> None:
    subprocess.run(["ip", *command.split()], check=True)


def assert_ended(found: Ended, *sentences: str, codes: tuple[int, ...]) -> None:
    """Each process exited in time with its code, and with its sentence in the output unless that is empty."""
    assert tuple(found.codes) == codes and found.silence < SILENCE and found.between < END, found
    for text, sentence in zip(found.texts, sentences, strict=True):
        assert sentence in text, text[-3000:]


def test_lines_about_missing_processes_are_never_30_seconds_apart(monkeypatch):
    """In steps of half a second, the interval at which joining polls. The other tests shorten `joining.TELL`."""
    now, lines = 1000.0, [1000.0]
    monkeypatch.setattr(joining, "time", SimpleNamespace(monotonic=lambda: now))
    monkeypatch.setattr(joining, "say", lambda text: lines.append(now))
    patience = joining._Patience()
    for step in range(1, 250):
        now = 1000.25 + joining._RETRY * step
        patience.tell("process 1 of 2 waits")
    apart = [after - before for before, after in pairwise([*lines, now])]
    assert len(lines) >= 5 and max(apart) < SILENCE - 1, apart


def test_processes_that_do_not_come_are_named(tmp_path):
    found = run(tmp_path, "joining", (2, 1), timeout=2)
    error = "TimeoutError: Process 1 of 2 could not join the run at localhost:"
    assert_ended(found, error, codes=(1,))
    assert "within 2 s: nothing answers there (Connection refused). Start process 0 on that host" in found.texts[0]
    assert "trl_jax: process 1 of 2 waits for the run at localhost:" in found.texts[0]

    found = run(tmp_path, "joining", (3, 0), (3, 2), timeout=5)
    assert_ended(found, *["Error: Process 1 of 3 did not join the run at localhost:"] * 2, codes=(1, 1))
    assert "trl_jax: process 0 of 3 waits at localhost:" in found.texts[0]
    assert "process 0 is there, and waits for process 1 (" in found.texts[1]


def test_numbers_that_do_not_fit_together_are_named_in_all_processes(tmp_path):
    found = run(tmp_path, "joining", (2, 0), (2, 2))
    error = "ValueError: process_id must be between 0 and 1 with num_processes=2, got 2 (on "
    assert_ended(found, error, error, codes=(1, 1))

    found = run(tmp_path, "joining", (3, 0), (3, 1), (3, 1))
    error = "ValueError: Two processes of this run have process_id=1: pid "
    assert_ended(found, error, error, error, codes=(1, 1, 1))
    found = run(tmp_path, "joining", (2, 0), (2, 0))
    error = "ValueError: Two processes of this run have process_id=0: pid "
    assert_ended(found, error, error, codes=(1, 1))

    found = run(tmp_path, "joining", (2, 0), (3, 1))
    error = "ValueError: The processes of this run have different num_processes: 3 on process_id=1 on "
    assert_ended(found, error, error, codes=(1, 1))


def test_a_process_that_died_is_named(tmp_path):
    killed = -signal.SIGKILL

    def each(fault):  # all at once, because most of a run is waiting
        (tmp_path / fault).mkdir()
        return run(tmp_path / fault, fault, (2, 0), (2, 1))

    faults = ("kill 1", "kill in python", "kill 0")
    with ThreadPoolExecutor() as pool:
        runs = dict(zip(faults, pool.map(each, faults), strict=True))
    sentence = f"Process 1 of 2 {LOST}, so this process, number 0, cannot continue. {RESUME}"
    found = runs["kill 1"]
    assert_ended(found, f"RuntimeError: {sentence}", "", codes=(1, killed))
    assert "Gloo AllGather failed" in found.texts[0], found.texts[0]
    found = runs["kill in python"]
    assert_ended(found, f"trl_jax: {sentence}", "", codes=(1, killed))

    found = runs["kill 0"]
    sentence = f"Process 0 of 2 {LOST}, so this process, number 1, cannot continue. {RESUME}"
    assert_ended(found, "", sentence, codes=(killed, 1))


def test_a_late_process_and_a_failing_network_are_named_and_children_can_be_ended(tmp_path):
    found = run(tmp_path, "network", (2, 0), (2, 1))
    error = "RuntimeError: The connection between the processes of this run failed in training, though all of them"
    assert_ended(found, error, error, codes=(1, 1))
    assert " s in step 2 for process 1" in found.texts[0] and "in step 2 for" not in found.texts[1], found.texts
    assert all("A child ended with -15\n" in text for text in found.texts), found.texts


@pytest.mark.parametrize(("address", "count", "number", "error"), [
    ("localhost", 2, 0, "coordinator_address must be 'host:port' of the first process, got 'localhost'"),
    ("localhost:1", 2, None, "also needs num_processes"),
    ("localhost:1", "two", 0, "JAX_NUM_PROCESSES must be a whole number, got 'two'"),
    (None, 2, 1, "num_processes=2 and process_id=1 also need coordinator_address"),
])  # fmt: skip
def test_arguments_that_name_no_run_are_refused(address, count, number, error, monkeypatch):
    for name in ("JAX_COORDINATOR_ADDRESS", "JAX_NUM_PROCESSES", "JAX_PROCESS_ID"):
        monkeypatch.delenv(name, raising=False)
    monkeypatch.setattr(jax.distributed, "initialize", lambda *given, **options: pytest.fail("joined a run"))
    with pytest.raises(ValueError, match=error):
        processes.join(address, count, number, 1)


@pytest.mark.skipif(not os.environ.get("HOSTS"), reason="runs under HOSTS=1, as root on Linux")
@pytest.mark.parametrize("unplug", [0, 1])
def test_a_host_whose_network_fails_is_named_by_the_other(unplug, tmp_path):
    """No connection is closed: packets are lost."""
    with Hosts(tmp_path) as hosts:
        found = run(tmp_path, "unplugged", (2, 0), (2, 1), hosts=hosts, unplug=unplug)
    sentences = [f"Process {1 - number} of 2 {LOST}" for number in (0, 1)]
    assert_ended(found, *sentences, codes=(1, 1))


def test_other_errors_are_not_explained():
    observer = watch.Watch()
    for error in (ValueError("max_steps must be at least 1"), OSError("Connection reset by peer")):
        assert observer._explanation(error, "training") is None
