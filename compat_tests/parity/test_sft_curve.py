"""SFT against TRL: each logged number of each step, and the final weights."""

from __future__ import annotations

import pytest

from compat_tests.effort import usual, usually
from compat_tests.parity import reference
from compat_tests.parity.marks import assert_same_curve, assert_same_entry, assert_same_weights, steps_of
from compat_tests.parity.sft_cases import CASES
from compat_tests.parity.sketch import gap
from compat_tests.tiny import text_rows

KEYS = "loss grad_norm learning_rate entropy mean_token_accuracy num_tokens epoch step".split()
# Cases that are covered by others run only under THOROUGH=1; rows are compared with TRL's by data/test_sft_rows.py.
SELDOM = {
    "accumulated_by_four", "bfd_split", "both_masks", "messages", "shuffled", "smoothed", "sparse_logs", "tied",
    "truncated", "whole_prompts", "wrapped",
}  # fmt: skip
USUAL = usually(lambda name: name not in SELDOM, CASES)


@pytest.fixture(scope="module")
def both(both_of):
    return both_of("SFT", CASES, text_rows)


@usual("text", "assistant_only", "completions", "chat_completions", "bfd", "accumulated")
@pytest.mark.parametrize("name", USUAL)
def test_the_curve_is_trls(both, name):
    ours, theirs = both(name)
    assert theirs.logs[-1]["step"] >= 30
    assert all(list(entry) == KEYS for entry in steps_of(theirs.logs))
    assert_same_curve(ours.logs, theirs.logs, **CASES[name].marks)
    if theirs.evaluate_metrics is not None:
        assert_same_entry(ours.evaluate_metrics, theirs.evaluate_metrics, **CASES[name].marks)


@pytest.mark.parametrize("name", USUAL)
def test_the_weights_after_the_run_are_trls(both, checkpoint, name):
    ours, theirs = both(name)
    assert_same_weights(ours.weights, theirs.weights, CASES[name].weights)
    before, tensor = reference.read_weights(checkpoint(**CASES[name].model)), "model.layers.0.mlp.up_proj.weight"
    assert gap(tensor, before[tensor], theirs.weights[tensor]) > 10 * CASES[name].weights
