"""Ten steps of each kind of architecture against TRL."""

from __future__ import annotations

import re

import pytest

from compat_tests.effort import usual, usually
from compat_tests.parity import golden, reference
from compat_tests.parity.cases import FAMILY_CASES
from compat_tests.parity.marks import assert_same_curve, assert_same_weights
from compat_tests.parity.sketch import gap
from compat_tests.tiny import preference_rows, tiny_model


@usual("mistral", "gemma2", "gemma3_text", "phi3", "olmo2", "gpt2", "gpt_neox", "mixtral", "qwen3_moe")
@pytest.mark.parametrize("family", usually({"gemma2", "gpt_oss"}.__contains__, FAMILY_CASES))
def test_ten_steps_are_trls(family, tmp_path):
    case, called = FAMILY_CASES[family], f"families/{family}"
    folder, rows = tiny_model(tmp_path / "model", family, **case.model), preference_rows(40, seed=3)
    ours = reference.run_ours(folder, rows, tmp_path / "ours", **case.config)
    theirs = golden.run_trl(called, folder, rows, tmp_path / "theirs", model=[family, case.model], **case.config)
    assert theirs.logs[-1]["step"] == 10
    assert_same_curve(ours.logs, theirs.logs, **case.marks)
    held = [name for name in theirs.weights if not re.search(case.adrift, name)]
    assert sorted(ours.weights) == sorted(theirs.weights)
    mine, other = ({name: side.weights[name] for name in held} for side in (ours, theirs))
    assert_same_weights(mine, other, case.weights)
    before = reference.read_weights(folder)
    moved = [gap(name, before[name], after) for name, after in theirs.weights.items() if name in before]
    assert max(moved) > 2 * case.weights
