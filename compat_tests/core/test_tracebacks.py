"""Tracebacks of a user's mistake show the user's own lines and our message, without the frames in between."""

from __future__ import annotations

import os
import subprocess
import sys
import traceback
from pathlib import Path

import pytest

import trl_jax
from compat_tests.effort import thorough
from compat_tests.light import IMPORTS
from trl_jax.core.text import FRAMES_HIDDEN, api_boundary

# Stands in for a module of the package; `call` is its public function.
OURS = """
def call(function):
    return between(function)

def between(function):
    return function()

def refusal():
    try:
        {}["missing"]
    except KeyError as error:
        raise ValueError("refused") from error

def wrong_assumption():
    return None.attribute

def broken_promise():
    assert False, "promise"

def of_a_library():
    import json
    return json.loads("{")

def of_the_system():
    from pathlib import Path
    return Path("/nowhere/at/all").read_text()

def unexpected_by_a_library():
    import json
    return json.dumps(object())
"""


@pytest.fixture(scope="module")
def ours():
    module = {"__name__": "trl_jax.stand_in"}
    exec(compile(OURS, "stand_in.py", "exec"), module)
    return {**module, "call": api_boundary(module["call"])}


def mistake():
    import json

    return json.loads("[")  # a library frame below the user's


def frames(error: BaseException) -> list[str]:
    return [frame.name for frame in traceback.extract_tb(error.__traceback__)][1:]  # the first is the test's own


@pytest.mark.parametrize("name", ["refusal", "of_a_library", "of_the_system"])
def test_an_error_that_the_user_caused_has_no_frames_of_ours(ours, name):
    with pytest.raises((ValueError, OSError)) as told:
        ours["call"](ours[name])
    assert frames(told.value) == [] and told.value.__notes__ == [FRAMES_HIDDEN]


def test_causes_keep_their_text_alone(ours):
    with pytest.raises(ValueError, match="refused") as told:
        ours["call"](ours["refusal"])
    text = "".join(traceback.format_exception(told.value))
    assert "KeyError: 'missing'" in text and "stand_in.py" not in text


@pytest.mark.parametrize("name", ["wrong_assumption", "broken_promise", "unexpected_by_a_library"])
def test_an_error_that_may_be_a_bug_of_ours_keeps_all_frames(ours, name):
    with pytest.raises((AttributeError, AssertionError, TypeError)) as told:
        ours["call"](ours[name])
    assert frames(told.value)[:4] == ["boundary", "call", "between", name] and not hasattr(told.value, "__notes__")


def test_a_users_function_keeps_its_frames_and_those_below(ours):
    with pytest.raises(ValueError) as told:
        ours["call"](mistake)
    assert frames(told.value)[:2] == ["mistake", "loads"] and len(frames(told.value)) > 2


def test_boundaries_may_be_nested(ours):
    with pytest.raises(ValueError, match="refused") as told:
        ours["call"](lambda: ours["call"](ours["refusal"]))
    assert frames(told.value) == ["<lambda>"] and told.value.__notes__ == [FRAMES_HIDDEN]


def test_the_environment_shows_everything(ours, monkeypatch):
    monkeypatch.setenv("TRL_JAX_TRACEBACK", "1")
    with pytest.raises(ValueError, match="refused") as told:
        ours["call"](ours["refusal"])
    assert frames(told.value) == ["boundary", "call", "between", "refusal"]


SCRIPT = """from datasets import Dataset
from {package} import DPOConfig, DPOTrainer

rows = Dataset.from_list([dict(prompt="p", chosen="c", rejected="r")])
DPOTrainer("nowhere", DPOConfig(use_cpu=True, bf16=False), train_dataset=rows)
"""
MESSAGE = (
    "TypeError: ref_model of DPOTrainer is a DPOConfig. Pass it as args=: by position, the arguments are model, "
    "ref_model, args and so on, as in TRL."
)


@pytest.mark.parametrize(("package", "launcher"), [("trl_jax", []), thorough("trl", ["-m", "trl_jax"])])
def test_a_script_ends_with_its_own_line_and_the_message(tmp_path, package, launcher):
    script = tmp_path / "script.py"
    script.write_text(IMPORTS + SCRIPT.format(package=package))
    paths = os.pathsep.join([str(Path(trl_jax.__file__).parents[1]), os.environ.get("PYTHONPATH", "")])
    ended = subprocess.run(
        [sys.executable, *launcher, str(script)], cwd=tmp_path, capture_output=True, text=True, timeout=240,
        env=os.environ | {"PYTHONPATH": paths, "USE_TORCH": "0"},
    )  # fmt: skip
    lines = [line for line in ended.stderr.splitlines() if line.strip(" ^~")]  # Python underlines parts of a line
    expected = [
        "Traceback (most recent call last):",
        f'  File "{script}", line {len((IMPORTS + SCRIPT).splitlines())}, in <module>',
        f"    {SCRIPT.splitlines()[-1]}",
        MESSAGE,
        FRAMES_HIDDEN,
    ]
    assert (ended.returncode, lines[-5:]) == (1, expected) and lines.count(expected[0]) == 1
