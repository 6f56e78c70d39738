"""DPO against TRL: each logged number of each step, and the final weights."""

from __future__ import annotations

import pytest

from compat_tests.effort import usual, usually
from compat_tests.parity import reference
from compat_tests.parity.dpo_cases import CASES
from compat_tests.parity.marks import assert_same_weights, timeless
from compat_tests.parity.sketch import gap
from compat_tests.tiny import preference_rows

KEYS = (
    "loss grad_norm learning_rate entropy num_tokens logits/chosen logits/rejected mean_token_accuracy rewards/chosen "
    "rewards/rejected rewards/accuracies rewards/margins logps/chosen logps/rejected epoch step"
).split()
# Tolerances, relative to TRL's number and absolute.
RELATIVE, ABSOLUTE = 5e-5, 2e-5
MARKS, LOSS = {"rel": RELATIVE, "abs": ABSOLUTE}, 1e-5
# Each loss is compared with TRL's by losses/test_dpo.py, rows by trainer/test_dpo_trainer.py, and layouts with each
# other by training/test_layouts.py. By default only those cases run here that take another path through training.
SELDOM = {
    "accumulated", "alpha_divergence", "aot", "aot_unpaired", "apo_down", "apo_zero", "bco_pair", "conversations",
    "conversations_with_prompts", "discopop", "exo_pair", "forward_kl", "hinge", "implicit_prompts", "ipo",
    "js_divergence", "keep_end", "nca_pair", "packed", "padded", "robust", "sft", "sigmoid_norm", "sppo_hard",
    "truncated", "weighted",
}  # fmt: skip
USUAL = usually(lambda name: name not in SELDOM, CASES)


@pytest.fixture(scope="module")
def both(both_of):
    return both_of("DPO", CASES, preference_rows)


def assert_same(ours, theirs):
    ours, theirs = timeless(ours), timeless(theirs)
    assert list(ours) == list(theirs)
    # Rounding decides which answer of a pair has the higher reward.
    undecided = abs(theirs.get("rewards/margins", 1)) < ABSOLUTE
    for key, value in theirs.items():
        if key == "rewards/accuracies" and undecided:
            continue
        close = {"rel": 0.0, "abs": LOSS * max(1.0, abs(value))} if key.endswith("loss") else MARKS
        ours_close = ours[key] == pytest.approx(value, **close)
        assert ours_close, f"step {theirs.get('step')}, {key}: ours {ours[key]!r}, TRL's {value!r}"


@usual("sigmoid", "thirty_steps", "precomputed", "sorted_accumulated", "following", "evaluated")
@pytest.mark.parametrize("name", USUAL)
def test_the_curve_is_trls(both, name):
    ours, theirs = both(name)
    steps = [entry for entry in theirs.logs if "loss" in entry]
    assert all(list(entry) == KEYS for entry in steps) and len(steps) >= 2
    assert len(ours.logs) == len(theirs.logs)
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
