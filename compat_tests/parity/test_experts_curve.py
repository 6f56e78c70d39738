"""Mixtures of experts against TRL: the load-balancing loss, in each logged number and in the weights."""

from __future__ import annotations

import json

import pytest

import trl_jax
from compat_tests.effort import only_thorough, usually
from compat_tests.parity import golden, grpo_cases, reference
from compat_tests.parity.grpo_cases import STEPS, prompt_rows
from compat_tests.parity.kto_cases import kto_rows
from compat_tests.parity.marks import assert_same_curve, assert_same_entry, assert_same_weights, steps_of
from compat_tests.parity.test_dpo_curve import assert_same
from compat_tests.tiny import preference_rows, text_rows

SMALL = {"head": "causal", "num_hidden_layers": 2, "hidden_size": 32}
# 5 micro-batches per epoch, the last with 2 rows: steps of two micro-batches, and of one.
CONFIG = {"max_length": 64, "learning_rate": 1e-3, "gradient_accumulation_steps": 2}
ROWS = {"n": 18, "kind": "prompt"}
ADAPTER = {"task_type": "CAUSAL_LM", "r": 4, "lora_alpha": 8, "target_modules": ["q_proj", "v_proj"]}
EVALUATED = {"per_device_eval_batch_size": 16}
SFT = {
    "its own": ("mixtral", {} | EVALUATED),
    "packed": ("qwen2_moe", {"router_aux_loss_coef": 0.5, "batch_layout": "packed"} | EVALUATED),
    "padded": ("qwen3_moe", {"router_aux_loss_coef": 0.5, "batch_layout": "padded"} | EVALUATED),
    "joined": ("olmoe", {"router_aux_loss_coef": 0.5, "packing": True, "pad_to_multiple_of": None}),
    "none": ("qwen2_moe", {"router_aux_loss_coef": 0.0}),
    "sinks": ("gpt_oss", {"router_aux_loss_coef": 0.5, "batch_layout": "packed"} | EVALUATED),
    "adapter": ("mixtral", {"router_aux_loss_coef": 0.5, "peft_config": ADAPTER}),
}
DPO = {"shared": "mixtral", "packed": "qwen3_moe"}


def both(called, trainer, family, checkpoint, rows, out, *, eval_rows=None, peft_config=None, **config):
    if peft_config is not None:
        config["peft_config"] = pytest.importorskip("peft").LoraConfig(**peft_config)
    options = {"trainer": trainer, "eval_rows": eval_rows} | CONFIG | config
    folder, model = checkpoint(family, **SMALL), [family, SMALL]
    ours, called = reference.run_ours(folder, rows, out / "ours", **options), f"experts/{called}"
    return ours, golden.run_trl(called, folder, rows, out / "theirs", model=model, facts=routing, **options)


def routing(run):
    """The router fields of the saved config; empty if there is no config (an adapter)."""
    path = run.folder / "config.json"
    saved = json.loads(path.read_text()) if path.exists() else {}
    return {key: saved.get(key) for key in ("output_router_logits", "router_aux_loss_coef")}


@pytest.mark.parametrize("name", usually({"packed"}.__contains__, SFT))
def test_fine_tuning(name, checkpoint, tmp_path):
    family, config = SFT[name]
    eval_rows = text_rows(9, "prompt", seed=9) if EVALUATED.items() <= config.items() else None
    ours, theirs = both(
        f"sft {name}", "SFT", family, checkpoint, text_rows(**ROWS), tmp_path, eval_rows=eval_rows, **config
    )
    assert_same_curve(ours.logs, theirs.logs)
    if eval_rows is not None:
        assert_same_entry(ours.evaluate_metrics, theirs.evaluate_metrics)
    assert_same_weights(ours.weights, theirs.weights, 5e-4)
    losses = {"aux_loss" in entry for entry in steps_of(theirs.logs)}
    assert losses == {name != "none"}
    if "peft_config" not in config:
        assert routing(ours) == theirs.facts


@only_thorough
@pytest.mark.parametrize("layout", usually("shared".__eq__, DPO))
def test_preferences(layout, checkpoint, tmp_path):
    """Prompts count twice, once per answer, even in the shared layout, which computes them once. 3 batches are
    evaluated."""
    ours, theirs = both(
        f"dpo {layout}", "DPO", DPO[layout], checkpoint, preference_rows(**ROWS), tmp_path,
        eval_rows=preference_rows(10, "prompt", seed=9), batch_layout=layout, router_aux_loss_coef=0.5,
    )  # fmt: skip
    assert len(ours.logs) == len(theirs.logs) == 4
    for mine, other in zip(ours.logs, theirs.logs, strict=True):
        assert_same(mine, other)
    for key in ("eval_loss", "eval_aux_loss"):
        assert ours.evaluate_metrics[key] == pytest.approx(theirs.evaluate_metrics[key], rel=1e-5)
    assert_same_weights(ours.weights, theirs.weights, 5e-4)
    assert list(steps_of(theirs.logs)[0])[:5] == ["loss", "grad_norm", "learning_rate", "aux_loss", "entropy"]


@only_thorough
def test_answers_to_other_prompts_are_not_balanced(checkpoint, tmp_path):
    """KTO computes them in addition to each row's own answer, whose prompt the shared layout reuses."""
    ours, theirs = both(
        "kto", "KTO", "olmoe", checkpoint, kto_rows(14), tmp_path, eval_rows=kto_rows(8, seed=9),
        per_device_eval_batch_size=8, router_aux_loss_coef=0.5, batch_layout="shared",
    )  # fmt: skip
    for mine, other in zip(ours.logs, theirs.logs, strict=True):
        assert_same(mine, other)
    assert_same(ours.evaluate_metrics, theirs.evaluate_metrics)
    assert_same_weights(ours.weights, theirs.weights, 5e-4)
    assert "aux_loss" in theirs.logs[0]


@only_thorough
@pytest.mark.parametrize(
    ("family", "config"),
    [
        ("phimoe", "Phimoe"), ("granitemoe", "GraniteMoe"), ("granitemoehybrid", "GraniteMoeHybrid"),
        ("glm4_moe", "Glm4Moe"),
    ],
)  # fmt: skip
def test_trl_asks_for_a_number_that_these_types_call_otherwise(family, config, checkpoint, tmp_path):
    """With `num_experts` in the config TRL does train: see test_sft_models.py."""
    layers = {"layer_types": ["attention"] * SMALL["num_hidden_layers"]} if family == "granitemoehybrid" else {}
    folder = checkpoint(family, **SMALL | layers)
    options = CONFIG | {"trainer": "SFT", "max_steps": 1, "router_aux_loss_coef": 0.05}
    with pytest.raises(AttributeError, match=f"'{config}Config' object has no attribute 'num_experts'"):
        reference.run_trl(folder, text_rows(4), tmp_path / "theirs", **options)
    ours = reference.run_ours(folder, text_rows(4), tmp_path / "ours", **options)
    assert "aux_loss" in steps_of(ours.logs)[0]


@only_thorough  # our layout here is usually `packed`
def test_trl_counts_the_pads_behind_texts_that_lie_end_to_end(checkpoint, tmp_path):
    """It has no padding mask in this case. Without padding, the router losses are the same: see `joined` above."""
    config = {"padding_free": True, "max_length": None, "pad_to_multiple_of": 64, "max_steps": 1}
    ours, theirs = both("padding_free", "SFT", "mixtral", checkpoint, text_rows(4), tmp_path, **config)
    (mine, *_), (other, *_) = steps_of(ours.logs), steps_of(theirs.logs)
    assert abs(mine["loss"] - other["loss"]) < 0.001 * 0.5
    assert other["num_tokens"] % 64 == 0 and abs(mine["aux_loss"] - other["aux_loss"]) > 1e-3


@pytest.mark.parametrize("layout", usually("shared".__eq__, ("shared", "padded")))
def test_truncated_completions_are_not_balanced(layout, checkpoint, tmp_path):
    """With `mask_truncated_completions`, TRL masks them in the attention mask, which the balance counts."""
    folder, config = checkpoint("qwen2_moe", **SMALL | {"num_hidden_layers": 1}), STEPS | {
        "max_steps": 1, "num_generations": 4, "max_completion_length": 12, "mask_truncated_completions": True,
        "router_aux_loss_coef": 0.5,
    }  # fmt: skip
    trl, found = pytest.importorskip("trl"), []
    for package in (trl_jax, trl):
        own = {"batch_layout": layout} if package is trl_jax else {}
        run = grpo_cases.run(package, "GRPO", folder, prompt_rows(8), tmp_path / package.__name__, **config, **own)
        found.append(run.logs[0])
    ours, theirs = found
    assert theirs["completions/clipped_ratio"] > 0
    for name in ("loss", "aux_loss", "grad_norm"):
        assert ours[name] == pytest.approx(theirs[name], rel=1e-4)
