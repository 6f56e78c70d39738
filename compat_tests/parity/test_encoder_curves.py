"""Training encoders against TRL: each logged number of ten steps, and the final weights.

The gradient of a bias that only shifts all inputs of a softmax is rounding noise, which Adam turns into full-size steps
on both sides: such weights are not compared. The bias of the classifier would be one of them, because it shifts both
scores of a pair alike; only centering determines it.
"""

from __future__ import annotations

import re

import pytest

from compat_tests.effort import usually
from compat_tests.models import encoders
from compat_tests.parity import golden, reference
from compat_tests.parity.marks import assert_same_curve, assert_same_weights, steps_of
from compat_tests.parity.sketch import gap
from compat_tests.tiny import preference_rows

CONFIG = {"max_steps": 10, "weight_decay": 0.3, "center_rewards_coefficient": 0.05, "seed": 3}
# Family -> the variant, the head of the checkpoint, and a pattern for tensors whose exact gradient is zero.
CASES = {
    "bert": ("plain", "masked", r"attention\.self\.key\.bias"),
    "modernbert": ("biases", "masked", r"Wqkv\.bias"),
    "deberta-v2": ("plain", "masked", None),
}
USUAL = usually("bert".__eq__, CASES)  # models/test_encoders.py compares scores and gradients of all families


@pytest.fixture(scope="module")
def runs(tmp_path_factory):
    """runs(family) -> (our run, TRL's run, the initial weights)."""
    done = {}

    def both(family):
        if family not in done:
            name, head, _ = CASES[family]
            folder, out = (tmp_path_factory.mktemp(f"{family}-{what}") for what in ("checkpoint", "out"))
            encoders.build(folder, family, name, head=head)
            given, model = (folder, preference_rows(60, seed=6)), [encoders.VARIANTS[family][name], head]
            theirs = golden.run_trl(f"encoders/{family}", *given, out / "theirs", model=model, **CONFIG)
            done[family] = reference.run_ours(*given, out / "ours", **CONFIG), theirs, folder
        return done[family]

    return both


@pytest.mark.parametrize("family", USUAL)
def test_the_curve_is_trls(runs, family):
    ours, theirs, _ = runs(family)
    assert len(steps_of(theirs.logs)) == 10
    assert_same_curve(ours.logs, theirs.logs)


@pytest.mark.parametrize("family", USUAL)
def test_the_weights_after_the_run_are_trls(runs, family):
    ours, theirs, folder = runs(family)
    adrift = CASES[family][2]
    kept = [name for name in theirs.weights if adrift is None or not re.search(adrift, name)]
    assert_same_weights(*({name: run.weights[name] for name in kept} for run in (ours, theirs)))
    assert set(ours.weights) == set(theirs.weights)
    start = reference.read_weights(folder)
    moved = [gap(name, start[name], theirs.weights[name]) for name in kept if name in start]
    assert max(moved) > 10 * 2e-4
