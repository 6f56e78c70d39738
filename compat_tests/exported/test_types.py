"""Exported model types: scores and gradients match transformers' own code.

All types: python -m benchmarks.exported_sweep
"""

from __future__ import annotations

import pytest

from compat_tests.effort import only_thorough, usually
from compat_tests.exported import configs

pytest.importorskip("torch")

from compat_tests.exported.check import compare


@pytest.mark.parametrize("model_type", usually("albert".__eq__, configs.SOME))
def test_scores_and_gradients(model_type, tmp_path):
    folder = configs.build(tmp_path, model_type)
    ids, mask = configs.rows()
    assert configs.scores(configs.reference(folder), ids, mask).std() > 1e-2
    apart = compare(folder)
    assert apart.scores < 1e-5
    assert apart.gradients < 1e-4, apart.parameter


def test_some_are_among_all():
    assert set(configs.SOME) < set(configs.TYPES) and len(configs.TYPES) == len(set(configs.TYPES)) == 98


@only_thorough
def test_the_comparison_notices_a_wrong_operation(tmp_path, monkeypatch):
    """gelu by its tanh approximation, which is off by at most a thousandth."""
    from trl_jax.exported import aten as table
    from trl_jax.exported.aten import _gelu

    folder = configs.build(tmp_path, "albert", hidden_act="gelu")
    assert compare(folder).scores < 1e-5
    monkeypatch.setitem(table.OPERATIONS, "aten.gelu.default", lambda x, **how: _gelu(x, approximate="tanh"))
    assert compare(folder).scores > 1e-5
