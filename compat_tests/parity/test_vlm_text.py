"""Fine-tuning vision-language models on text against TRL: the text part trains alike, and towers do not change."""

from __future__ import annotations

import numpy as np
import pytest

from compat_tests.effort import usual
from compat_tests.models import towers
from compat_tests.parity import golden, reference
from compat_tests.parity.marks import assert_same_curve, assert_same_weights
from compat_tests.tiny import text_rows
from trl_jax.hub.families import families
from trl_jax.hub.peft_targets import _USUAL

pytest.importorskip("torch")

# Weight decay would change a tower that is trained.
CONFIG = {"max_steps": 4, "max_length": 64, "weight_decay": 0.3, "trainer": "SFT"}
CASES = ["qwen2_5_vl", "mistral3", "qwen3_vl", "lfm2_vl", "internvl"]


@pytest.fixture(autouse=True)
def tokenizers_alone(monkeypatch):
    """TRL would load the image processor, which needs torchvision."""
    from transformers import AutoProcessor, AutoTokenizer

    monkeypatch.setattr(AutoProcessor, "from_pretrained", AutoTokenizer.from_pretrained)


@usual("qwen2_5_vl", "mistral3")
@pytest.mark.parametrize("case", CASES)
def test_the_text_part_trains_as_in_trl(case, tmp_path):
    folder, rows = tmp_path / "there", text_rows(16)
    towers.build(folder, case, tie_word_embeddings=case == "qwen2_5_vl")
    ours = reference.run_ours(folder, rows, tmp_path / "ours", **CONFIG)
    theirs = golden.run_trl(f"vlm_text/{case}", folder, rows, tmp_path / "theirs", model=case, **CONFIG)
    assert_same_curve(ours.logs, theirs.logs, grad_norm=5e-4)
    assert sorted(ours.weights) == sorted(theirs.weights)
    before = reference.read_weights(folder)
    kept = {name: value for name, value in ours.weights.items() if name.startswith(towers.CASES[case][2])}
    assert 0 < len(kept) < len(before)
    for name, value in kept.items():
        np.testing.assert_array_equal(value, before[name], err_msg=name)
    assert_same_weights(ours.weights, theirs.weights)


@usual("targets0")
@pytest.mark.parametrize("targets", [["q_proj", "v_proj"], "all-linear"])
def test_an_adapter_is_pefts_but_for_the_tower(targets, tmp_path):
    """PEFT also adapts modules of these names in the tower, where text does not train them."""
    peft = pytest.importorskip("peft")
    folder = tmp_path / "there"
    towers.build(folder, "mistral3")
    lora = peft.LoraConfig(task_type="CAUSAL_LM", r=4, lora_alpha=8, target_modules=targets)
    config = CONFIG | {"learning_rate": 5e-3, "peft_config": lora}
    ours = reference.run_ours(folder, text_rows(16), tmp_path / "ours", **config)
    theirs = golden.run_trl(
        f"vlm_text/{targets}", folder, text_rows(16), tmp_path / "theirs", model="mistral3", **config
    )
    assert_same_curve(ours.logs, theirs.logs, grad_norm=5e-4)
    others = theirs.weights.keys() - ours.weights.keys()
    assert others and all(".vision_tower." in name or ".multi_modal_projector." in name for name in others)
    assert_same_weights(ours.weights, {name: theirs.weights[name] for name in ours.weights})


def test_the_modules_that_peft_adapts_where_none_are_named():
    """For each type that PEFT knows; it refuses the others, as we do."""
    known = pytest.importorskip("peft").utils.constants.TRANSFORMERS_MODELS_TO_LORA_TARGET_MODULES_MAPPING
    ours = {name for name, family in families().items() if family.carried}
    wanted = {name: known[name] for name in ours & known.keys()}
    assert len(wanted) >= 2
    usual = {name: found for name, found in _USUAL.items() if name in ours}
    assert wanted == {name: found if isinstance(found, str) else list(found) for name, found in usual.items()}
