"""Words: shared rooms do not speak of one task (pairs, chosen and rejected answers, rewards), and docstrings say what
a thing is."""

from __future__ import annotations

import ast
import re
from pathlib import Path

import pytest

import trl_jax

PACKAGE = Path(trl_jax.__file__).parent
SHARED = ("data/layout", "engine", "run", "nn", "models", "generation", "hub", "dryrun", "cli")
SHARED_SCRIPTS = ("datasets", "mixture", "plan/__init__", "plan/parser", "plan/text", "training", "utils")
OF_A_TASK = {"pair", "pairs", "chosen", "rejected", "preference", "preferences", "reward", "rewards"}
WORD = re.compile(r"[A-Z]?[a-z]+|[A-Z]+(?![a-z])")  # in names, too: num_pairs, RewardConfig
CHANNELS = re.compile(r"pairs? of channels|(?<=turn )pairs", re.IGNORECASE)  # what rotary positions turn
ALLOWED = {
    "cli/compare/verdict.py": {"reward"},  # a number that some runs log
    "cli/front.py": {"rewards"},  # trl.rewards, a module of TRL
    "cli/main.py": {"reward"},  # the model that `trl-jax score` runs
    "dryrun/hlo.py": {"pairs"},  # of devices, in HLO's name for them
    "hub/card.py": {"reward"},  # tags and text of the card that TRL writes for its reward models
    "hub/heads.py": {"reward"},  # TRL's errors for a checkpoint with another head than a score
    "hub/torch/objects.py": {"reward"},  # the same, of a torch model
    "nn/rope.py": {"pair", "pairs"},  # of channels
    "run/rollouts/ranks.py": {"reward", "rewards"},
    "run/rollouts/parts.py": {"reward", "rewards"},
    "run/rollouts/steps.py": {"rewards"},
    "dryrun/made_completions.py": {"reward"},
    "scripts/plan/__init__.py": {"reward", "rewards"},  # flags that name what scores completions
    "scripts/plan/parser.py": {"reward", "rewards"},
    "run/evaluation/completions.py": {"rewards"},
}


def words_of_a_task(source: str, file: str = "") -> list[str]:
    """The lines that have one, each as "number: line"."""
    wrong = OF_A_TASK - ALLOWED.get(file, set())
    return [
        f"{number}: {line.strip()}"
        for number, line in enumerate(source.splitlines(), start=1)
        if wrong & {word.lower() for word in WORD.findall(CHANNELS.sub("", line))}
    ]


def files() -> list[str]:
    rooms = (path for room in SHARED for path in (PACKAGE / room).rglob("*.py"))
    scripts = (PACKAGE / "scripts" / f"{name}.py" for name in SHARED_SCRIPTS)
    return sorted(str(path.relative_to(PACKAGE)) for path in (*rooms, *scripts))


@pytest.mark.parametrize("file", files())
def test_shared_rooms_name_no_task(file):
    assert words_of_a_task((PACKAGE / file).read_text(encoding="utf-8"), file) == []


def test_no_shared_room_is_passed_over():
    assert {file.rpartition("/")[0] for file in files()} >= set(SHARED)


def riddles(source: str) -> list[str]:
    """The docstrings that begin with "What", by their line."""
    documented = (ast.Module, ast.ClassDef, ast.FunctionDef, ast.AsyncFunctionDef)
    texts = [(node.body[0].lineno, ast.get_docstring(node)) for node in ast.walk(ast.parse(source))
             if isinstance(node, documented) and ast.get_docstring(node)]  # fmt: skip
    return [f"{line}: {text.splitlines()[0]}" for line, text in texts if re.match(r"what\b", text, re.IGNORECASE)]


def test_docstrings_say_what_a_thing_is():
    """They begin with a verb or a noun."""
    files = {str(path.relative_to(PACKAGE)): path.read_text(encoding="utf-8") for path in PACKAGE.rglob("*.py")}
    assert {file: found for file, source in files.items() if (found := riddles(source))} == {}


# The checkers themselves can fail.


@pytest.mark.parametrize("head", ["", "class A:\n    ", "def f():\n    ", "async def f():\n    "])
def test_a_docstring_that_begins_with_what_is_found(head):
    assert len(riddles(f'{head}"""What a step is."""\n')) == 1
    assert riddles(f'{head}"""Whatever: say what a step is."""\n') == []



@pytest.mark.parametrize(
    "line",
    ["num_pairs = 1", "def f(chosen): ...", "# Pairs of answers", "RewardConfig", "reward-trainer", "rejected_ids"]
    + ["DataCollatorForPreference", "REWARDS = 2", "a preference", "pairs of texts"],
)
def test_the_checker_objects(line):
    assert words_of_a_task(f"import os\n    {line}\n") == [f"2: {line}"]
    assert words_of_a_task(line, "nn/experts/moe.py")


@pytest.mark.parametrize("line", ["repair", "unpaired = 2", "rotary positions turn pairs", "a pair of channels"])
def test_the_checker_allows(line):
    assert words_of_a_task(line) == []
    assert words_of_a_task("a pair, of two", "nn/rope.py") == [] != words_of_a_task("a reward", "nn/rope.py")
