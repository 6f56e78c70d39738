"""The rows and checkpoints that `benchmarks.results` trains on, and the figures quoted in docs/pages/results.md."""

from __future__ import annotations

import json
import random
import re

import numpy as np
import pytest
from safetensors.numpy import load_file

from benchmarks import common, results
from compat_tests import pages
from compat_tests.pages import FOLDER


def test_sums_that_are_held_out_are_not_trained_on():
    rows, held_out = results.sums(random.Random(42))
    asked = [[re.findall(r"\d+", row["prompt"][-1]["content"]) for row in part] for part in (rows, held_out)]
    trained, tested = ({tuple(sorted(map(int, pair))) for pair in part} for part in asked)
    assert len(trained) == 64 - ((2, 3) not in tested) and not trained & tested and (2, 3) not in trained | tested
    for row, (first, second) in zip(rows + held_out, asked[0] + asked[1], strict=True):
        assert row["answer"] == str(int(first) + int(second))
    said = [[{"role": "assistant", "content": text}] for text in (" 7 ", "7.", "8", "2 + 5 = 7")]
    assert results.is_right(said, ["7"] * 4) == [1.0, 0.0, 0.0, 0.0]


def test_people_are_told_apart():
    row = results.person(random.Random(0), results.NAMES, results.CITIES)
    known = json.loads(row["completion"][0]["content"])
    assert list(known) == ["name", "city", "age"]
    assert all(str(value) in row["prompt"][-1]["content"] for value in known.values())
    assert results.exact([row["completion"][0]["content"], "{}"], [json.dumps(known), json.dumps(known)]) == 0.5


def test_a_student_has_the_first_layers(tmp_path):
    common.build_llama(tmp_path / "whole", layers=3, width=64, vocab_size=32)
    results.first_layers(tmp_path / "whole", tmp_path / "student", 2)
    whole, student = (load_file(tmp_path / name / "model.safetensors") for name in ("whole", "student"))
    assert {name for name in whole if ".layers.2." not in name} == set(student) != set(whole)
    assert all(np.array_equal(whole[name], tensor) for name, tensor in student.items())
    assert json.loads((tmp_path / "student" / "config.json").read_text())["num_hidden_layers"] == 2
    with pytest.raises(ValueError, match="has 2 layers; the student wants fewer, got 2"):
        results.first_layers(tmp_path / "student", tmp_path / "again", 2)


def test_the_curve_averages_training_between_evaluations():
    logs = [{"eval_reward": 0.1, "step": 0}, {"loss": 1, "reward": 0.2, "step": 1}, {"reward": 0.4, "step": 2}]
    found = results.curve([*logs, {"eval_reward": 0.5, "step": 2}], "grpo")
    assert found == [
        {"step": 0, "reward": None, "eval reward": 0.1},
        {"step": 2, "reward": pytest.approx(0.3), "eval reward": 0.5},
    ]


def test_figures_in_the_text_are_those_of_the_tables():
    """ "falls from A to B" or "rises from A to B" refers to the third column of the section's table."""
    said = {}
    for heading, text in pages.sections(FOLDER / "results.md").items():
        if found := re.search(r"(?:falls|rises)\s+from\s+(\d[\d.]*)\s+to\s+(\d[\d.]*\d)", text):
            rows = [list(row.values()) for row in pages.tables(text)[0]]
            assert found.groups() == (rows[0][2], rows[-1][2]), heading
            said[heading] = rows
    assert len(said) == 4
