"""A schedule-free run against TRL, including evaluations and averaged weights."""

from __future__ import annotations

import pytest

from compat_tests.parity import golden, reference
from compat_tests.parity.marks import assert_same_curve, assert_same_weights
from compat_tests.tiny import preference_rows
from compat_tests.trainer.trainers import FACTS

CONFIG = {
    "optim": "schedule_free_adamw",
    "lr_scheduler_type": "constant",
    "learning_rate": 2e-3,
    "warmup_steps": 3,
    "weight_decay": 0.1,
    "eval_strategy": "steps",
    "eval_steps": 4,
    "batch_layout": "padded",
}


def test_the_curve_is_trls(checkpoint, tmp_path):
    """TRL evaluates after training, which switches to the averaged weights; otherwise it would save the others."""
    if golden.live():
        pytest.importorskip("schedulefree", reason="schedulefree, which TRL needs for it, is not installed")
    given, config = (checkpoint(**FACTS), preference_rows(32)), CONFIG | {"eval_rows": preference_rows(8, seed=3)}
    theirs = golden.run_trl("schedule_free/adamw", *given, tmp_path / "theirs", model=FACTS, **config)
    ours = reference.run_ours(*given, tmp_path / "ours", **config)
    assert_same_curve(ours.logs, theirs.logs)
    assert_same_weights(ours.weights, theirs.weights)
