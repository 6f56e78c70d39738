"""What eval_report adds to an evaluation, and that nothing is added without it."""

from __future__ import annotations

import xml.dom.minidom

import numpy as np
import pytest

import trl_jax
from compat_tests.trainer.trainers import FACTS, make, table
from trl_jax.trainer.reward_trainer import calibration_error, eval_report, histogram


def test_an_evaluation_reports_its_subsets_and_draws_its_margins(checkpoint, tmp_path):
    folder = checkpoint(**FACTS)
    rows = table(11).add_column("subset", ["chat"] * 4 + ["code"] * 7)
    plain = make(trl_jax, folder, tmp_path, eval_dataset=rows).evaluate()
    assert not list(tmp_path.glob("*.svg"))
    trainer = make(trl_jax, folder, tmp_path, eval_dataset=rows, config={"eval_report": True})
    found = trainer.evaluate()
    added = ["eval_ece", "eval_accuracy_chat", "eval_accuracy_code", "eval_accuracy_of_subsets"]
    assert set(found) - set(plain) == set(added)
    scores = trainer.predict(rows).predictions[:, 0]
    margins = np.concatenate([np.subtract(*np.split(part, 2)) for part in np.split(scores, [8, 16])])
    assert found["eval_accuracy_chat"] == np.mean(margins[:4] > 0)
    assert found["eval_accuracy_code"] == pytest.approx(np.mean(margins[4:] > 0))
    assert found["eval_accuracy_of_subsets"] == (found["eval_accuracy_chat"] + found["eval_accuracy_code"]) / 2
    assert found["eval_ece"] == pytest.approx(calibration_error(margins))
    assert "margin of 11 pairs" in (tmp_path / "eval_margins.svg").read_text()


def test_without_a_column_there_are_no_subsets(tmp_path):
    assert set(eval_report(np.array([1.0, -1.0]), None, prefix="eval", folder=tmp_path)) == {"ece"}


def test_calibration():
    """Confidence equal to accuracy: no error. Certain and wrong: an error of 1."""
    even = np.log(3.0)  # sigmoid is 0.75
    assert calibration_error(np.array([even, even, even, -even])) == pytest.approx(0)
    assert calibration_error(np.array([-50.0, -50.0])) == pytest.approx(1)
    assert calibration_error(np.zeros(4)) == pytest.approx(0.5)  # confidence 0.5, accuracy 0


def test_margins_that_are_no_numbers(tmp_path):
    found = eval_report(np.array([1.0, np.nan, -2.0, 3.0]), ["a", "a", "b", "b"], prefix="eval", folder=tmp_path)
    assert np.isnan(found["ece"]) and found["accuracy_a"] == 0.5 and found["accuracy_b"] == 0.5
    assert "margin of 3 pairs" in (tmp_path / "eval_margins.svg").read_text()
    eval_report(np.full(2, np.nan), None, prefix="none", folder=tmp_path)
    assert not (tmp_path / "none_margins.svg").exists()


def test_the_picture_is_one():
    drawn = histogram(np.array([-1.0, 0.5, 0.5, 2.0]))
    xml.dom.minidom.parseString(drawn)
    assert "75.0% above 0" in drawn and "#c44" in drawn and "2.00" in drawn
    xml.dom.minidom.parseString(histogram(np.zeros(3)))
