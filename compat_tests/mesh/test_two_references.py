"""Two real processes of trainers that compare with a reference, beside two ranks of TRL."""

from __future__ import annotations

import json

import pytest

from compat_tests.mesh.launching import launch_both
from compat_tests.parity.dpo_cases import SMALL
from compat_tests.parity.reference import read_weights
from compat_tests.parity.test_dpo_curve import assert_same

TWO = {"mesh_shape": "fsdp:2"}
CONFIG = {"gradient_accumulation_steps": 2, "max_steps": 5, "lr_scheduler_type": "constant", "max_length": 64}
RUNS = {
    "DPO": {"trainer": "DPO", "learning_rate": 3e-3},
    # Both ranks' answers to other prompts estimate the divergence.
    "KTO": {"trainer": "KTO", "learning_rate": 1e-2, "beta": 0.3},
}
# TRL's ranks do not find what the first of them precomputes for rows in memory.
BEFORE = {"precompute_ref_log_probs": True}


@pytest.mark.parametrize(("name", "more"), [("DPO", {}), ("DPO", BEFORE), ("KTO", {})])
def test_two_processes_are_two_ranks_of_trl(checkpoint, tmp_path, name, more):
    pytest.importorskip("trl")
    folder = checkpoint(**SMALL)
    launch_both(folder, tmp_path, CONFIG | RUNS[name], ours=TWO | more)
    ours, theirs = (json.loads((tmp_path / f"{whose}.json").read_text()) for whose in ("ours", "trl"))
    assert len(ours) == len(theirs) == 6
    for mine, other in zip(ours, theirs, strict=True):
        assert_same(mine, other)
    assert any(abs(entry.get("rewards/chosen", 0)) > 0.01 for entry in theirs)
    weights, wanted = (read_weights(tmp_path / whose / "final") for whose in ("ours", "trl"))
    assert weights.keys() == wanted.keys()
    for tensor, values in wanted.items():
        assert abs(weights[tensor] - values).max() < 1e-3, tensor
    if name == "KTO":
        assert any(entry.get("kl", 0) > 0.01 for entry in theirs)
