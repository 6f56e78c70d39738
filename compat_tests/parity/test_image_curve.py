"""Training on rows with images against TRL: each logged number of each step, and the final weights."""

from __future__ import annotations

import dataclasses
import warnings

import pytest

import trl_jax
from compat_tests.effort import usual, usually
from compat_tests.parity import golden, image_cases, reference
from compat_tests.parity.image_cases import KINDS, MODELS
from compat_tests.parity.marks import assert_same_weights, timeless
from compat_tests.trainer.vision_models import tiny_tiled

# One case for each kind of objective.
USUAL = {("gemma3", "grpo"), ("qwen2_5_vl", "accumulated"), ("smolvlm", "dpo_lora")}
CASES = usually(lambda *case: case in USUAL, [(model, kind) for model in MODELS for kind in KINDS])


@usual("qwen2_5_vl-accumulated", "smolvlm-dpo_lora")
@pytest.mark.parametrize(("model", "kind"), CASES)
def test_the_curve_and_the_weights_are_trls(model, kind, tmp_path, monkeypatch):
    folder, case = tmp_path / "model", KINDS[kind]
    processor = tiny_tiled(folder, model, monkeypatch, template=image_cases.TEMPLATE)

    def by_trl() -> reference.Run:
        import torch
        import trl

        torch.set_num_threads(1)
        with warnings.catch_warnings():
            warnings.simplefilter("ignore", FutureWarning)
            run = image_cases.run(trl, folder, case, processor, tmp_path / "trl")
            return run if kind in image_cases.WEIGHED else dataclasses.replace(run, weights={})

    rows, config = image_cases.described(case.rows), case.config | {"adapter": case.adapter, "trainer": case.trainer}
    key = golden.digest(folder, rows, model, config | image_cases.STEPS, image_cases.reward)
    theirs = golden.recorded_or(f"images/{model}_{kind}", key, by_trl)
    ours = image_cases.run(trl_jax, folder, case, processor, tmp_path / "ours")
    entries = [entry for entry in theirs.logs if "loss" in entry]
    assert len(entries) == 6
    for own, their in zip([entry for entry in ours.logs if "loss" in entry], entries, strict=True):
        names = timeless(their).keys()
        assert {"loss", "grad_norm", "entropy", "num_tokens"} <= names <= own.keys()
        for name in names:
            assert own[name] == pytest.approx(their[name], rel=2e-4, abs=1e-5 if name == "loss" else 2e-4), (
                their["step"], name,
            )  # fmt: skip
    if kind not in image_cases.WEIGHED:
        return
    # PEFT also saves adapters of the tower's last layers, whose output is not used.
    unread = {name: theirs.weights.pop(name) for name in theirs.weights.keys() - ours.weights.keys()}
    assert all(".layers.2." in name and model == "llava_next" for name in unread)
    assert_same_weights(ours.weights, theirs.weights)
