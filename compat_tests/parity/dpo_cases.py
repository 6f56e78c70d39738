"""Cases of DPO that are compared with TRL: a checkpoint, rows and a config each."""

from __future__ import annotations

from compat_tests.parity.cases import Case

SMALL = {"head": "causal", "num_hidden_layers": 1, "hidden_size": 32, "intermediate_size": 48}
CHAT = SMALL | {"tokenizer": {"chat_template": True}}
STEPS = {"max_steps": 6, "max_length": 64, "learning_rate": 3e-3}
PROMPTS = {"n": 24, "kind": "prompt"}
SMOOTHED = {"exo_pair": {"label_smoothing": 1e-3}, "robust": {"label_smoothing": 0.1}, "aot": {"label_smoothing": 0.1}}
LOSSES = (
    "sigmoid hinge ipo exo_pair nca_pair robust bco_pair sppo_hard aot aot_unpaired apo_zero apo_down discopop sft"
    " sigmoid_norm"
).split()


def case(rows=PROMPTS, model=SMALL, eval_rows=None, marks=None, **config) -> Case:
    return Case(STEPS | config, rows, model, eval_rows, marks or {})


CASES = {name: case(loss_type=name, **SMOOTHED.get(name, {})) for name in LOSSES} | {
    "thirty_steps": case(max_steps=30, learning_rate=1e-3),
    "several": case(loss_type=["sigmoid", "bco_pair", "sft"], loss_weights=[0.8, 0.2, 1.0]),
    "forward_kl": case(f_divergence_type="forward_kl"),
    "js_divergence": case(f_divergence_type="js_divergence", loss_type="ipo"),
    "alpha_divergence": case(f_divergence_type="alpha_divergence", f_alpha_divergence_coef=0.3),
    "length_desensitised": case(ld_alpha=0.4),
    "weighted": case(use_weighting=True),
    "implicit_prompts": case(rows={"n": 24}),
    "conversations": case(rows={"n": 24, "kind": "chat"}, model=CHAT),
    "conversations_with_prompts": case(rows={"n": 24, "kind": "chat_prompt"}, model=CHAT),
    "truncated": case(max_length=20),
    "keep_end": case(max_length=20, truncation_mode="keep_end"),
    # If an answer is longer than max_length, its first token has no context but still counts.
    "keep_end_of_answers": case(
        max_length=8, truncation_mode="keep_end", loss_type=["ipo", "sigmoid_norm", "sft"], max_steps=3
    ),
    # 4 micro-batches per epoch, the last with one pair: steps of three micro-batches, and of one.
    "accumulated": case(rows={"n": 13, "kind": "prompt"}, gradient_accumulation_steps=3, logging_steps=2),
    "precomputed": case(precompute_ref_log_probs=True, precompute_ref_batch_size=3),
    # A forward pass per micro-batch: pairs are sorted, and token losses averaged, within it.
    "sorted_accumulated": case(
        rows={"n": 13, "kind": "prompt"}, gradient_accumulation_steps=3, batch_layout="shared",
        loss_type=["aot", "sft"],
    ),
    "following": case(sync_ref_model=True, ref_model_sync_steps=2, ref_model_mixup_alpha=0.3),
    "packed": case(batch_layout="packed"),
    "padded": case(batch_layout="padded"),
    "evaluated": case(
        eval_rows={"n": 12, "kind": "prompt", "seed": 9}, eval_strategy="steps", eval_steps=2,
        per_device_eval_batch_size=16,
    ),
}  # fmt: skip
