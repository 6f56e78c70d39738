"""Two real processes that train language models, beside two ranks of TRL: one trainer after the other in each."""

from __future__ import annotations

import json

import pytest

from compat_tests.mesh.launching import launch_both
from compat_tests.parity.dpo_cases import SMALL
from compat_tests.parity.reference import read_weights
from compat_tests.parity.test_dpo_curve import assert_same

CONFIG = {"gradient_accumulation_steps": 2, "max_steps": 5, "lr_scheduler_type": "constant", "max_length": 64}
RUNS = {
    "SFT": {"trainer": "SFT", "learning_rate": 3e-3},
    "DPO": {"trainer": "DPO", "learning_rate": 3e-3},
    # Both ranks' answers to other prompts estimate the divergence.
    "KTO": {"trainer": "KTO", "learning_rate": 1e-2, "beta": 0.3},
}
# TRL's ranks do not find what the first of them precomputes for rows in memory: beside its live reference.
BEFORE = RUNS["DPO"] | {"precompute_ref_log_probs": True}


@pytest.fixture(scope="module")
def out(checkpoint, tmp_path_factory):
    pytest.importorskip("trl")
    out = tmp_path_factory.mktemp("pair")
    # Full batches: of a shorter last one, TRL's ranks count the metrics of the first rank alone.
    config, ours = CONFIG | {"runs": RUNS, "pairs": 80}, {"mesh_shape": "fsdp:2", "runs": RUNS | {"before": BEFORE}}
    launch_both(checkpoint(**SMALL), out, config, ours=ours)
    return out


@pytest.mark.parametrize(("name", "trls"), [("SFT", "SFT"), ("DPO", "DPO"), ("KTO", "KTO"), ("before", "DPO")])
def test_two_processes_are_two_ranks_of_trl(name, trls, out):
    ours, theirs = (json.loads((out / file).read_text()) for file in (f"ours{name}.json", f"trl{trls}.json"))
    assert len(ours) == len(theirs) == 6
    for mine, other in zip(ours, theirs, strict=True):
        assert_same(mine, other)
    weights, wanted = (read_weights(out / run / "final") for run in (f"ours{name}", f"trl{trls}"))
    assert weights.keys() == wanted.keys()
    for tensor, values in wanted.items():
        assert abs(weights[tensor] - values).max() < 1e-3, tensor
    assert trls != "KTO" or any(entry.get("kl", 0) > 0.01 for entry in theirs)
