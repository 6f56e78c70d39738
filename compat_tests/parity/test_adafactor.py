"""Adafactor against TRL: its averages and clipping are per torch tensor, which our arrays do not match one to one."""

from __future__ import annotations

import pytest

from compat_tests.effort import thorough
from compat_tests.parity import golden, reference
from compat_tests.parity.marks import assert_same_curve, assert_same_weights
from compat_tests.tiny import preference_rows, tiny_model

CONFIG = {"optim": "adafactor", "learning_rate": 1e-3, "weight_decay": 0.1, "batch_layout": "padded"}


# Several layers in one array; one tensor split into several arrays; experts; adapters.
@pytest.mark.parametrize("family", ["llama", *map(thorough, ["phi3", "qwen3_moe", "with adapters"])])
def test_ten_steps_are_trls(family, tmp_path):
    config, called = CONFIG, f"adafactor/{family}"
    if family == "with adapters":
        peft = pytest.importorskip("peft")
        config = CONFIG | {"peft_config": peft.LoraConfig(task_type="SEQ_CLS", r=4, modules_to_save=["score"])}
        family = "llama"
    folder, rows = tiny_model(tmp_path / "model", family), preference_rows(40, seed=3)
    theirs = golden.run_trl(called, folder, rows, tmp_path / "theirs", model=family, **config)
    ours = reference.run_ours(folder, rows, tmp_path / "ours", **config)
    assert theirs.logs[-1]["step"] == 10
    assert_same_curve(ours.logs, theirs.logs)
    assert_same_weights(ours.weights, theirs.weights)
