"""Recordings of TRL's side of the parity tests, one file per group of cases in golden/.

    RECORD=1 bash compat_tests/run.sh compat_tests/parity compat_tests/mesh      makes them
    LIVE=1 bash compat_tests/run.sh                                             runs TRL instead of reading them

A recording holds what TRL logged at each step, a sketch of the weights that it saved, and what else a test needs from
the run. It is valid only for the same rows, config, checkpoint and training code. The machine and the other releases
are recorded for error messages: they should not matter.
"""

from __future__ import annotations

import dataclasses
import fcntl
import hashlib
import inspect
import json
import os
import platform
from collections.abc import Callable
from importlib.metadata import version
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from compat_tests import tiny
from compat_tests.parity import reference
from compat_tests.parity.marks import assert_same_weights, timeless
from compat_tests.parity.sketch import sketch, unpacked

FOLDER = Path(__file__).with_name("golden")
COMMAND = "RECORD=1 bash compat_tests/run.sh compat_tests/parity compat_tests/mesh"
RELEASES = ("trl", "transformers", "torch")
# One case of each trainer for which TRL always runs, so that a wrong recording is noticed.
ALWAYS = (
    "reward/pad_is_eos_chat", "sft/text", "dpo/thirty_steps", "kto/thirty_steps", "grpo/default", "rloo/default",
)  # fmt: skip
OURS = ("batch_layout",)  # arguments that TRL does not have


def live(name: str | None = None) -> bool:
    """Whether to run TRL itself: if requested, or because this case checks its recording."""
    return bool(os.environ.get("LIVE") or os.environ.get("RECORD")) or name in ALWAYS


def run_trl(name: str, folder: Path, rows: list, out: Path, *, model: Any, facts=None, **keywords) -> reference.Run:
    """TRL's run of a case: `reference.run_trl`, or its recording.

    Args:
        name: "group/case", unique.
        model: what `folder` was made from, as JSON; a recording of another model is not valid.
        facts: computes the Run's `facts` from the run; they must be JSON.
    """

    def run() -> reference.Run:
        made = reference.run_trl(folder, rows, out, **keywords)
        return made if facts is None else dataclasses.replace(made, facts=facts(made))

    return recorded_or(name, digest(folder, rows, model, keywords), run)


def recorded_or(name: str, key: str, make: Callable[[], reference.Run]) -> reference.Run:
    """The recording of TRL's run, which must have this digest; if TRL is to run live, the result of `make`."""
    if not live(name):
        return _recorded(name, key)
    pytest.importorskip("trl", reason="parity is measured against real TRL")
    run = make()
    if os.environ.get("RECORD"):
        _record(name, key, run)
    elif name in ALWAYS:
        _assert_still_so(name, run, _recorded(name, key))
    return run


def digest(folder: Path, rows: list, model: Any, keywords: dict, *code_too: Callable) -> str:
    """A digest of everything that determines TRL's run, except releases and the machine. Of the checkpoint it has only
    names, dtypes and shapes, because its numbers may differ in the last digit. `code_too`: more functions whose source
    code is included."""
    tensors = {name: (str(tensor.dtype), tensor.shape) for name, tensor in reference.read_weights(folder).items()}
    config = {key: value for key, value in (reference.BASE | keywords).items() if key not in OURS}
    code = [inspect.getsource(part) for part in (reference._run, tiny._randomise, *code_too)]
    source = [config, rows, model, tensors, code]
    return hashlib.sha256(json.dumps(source, sort_keys=True, default=_plain).encode()).hexdigest()[:16]


def _plain(value: Any) -> Any:
    """Makes sets, and configs such as PEFT's, serializable."""
    if isinstance(value, set):
        return sorted(value)
    return {key: part for key, part in value.to_dict().items() if part is not None}


def _recorded(name: str, key: str) -> reference.Run:
    group, case = name.split("/")
    path = FOLDER / f"{group}.json"
    cases = json.loads(path.read_text()) if path.exists() else {}
    again = f"Make it with\n\n    {COMMAND}\n\nor run TRL beside it with LIVE=1."
    if case not in cases:
        raise AssertionError(f"{path} has no recording of TRL's run {case!r}. {again}")
    found = cases[case]
    if found["source"] != key:
        raise AssertionError(
            f"{path}: the recording of TRL's run {case!r} is of the source {found['source']}, and the case's is {key}: "
            f"its rows, config or checkpoint have changed since. {again}"
        )
    if version("trl") != found["releases"]["trl"]:
        raise AssertionError(f"{path}: {case!r} is recorded of trl {found['releases']['trl']}, and {version('trl')} is "
                             f"installed. {again}")  # fmt: skip
    weights = {tensor: unpacked(word) for tensor, word in found["weights"].items()}
    predictions = None if found["predictions"] is None else np.asarray(found["predictions"], np.float32)
    logs = [dict(zip(found["keys"][keys], values, strict=True)) for keys, *values in found["logs"]]
    return reference.Run(logs, None, weights, found["evaluated"], predictions, found["facts"])


def _record(name: str, key: str, run: reference.Run) -> None:
    group, case = name.split("/")
    logs = [_shortened(entry) for entry in run.logs]
    keys = [list(kind) for kind in dict.fromkeys(map(tuple, logs))]
    made = {
        "source": key,
        "releases": {release: version(release) for release in RELEASES},
        "machine": machine(),
        "keys": keys,
        "logs": [[keys.index(list(entry)), *entry.values()] for entry in logs],
        "weights": {tensor: sketch(tensor, run.weights[tensor]).packed() for tensor in run.weights},
        "evaluated": None if run.evaluate_metrics is None else _shortened(run.evaluate_metrics),
        "predictions": None if run.predictions is None else run.predictions.tolist(),
        "facts": run.facts,
    }
    FOLDER.mkdir(exist_ok=True)
    with (FOLDER / ".lock").open("w") as lock:
        fcntl.flock(lock, fcntl.LOCK_EX)
        path = FOLDER / f"{group}.json"
        cases = json.loads(path.read_text()) if path.exists() else {}
        path.write_text(_lines(cases | {case: made}))


def _lines(cases: dict) -> str:
    """JSON with one line for each log entry and each tensor."""

    def written(value: Any) -> str:
        return json.dumps(value, separators=(",", ":"))

    def part(name: str, value: Any) -> str:
        if name == "logs":
            return "[\n" + ",\n".join(map(written, value)) + "\n]"
        if name == "weights":
            return "{\n" + ",\n".join(f"{written(key)}:{written(word)}" for key, word in value.items()) + "\n}"
        return written(value)

    def whole(made: dict) -> str:
        return "{\n" + ",\n".join(f"{written(name)}:{part(name, value)}" for name, value in made.items()) + "}"

    return "{\n" + ",\n".join(f"{written(case)}:{whole(made)}" for case, made in sorted(cases.items())) + "\n}\n"


def _shortened(entry: dict) -> dict:
    """Without wall-clock figures; float32 values are rounded to nine digits."""
    exact = ("learning_rate", "epoch")
    return {
        key: float(f"{value:.9g}") if isinstance(value, float) and key not in exact else value
        for key, value in timeless(entry).items()
    }


def machine() -> str:
    """The model of the processor."""
    lines = Path("/proc/cpuinfo").read_text().splitlines() if Path("/proc/cpuinfo").exists() else []
    models = [line.split(":", 1)[1].strip() for line in lines if line.startswith("model name")]
    return " ".join([platform.machine(), *models[:1]])


def _assert_still_so(name: str, run: reference.Run, recorded: reference.Run) -> None:
    """Assert that the live run equals the recorded one up to rounding on another machine."""
    again = f"{name}: TRL's run is not what was recorded of it. Make that again with {COMMAND}"
    now, then = ([timeless(entry) for entry in each.logs] for each in (run, recorded))
    assert [list(entry) for entry in now] == [list(entry) for entry in then], again
    for mine, other in zip(now, then, strict=True):
        assert list(mine.values()) == pytest.approx(list(other.values()), rel=5e-5, abs=5e-5), again
    assert_same_weights(run.weights, recorded.weights)
