"""Ten steps of each kind of architecture, by real TRL and by us."""

from __future__ import annotations

import re

import numpy as np
import pytest

from compat_tests.parity import reference
from compat_tests.parity.cases import FAMILY_CASES
from compat_tests.parity.marks import assert_same_curve, assert_same_weights
from compat_tests.tiny import preference_rows, tiny_model


@pytest.mark.parametrize("family", FAMILY_CASES)
def test_ten_steps_are_trls(family, tmp_path):
    pytest.importorskip("trl")
    case = FAMILY_CASES[family]
    folder, rows = tiny_model(tmp_path / "model", family, **case.model), preference_rows(40, seed=3)
    ours, theirs = (
        run(folder, rows, tmp_path / run.__name__, **case.config) for run in (reference.run_ours, reference.run_trl)
    )
    assert theirs.logs[-1]["step"] == 10
    assert_same_curve(ours.logs, theirs.logs, **case.marks)
    held = [name for name in theirs.weights if not re.search(case.adrift, name)]
    assert sorted(ours.weights) == sorted(theirs.weights)
    mine, other = ({name: side.weights[name] for name in held} for side in (ours, theirs))
    assert_same_weights(mine, other, case.weights)
    before = reference.read_weights(folder)
    moved = [np.abs(after - before[name]).max() for name, after in theirs.weights.items() if name in before]
    assert max(moved) > 2 * case.weights
