"""KTO against TRL: each logged number of each step, and the final weights."""

from __future__ import annotations

import pytest

from compat_tests.effort import THOROUGH, usually
from compat_tests.parity import reference
from compat_tests.parity.kto_cases import CASES, kto_rows
from compat_tests.parity.marks import assert_same_weights
from compat_tests.parity.sketch import gap
from compat_tests.parity.test_dpo_curve import assert_same

KEYS = (
    "loss grad_norm learning_rate kl entropy num_tokens logits/chosen logits/rejected rewards/chosen logps/chosen "
    "rewards/rejected logps/rejected rewards/margins epoch step"
).split()
# Cases that are covered by others run only under THOROUGH=1. Rows are compared with TRL's by
# trainer/test_kto_trainer.py, layouts with each other by training/test_layouts.py.
SELDOM = {
    "accumulated", "apo", "conversations", "conversations_of_pairs", "implicit_prompts", "packed", "padded",
    "truncated", "weights",
}  # fmt: skip
USUAL = usually(lambda name: name not in SELDOM, CASES)


@pytest.fixture(scope="module")
def both(both_of):
    return both_of("KTO", CASES, kto_rows)


def steps(run):
    return [entry for entry in run.logs if "loss" in entry]


@pytest.mark.parametrize("name", USUAL)
def test_the_curve_is_trls(both, name):
    ours, theirs = both(name)
    assert len(steps(theirs)) >= 2 and len(ours.logs) == len(theirs.logs)
    for mine, other in zip(ours.logs, theirs.logs, strict=True):
        assert_same(mine, other)
    if theirs.evaluate_metrics is not None:
        assert_same(ours.evaluate_metrics, theirs.evaluate_metrics)


@pytest.mark.parametrize("name", USUAL)
def test_the_weights_after_the_run_are_trls(both, checkpoint, name):
    ours, theirs = both(name)
    assert_same_weights(ours.weights, theirs.weights, 1e-3)
    before, tensor = reference.read_weights(checkpoint(**CASES[name].model)), "model.layers.0.mlp.up_proj.weight"
    assert gap(tensor, before[tensor], theirs.weights[tensor]) > 4e-3


def test_the_cases_have_what_they_are_for(both):
    shared, pairs = (steps(both(name)[1]) for name in ("shared", "pairs"))
    assert list(shared[0]) == KEYS and any(entry["kl"] > 0.01 for entry in shared)
    assert not THOROUGH or steps(both("accumulated")[1])[-1]["kl"] > 0
    assert [[f"rewards/{side}" in entry for side in ("chosen", "rejected", "margins")] for entry in pairs] == [
        [True, False, False], [True, True, True], [False, True, False]
    ]  # fmt: skip
