"""Rooms that every task shares do not speak of one: no pairs, no chosen and rejected answers, no rewards."""

from __future__ import annotations

import re
from pathlib import Path

import pytest

import trl_jax

PACKAGE = Path(trl_jax.__file__).parent
SHARED = ("data/layout", "engine", "run", "nn", "models", "hub")
OF_A_TASK = {"pair", "pairs", "chosen", "rejected", "preference", "preferences", "reward", "rewards"}
WORD = re.compile(r"[A-Z]?[a-z]+|[A-Z]+(?![a-z])")  # in names, too: num_pairs, RewardConfig
CHANNELS = re.compile(r"pairs? of channels|(?<=turn )pairs", re.IGNORECASE)  # what rotary positions turn
ALLOWED = {
    "hub/card.py": {"reward"},  # tags and text of the card that TRL writes for its reward models
    "hub/heads.py": {"reward"},  # TRL's errors for a checkpoint with another head than a score
    "nn/rope.py": {"pair", "pairs"},  # of channels
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
    return sorted(str(path.relative_to(PACKAGE)) for room in SHARED for path in (PACKAGE / room).rglob("*.py"))


@pytest.mark.parametrize("file", files())
def test_shared_rooms_name_no_task(file):
    assert words_of_a_task((PACKAGE / file).read_text(encoding="utf-8"), file) == []


def test_no_shared_room_is_passed_over():
    assert {file.rpartition("/")[0] for file in files()} >= set(SHARED)


# The checker itself can fail.


@pytest.mark.parametrize(
    "line",
    ["num_pairs = 1", "def f(chosen): ...", "# Pairs of answers", "RewardConfig", "reward-trainer", "rejected_ids"]
    + ["DataCollatorForPreference", "REWARDS = 2", "a preference", "pairs of texts"],
)
def test_the_checker_objects(line):
    assert words_of_a_task(f"import os\n    {line}\n") == [f"2: {line}"]
    assert words_of_a_task(line, "nn/moe.py")


@pytest.mark.parametrize("line", ["repair", "unpaired = 2", "rotary positions turn pairs", "a pair of channels"])
def test_the_checker_allows(line):
    assert words_of_a_task(line) == []
    assert words_of_a_task("a pair, of two", "nn/rope.py") == [] != words_of_a_task("a reward", "nn/rope.py")
