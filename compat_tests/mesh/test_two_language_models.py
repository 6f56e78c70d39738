"""Two real processes that train language models against two ranks of TRL, one trainer after the other."""

from __future__ import annotations

import json

import pytest

from compat_tests.effort import THOROUGH, usually
from compat_tests.mesh.launching import launch_both
from compat_tests.mesh.rank import rows_of
from compat_tests.parity import golden
from compat_tests.parity.dpo_cases import SMALL
from compat_tests.parity.marks import assert_same_weights
from compat_tests.parity.reference import Run, read_weights
from compat_tests.parity.test_dpo_curve import assert_same

PAIRS = 80
CONFIG = {"gradient_accumulation_steps": 2, "max_steps": 5, "lr_scheduler_type": "constant", "max_length": 64}
RUNS = {
    "SFT": {"trainer": "SFT", "learning_rate": 3e-3},
    "DPO": {"trainer": "DPO", "learning_rate": 3e-3},
    # The KL estimate uses completions of both ranks.
    "KTO": {"trainer": "KTO", "learning_rate": 1e-2, "beta": 0.3},
}
# TRL's ranks do not find what the first one precomputes for in-memory rows, so this is compared with TRL's live
# reference.
BEFORE = {"before": RUNS["DPO"] | {"precompute_ref_log_probs": True}} if THOROUGH else {}
# By default, only the case whose ranks need each other's completions.
USUAL = RUNS if THOROUGH else {"KTO": RUNS["KTO"]}
CASES = [("SFT", "SFT"), ("DPO", "DPO"), ("KTO", "KTO"), ("before", "DPO")]


@pytest.fixture(scope="module")
def out(checkpoint, tmp_path_factory):
    out = tmp_path_factory.mktemp("pair")
    # Full batches: in a short last one, TRL only counts the metrics of the first rank.
    config, ours = CONFIG | {"runs": USUAL, "pairs": PAIRS}, {"mesh_shape": "fsdp:2", "runs": USUAL | BEFORE}
    launch_both(checkpoint(**SMALL), out, config, ours=ours)
    return out


@pytest.mark.parametrize(("name", "trls"), usually(lambda name, _: name in USUAL, CASES))
def test_two_processes_are_two_ranks_of_trl(name, trls, out, checkpoint):
    def run(left):
        return Run(json.loads((out / f"{left}.json").read_text()), None, read_weights(out / left / "final"))

    source = golden.digest(checkpoint(**SMALL), rows_of(trls, PAIRS), ["two ranks", SMALL], CONFIG | RUNS[trls])
    ours, theirs = run(f"ours{name}"), golden.recorded_or(f"ranks/{trls}", source, lambda: run(f"trl{trls}"))
    assert len(ours.logs) == len(theirs.logs) == 6
    for mine, other in zip(ours.logs, theirs.logs, strict=True):
        assert_same(mine, other)
    assert_same_weights(ours.weights, theirs.weights, 1e-3)
    assert trls != "KTO" or any(entry.get("kl", 0) > 0.01 for entry in theirs.logs)
