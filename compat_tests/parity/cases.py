"""Cases of reward-model training that are compared with TRL: a checkpoint, rows and a config each."""

from __future__ import annotations

from dataclasses import dataclass, field


@dataclass(frozen=True)
class Case:
    """What to train on and how, with looser marks and a reason where a case cannot meet the default ones.

    config: arguments of RewardConfig, over BASE; rows, eval_rows: arguments of `preference_rows`; model: arguments of
    `tiny_model`; marks: arguments of `assert_same_curve`; weights: the mark for `assert_same_weights`; adrift: a
    pattern for tensors whose exact gradient is zero.
    """

    config: dict = field(default_factory=dict)
    rows: dict = field(default_factory=lambda: {"n": 120})
    model: dict = field(default_factory=dict)
    eval_rows: dict | None = None
    marks: dict = field(default_factory=dict)
    weights: float = 2e-4
    adrift: str = "$^"


PAD_IS_EOS = {"pad": "</s>", "chat_template": True}
CHAT = {"chat_template": True}

CASES = {
    "plain": Case(),
    "margin": Case(rows={"n": 120, "margin": True}),
    "centered_hard": Case({"center_rewards_coefficient": 0.2}, rows={"n": 120, "margin": True, "seed": 2}),
    # 44 micro-batches per epoch: step 15 has only two of its three, and the second of them has 3 pairs instead of 4.
    "ragged_accumulation": Case({"gradient_accumulation_steps": 3, "num_train_epochs": 2}, rows={"n": 175}),
    # 42 micro-batches per epoch: step 11 has only two of its four, and the second of them has 2 pairs.
    "ragged_margin": Case(
        {"gradient_accumulation_steps": 4, "num_train_epochs": 3, "center_rewards_coefficient": 0.1},
        rows={"n": 166, "margin": True},
    ),
    # Run in every layout; the other cases use the default layout, which shares prompts. 50 steps, of which the last has
    # only one of its two micro-batches, with 3 pairs.
    "layouts": Case(
        {"gradient_accumulation_steps": 2, "center_rewards_coefficient": 0.1}, rows={"n": 395, "margin": True}
    ),
    # `seed` draws the head and `data_seed` the order: using one for the other would be noticed.
    "data_seed": Case({"num_train_epochs": 2, "seed": 3, "data_seed": 11}, {"n": 62}, {"head": "causal"}),
    "cosine": Case(
        {
            "lr_scheduler_type": "cosine",
            "warmup_steps": 6,
            "weight_decay": 0.3,
            "max_grad_norm": 0.3,
            "learning_rate": 1e-3,
        }
    ),
    "constant_with_warmup": Case(
        {
            "lr_scheduler_type": "constant_with_warmup",
            "warmup_steps": 10,
            "max_grad_norm": 0.0,
            "adam_beta1": 0.8,
            "adam_beta2": 0.95,
            "adam_epsilon": 1e-6,
        }
    ),
    # The checkpoint's config has no pad token, so TRL sets it after the embedding has been created.
    "pad_is_eos": Case(model={"tokenizer": PAD_IS_EOS, "pad_token_id": None}),
    # The pad token is EOS, and EOS ends every turn: torch gives that row of the embedding no gradient.
    "pad_is_eos_chat": Case({"learning_rate": 2e-4}, {"n": 120, "kind": "chat"}, {"tokenizer": PAD_IS_EOS}),
    "causal": Case(model={"head": "causal", "shards": True, "tie": True}),
    "causal_bfloat16": Case({"seed": 5}, model={"head": "causal", "dtype": "bfloat16"}),
    "base": Case(model={"head": "base", "seed": 1}),
    "chat_prompt": Case(rows={"n": 120, "kind": "chat_prompt"}, model={"model_type": "qwen3", "tokenizer": CHAT}),
    "qwen2": Case({"weight_decay": 0.3}, {"n": 120, "kind": "prompt"}, {"model_type": "qwen2"}),
    "qwen3": Case({"weight_decay": 0.3}, {"n": 120, "kind": "prompt"}, {"model_type": "qwen3", "tie": True}),
    "max_length": Case({"max_length": 24}, {"n": 290, "kind": "prompt"}),
    "drop_last": Case({"dataloader_drop_last": True, "num_train_epochs": 2}, {"n": 63}),
    "max_steps": Case({"max_steps": 35}, {"n": 50}),
    "sparse_logs": Case({"logging_steps": 4, "logging_first_step": True, "gradient_accumulation_steps": 2}, {"n": 258}),
    "evaluated": Case(
        {"eval_strategy": "steps", "eval_steps": 10, "eval_on_start": True},
        rows={"n": 120, "margin": True},
        eval_rows={"n": 16, "margin": True, "seed": 9},
    ),
    # bfloat16 has eight bits of mantissa and is rounded in different places. TRL differs from itself (eager against
    # fused attention) by 0.011 in loss, 0.023 in rewards, 0.068 in grad_norm, the order of one pair and 7e-4 in
    # weights; the marks are about twice that. A learning rate that is off by a fifth moves the loss by 0.16.
    "bf16": Case(
        {"bf16": True, "learning_rate": 1e-4},
        marks={"loss": 3e-2, "rewards": 5e-2, "grad_norm": 0.2, "accuracy": 0.25 + 1e-7},
        weights=1.5e-3,
    ),
}

# Other families, ten steps each; llama, qwen2 and qwen3 have runs of thirty steps above.
_EAGER = {"model_init_kwargs": {"attn_implementation": "eager", "dtype": "float32"}}  # required by its soft cap
FAMILY_CASES = {
    "mistral": Case(model={"sliding_window": 7, "head": "causal"}),
    "gemma2": Case(_EAGER, model={"sliding_window": 7}),
    "gemma3_text": Case(model={"sliding_window": 7}),
    "phi3": Case(model={"head": "causal"}),
    "olmo2": Case({"weight_decay": 0.3}),
    # The bias before the head shifts chosen and rejected alike, and a bias of the keys shifts all scores of a query
    # alike: their gradients are rounding noise on both sides, which Adam turns into full-size steps.
    "gpt2": Case({"weight_decay": 0.3}, marks={"rewards": 2e-3}, adrift=r"ln_f\.bias|c_attn\.bias"),
    "gpt_neox": Case(
        {"weight_decay": 0.3}, marks={"rewards": 2e-3}, adrift=r"final_layer_norm\.bias|query_key_value\.bias"
    ),
    # An expert that few tokens choose has gradients near Adam's eps: at 5e-4 the losses are 2e-5 apart.
    "mixtral": Case({"learning_rate": 1e-4}),
    "qwen3_moe": Case({"weight_decay": 0.3}, model={"head": "causal"}),
    "gpt_oss": Case({"learning_rate": 1e-4}, model={"sliding_window": 7, "head": "causal"}),
    "phimoe": Case({"learning_rate": 1e-4}),
}
