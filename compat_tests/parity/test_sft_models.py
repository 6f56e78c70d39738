"""SFT of other models and model parts against TRL, a few steps each."""

from __future__ import annotations

import numpy as np
import pytest

from compat_tests.effort import only_thorough, thorough, usual, usually
from compat_tests.parity import golden, reference
from compat_tests.parity.marks import assert_same_curve, assert_same_weights, steps_of
from compat_tests.parity.sft_cases import SMALL
from compat_tests.tiny import text_rows, tiny_model

CONFIG = {"trainer": "SFT", "max_steps": 10, "max_length": 64}
EAGER = {"model_init_kwargs": {"attn_implementation": "eager", "dtype": "float32"}}
# Each with its config's options for the language-model head: logits scaled, soft-capped, or with a bias.
FAMILIES = {
    "qwen2": {},
    "qwen3": {"tie": True},
    "mistral": {"sliding_window": 7},
    "gemma2": {"sliding_window": 7, "tie": True, "final_logit_softcapping": 8.0},
    "gemma3_text": {"sliding_window": 7, "tie": True},
    "gemma4_text": {
        "sliding_window": 7, "tie": True, "num_hidden_layers": 4, "num_kv_shared_layers": 2,
        "layer_types": ["sliding_attention", "full_attention"] * 2, "final_logit_softcapping": 8.0,
    },
    "cohere": {"tie": True, "logit_scale": 0.25},
    "falcon_h1": {},
    "granite": {"logits_scaling": 3.0, "tie": True},
    "phi": {},
    "gpt_neox": {},
    "olmo2": {},
    "opt": {"do_layer_norm_before": False, "word_embed_proj_dim": 48, "tie": True},
    "apertus": {},
    "minimax_m2": {},
    # TRL's load balancing reads num_experts, which this config does not have by default
    "phimoe": {"attention_bias": True, "lm_head_bias": True, "num_experts": 6},
    "deepseek_v3": {},
    "glm4_moe": {},
    "lfm2": {"layer_types": ["conv", "full_attention"]},
    # TRL's load balancing reads num_experts, which this config does not have
    "granitemoehybrid": {"layer_types": ["linear_attention", "full_attention"], "router_aux_loss_coef": 0.0},
    "nemotron_h": {"layers_block_type": ["linear_attention", "moe", "full_attention", "mlp"]},
    "qwen3_5_text": {"full_attention_interval": 2},
    "qwen3_5_moe_text": {"full_attention_interval": 2},
    "qwen3_next": {"full_attention_interval": 2},
}  # fmt: skip
# A tied head and several kinds of layers; gradients of all families are compared with transformers' by models/.
USUAL = {"qwen3"}  # gradients of states: nn/test_recurrences.py and models/test_layouts.py
ADRIFT = {"gpt_neox": "query_key_value.bias"} | dict.fromkeys(("opt", "phi", "phimoe", "qwen2"), "k_proj.bias")


def both(called, model, folder, rows, out, **config):
    """Our run and TRL's."""
    ours = reference.run_ours(folder, rows, out / "ours", **config)
    return ours, golden.run_trl(f"sft_models/{called}", folder, rows, out / "theirs", model=model, **config)


@usual(
    "qwen2", "qwen3", "mistral", "gemma3_text", "gemma4_text", "cohere", "falcon_h1", "granite", "phi", "gpt_neox",
    "olmo2", "apertus", "minimax_m2", "deepseek_v3", "glm4_moe", "lfm2", "granitemoehybrid", "nemotron_h",
    "qwen3_5_text", "qwen3_5_moe_text",
)  # fmt: skip
@pytest.mark.parametrize("family", usually(USUAL.__contains__, FAMILIES))
def test_ten_steps_of_a_family_are_trls(family, tmp_path):
    folder = tiny_model(tmp_path / "model", family, head="causal", **{"num_hidden_layers": 2} | FAMILIES[family])
    config = CONFIG | (EAGER if family == "gemma2" else {})
    ours, theirs = both(family, [family, FAMILIES[family]], folder, text_rows(32), tmp_path, **config)
    assert theirs.logs[-1]["step"] == 10
    assert_same_curve(ours.logs, theirs.logs, grad_norm=5e-4)
    held = [name for name in theirs.weights if not name.endswith(ADRIFT.get(family, "no such"))]
    assert sorted(ours.weights) == sorted(theirs.weights)
    assert_same_weights(*({name: side.weights[name] for name in held} for side in (ours, theirs)))


@only_thorough
@pytest.mark.parametrize(("targets", "rank"), [thorough(["q_proj", "v_proj"], 4), ("all-linear", 2)])
def test_an_adapter_trains_as_peft_s(targets, rank, checkpoint, tmp_path):
    peft = pytest.importorskip("peft")
    lora = peft.LoraConfig(task_type="CAUSAL_LM", r=rank, lora_alpha=8, target_modules=targets)
    config = CONFIG | {"learning_rate": 5e-3, "peft_config": lora, "gradient_accumulation_steps": 2}
    rows = text_rows(40, "prompt")
    ours, theirs = both(f"adapter of rank {rank}", SMALL, checkpoint(**SMALL), rows, tmp_path, **config)
    assert_same_curve(ours.logs, theirs.logs)
    assert_same_weights(ours.weights, theirs.weights)
    losses = [entry["loss"] for entry in steps_of(theirs.logs)]
    assert min(losses) < losses[0] and all(np.any(values) for values in ours.weights.values())


@only_thorough  # test_sft_curve has a run of each kind, training/test_layouts.py each layout
@pytest.mark.parametrize("layout", ["padded", "packed"])
@pytest.mark.parametrize("packing", [False, True])
def test_every_layout_gives_the_same_curve(layout, packing, checkpoint, tmp_path):
    rows, folder = text_rows(60, "prompt"), checkpoint(**SMALL)
    config = CONFIG | {"packing": packing, "gradient_accumulation_steps": 2}
    first, other = (
        reference.run_ours(folder, rows, tmp_path / str(name), batch_layout=name, **config) for name in ("auto", layout)
    )
    assert_same_curve(first.logs, other.logs)
    assert_same_weights(first.weights, other.weights)


@only_thorough
def test_a_checkpoint_whose_pad_is_eos(checkpoint, tmp_path):
    model = SMALL | {"tokenizer": {"pad": "</s>"}, "pad_token_id": None}
    ours, theirs = both("pad_is_eos", model, checkpoint(**model), text_rows(32), tmp_path, **CONFIG)
    assert_same_curve(ours.logs, theirs.logs)
    assert_same_weights(ours.weights, theirs.weights)


def test_trl_divides_the_loss_of_gpt2_by_tokens_that_are_no_targets(tmp_path):
    """transformers decides by the class name whether labels are shifted, and GPT2LMHeadModel is not a "ForCausalLM":
    the first token of each row counts in the denominator. In an evaluation it does not, and both agree."""
    folder, rows = tiny_model(tmp_path / "model", "gpt2", head="causal", tie=True), text_rows(4)
    options = {"trainer": "SFT", "max_steps": 1, "eval_rows": rows, "eval_on_start": True, "eval_strategy": "steps"}
    ours, theirs = both("gpt2", "gpt2, tied", folder, rows, tmp_path, **options)
    [(before, step), (wanted, found)] = ([logs[0], steps_of(logs)[0]] for logs in (ours.logs, theirs.logs))
    tokens = step["num_tokens"]
    assert abs(before["eval_loss"] - wanted["eval_loss"]) < 1e-5 and abs(step["loss"] - before["eval_loss"]) < 1e-5
    assert abs(found["loss"] - step["loss"] * (tokens - 4) / tokens) < 1e-5
