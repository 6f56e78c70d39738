"""Two processes whose completions use tools and environments: the rows and results of one process."""

from __future__ import annotations

import json
import os
import subprocess
import sys
import threading
from pathlib import Path

import numpy as np
import pytest

from compat_tests.effort import only_thorough
from compat_tests.mesh.launching import port
from compat_tests.parity.dpo_cases import SMALL
from compat_tests.parity.marks import timeless
from trl_jax.rollout.rollout import EncodedTexts, GeneratedCompletions
from trl_jax.rollout.tools import Environments
from trl_jax.training import rollout_processes

SCRIPT = Path(__file__).with_name("tools_run.py")
ROOT = str(Path(__file__).parents[2])


def run(out, model, number=None, address=""):
    env = os.environ | {"PYTHONPATH": ROOT, "JAX_PLATFORMS": "cpu"}
    if number is not None:
        env |= {"JAX_COORDINATOR_ADDRESS": address, "JAX_NUM_PROCESSES": "2", "JAX_PROCESS_ID": str(number)}
    with (out / f"{number}.log").open("w") as log:
        command = [sys.executable, str(SCRIPT), str(model), str(out)]
        return subprocess.Popen(command, env=env, stdout=log, stderr=subprocess.STDOUT)


@only_thorough  # 80 s of CPU time, mostly imports
def test_two_processes_with_tools_are_one(checkpoint, tmp_path):
    model = checkpoint("qwen3", **{key: value for key, value in SMALL.items() if key != "model_type"})
    address = f"localhost:{port()}"
    started = [run(tmp_path, model, number, address) for number in (0, 1)] + [run(tmp_path, model)]
    codes = [process.wait(500) for process in started]
    assert codes == [0, 0, 0], [(tmp_path / f"{name}.log").read_text()[-3000:] for name in ("0", "1", "None")]
    one, first, second = (json.loads((tmp_path / f"{name}.json").read_text()) for name in ("one", "0", "1"))
    half = [found["seen"][start : start + 2] for start in (0, 2) for found in (first, second)]
    assert sum(half, []) == one["seen"] and len(one["seen"]) == 8
    assert [len(messages) for _, messages, _ in one["seen"][:4]] == [3, 1, 3, 3]
    for own, other, wanted in zip(first["logs"], second["logs"], one["logs"], strict=True):
        own, other, wanted = map(timeless, (own, other, wanted))
        assert wanted["tools/call_frequency"] == 0.75 and wanted["tools/failure_frequency"] == pytest.approx(1 / 3)
        assert own == pytest.approx(wanted, rel=1e-5, abs=1e-6, nan_ok=True) and own == pytest.approx(other)


class Counter:
    """Counts its instances. The first process has two rows; `reset` returns no text for one of them."""

    made = 0

    def __init__(self):
        type(self).made += 1

    def reset(self, number, **row):
        self.number = number
        return f" {number}" if number else None


@pytest.mark.parametrize(("own", "others"), [(slice(0, 2), ["c 2"]), (slice(2, 3), ["a", "b 1"])])
def test_a_process_resets_the_environments_of_its_own_rows(own, others, monkeypatch):
    def of_each_process(do):
        return [do(), talks] if own.start == 0 else [talks, do()]

    talks, Counter.made = [[{"role": "user", "content": text}] for text in others], 0
    monkeypatch.setattr(rollout_processes, "local_part", lambda rows: own)
    monkeypatch.setattr(rollout_processes, "of_each_process", of_each_process)
    rows = [{"prompt": [{"role": "user", "content": text}], "number": place} for place, text in enumerate("abc")]
    found = rollout_processes.begin_local_part(Environments(Counter), rows)
    assert [row["prompt"][0]["content"] for row in found] == ["a", "b 1", "c 2"]
    assert [row["environments"].number for row in found[own]] == list(range(3))[own]
    assert sum("environments" in row for row in found) == Counter.made == len(rows[own])


def test_tool_calls_of_all_processes_are_counted():
    def part(count, calls):
        ids = [np.ones(2, np.int32)] * count
        return GeneratedCompletions(
            ids, ids, [own > 0 for own in ids], messages=[[{"role": "tool"}]] * count, calls=calls
        )

    whole = rollout_processes.joined([part(3, (4, 1)), part(1, (1, 1))])
    assert whole.calls == (5, 2) and len(whole.messages) == 4
    assert whole.metrics == {"tools/call_frequency": 1.25, "tools/failure_frequency": pytest.approx(0.4)}
    assert rollout_processes.joined([part(1, None), part(1, None)]).metrics == {}


@pytest.fixture
def both(monkeypatch):
    """Calls a function in two threads that act as processes 0 and 1; returns what each returned or raised."""
    here, barrier, given = threading.local(), threading.Barrier(2, timeout=20), {}

    def of_each_process(do):
        try:
            given[here.number] = do(), None
        except ValueError as error:
            given[here.number] = None, error
        barrier.wait()
        found = [given[number] for number in (0, 1)]
        barrier.wait()
        for number, (_, error) in enumerate(found):
            if error is not None:
                raise error if number == here.number else RuntimeError(f"Process {number} raised {error}")
        return [value for value, _ in found]

    def run(function):
        def process(number):
            here.number = number
            try:
                found[number] = function(number)
            except Exception as error:
                found[number] = error

        found = [None, None]
        threads = [threading.Thread(target=process, args=(number,)) for number in (0, 1)]
        [thread.start() for thread in threads]
        [thread.join() for thread in threads]
        return found

    monkeypatch.setattr(rollout_processes, "several", lambda: True)
    monkeypatch.setattr(rollout_processes, "of_each_process", of_each_process)
    monkeypatch.setattr(rollout_processes.jax, "process_index", lambda: here.number)
    return run


def complete(texts, rooms):
    """The reversed texts, with their maximum lengths in place of log-probabilities."""
    return [text[::-1] for text in texts.ids], rooms


@pytest.mark.parametrize("turns", [(3, 1), (0, 2), (0, 0)])
def test_rounds_go_on_until_all_processes_have_ended(turns, both):
    def run(number):
        def ask(further):
            return [further(EncodedTexts([f"{number}{turn}", "x"]), [number, turn]) for turn in range(turns[number])]

        return rollout_processes.in_rounds(complete, ask)

    wanted = [[([f"{turn}{number}", "x"], [number, turn]) for turn in range(turns[number])] for number in (0, 1)]
    assert both(run) == wanted


@pytest.mark.parametrize("others_turns", [0, 1, 3])
def test_what_one_process_raises_ends_the_rounds_of_both(others_turns, both):
    def run(number):
        def ask(further):
            for turn in range(1 if number else others_turns):
                further(EncodedTexts([str(turn)]), [0])
            if number:
                raise ValueError("no shop")

        return rollout_processes.in_rounds(complete, ask)

    other, own = both(run)
    assert isinstance(own, ValueError) and isinstance(other, RuntimeError) and str(other) == "Process 1 raised no shop"
