"""Config values for a tiny checkpoint of each family, in addition to the common shape, and at least two variants
each."""

from __future__ import annotations

from compat_tests.models import encoders

ROPE = {"rope_type": "default", "rope_theta": 300.0}
QUARTER = ROPE | {"partial_rotary_factor": 0.25}
SLIDE, FULL = "sliding_attention", "full_attention"
TYPES = [SLIDE, FULL, SLIDE]
LLAMA3 = {
    "rope_type": "llama3", "rope_theta": 500.0, "factor": 8.0, "low_freq_factor": 1.0, "high_freq_factor": 4.0,
    "original_max_position_embeddings": 64,
}  # fmt: skip
LINEAR = {"rope_type": "linear", "rope_theta": 200.0, "factor": 3.0}
OLD_YARN = {
    "rope_type": "yarn", "factor": 32.0, "beta_fast": 32.0, "beta_slow": 1.0, "truncate": False,
    "original_max_position_embeddings": 16,
}  # fmt: skip
OLD_LINEAR = {"rope_type": "linear", "factor": 3.0}
BOTH_ROPES = {SLIDE: {"rope_type": "default", "rope_theta": 100.0}, FULL: LINEAR}
PROPORTIONAL = {
    SLIDE: {"rope_type": "default", "rope_theta": 100.0},
    FULL: {"rope_type": "proportional", "rope_theta": 300.0, "partial_rotary_factor": 0.5, "factor": 2.0},
}
LONGROPE = {
    "rope_type": "longrope",
    "rope_theta": 300.0,
    "short_factor": [1.0, 1.1, 1.3, 1.5, 1.6, 1.8, 2.0, 2.5],
    "long_factor": [1.0, 1.5, 2.0, 3.0, 4.0, 5.0, 6.0, 8.0],
}
SCALED_LONGROPE = LONGROPE | {"short_mscale": 1.2, "long_mscale": 0.7}
OLD_LONGROPE = {key: SCALED_LONGROPE[key] for key in ("short_factor", "long_factor", "short_mscale", "long_mscale")}
GROWING = {
    "rope_type": "yarn", "rope_theta": 300.0, "factor": 4.0, "original_max_position_embeddings": 16,
    "llama_4_scaling_beta": 0.4, "mscale": 1.0, "mscale_all_dim": 0.5,
}  # fmt: skip

# Keys of the common shape that these configs lack.
_GPT = ("intermediate_size", "num_key_value_heads")
ABSENT = {
    "gpt2": _GPT,
    "gptj": _GPT,
    "opt": (*_GPT, "initializer_range"),
    "gpt_neox": _GPT[1:],
    "persimmon": _GPT[1:],
    "qwen3_5_moe_text": _GPT[:1],
    "nemotron_h": ("num_hidden_layers",),
}
EXPERTS = {"num_experts": 4, "num_experts_per_tok": 2, "moe_intermediate_size": 24, "intermediate_size": 32}

# Routed and shared experts, and a dense first layer; expert groups are added for configs that have them.
ROUTED = {
    "n_routed_experts": 8, "n_shared_experts": 2, "num_experts_per_tok": 3, "moe_intermediate_size": 24,
    "first_k_dense_replace": 1, "routed_scaling_factor": 1.7,
}  # fmt: skip
LATENT = {
    "q_lora_rank": 32, "kv_lora_rank": 16, "qk_rope_head_dim": 8, "qk_nope_head_dim": 16, "v_head_dim": 12,
    "num_key_value_heads": 4,
}  # fmt: skip
CONV, CHUNKED = "conv", "chunked_attention"
GRANITE = {
    "embedding_multiplier": 3.0, "residual_multiplier": 0.5, "attention_multiplier": 0.3, "logits_scaling": 7.0,
}  # fmt: skip
DEEPSEEK_YARN = {
    "rope_type": "yarn", "rope_theta": 300.0, "factor": 4.0, "original_max_position_embeddings": 16,
    "mscale": 0.7, "mscale_all_dim": 0.9,
}  # fmt: skip

LINEAR_ATTENTION = "linear_attention"
# Delta nets normalize values that may be almost zero: a small eps, or few key channels, would amplify float32 noise.
DELTA = {
    "head_dim": 16, "full_attention_interval": 3, "linear_num_key_heads": 2, "linear_num_value_heads": 4,
    "linear_key_head_dim": 32, "linear_value_head_dim": 12, "rms_norm_eps": 0.1,
}  # fmt: skip

MAMBA = {"mamba_n_heads": 8, "mamba_n_groups": 2, "mamba_d_state": 12, "rms_norm_eps": 1e-2}

MOE, MLP = "moe", "mlp"
FALCON = {
    "mamba_d_ssm": 96, "embedding_multiplier": 3.0, "lm_head_multiplier": 0.6, "key_multiplier": 1.4,
    "attention_in_multiplier": 0.8, "attention_out_multiplier": 0.7, "ssm_in_multiplier": 1.3,
    "ssm_out_multiplier": 0.6, "mlp_multipliers": [1.2, 0.7], "ssm_multipliers": [0.9, 1.1, 0.8, 1.2, 0.7],
}  # fmt: skip

# In addition to tiny.SHAPE.
SHAPES = {
    "qwen3_next": {**EXPERTS, **DELTA, "shared_expert_intermediate_size": 40},
    "qwen3_5_text": DELTA,
    "qwen3_5_moe_text": {**EXPERTS, **DELTA, "shared_expert_intermediate_size": 40},
    "deepseek_v2": ROUTED | LATENT,
    "deepseek_v3": ROUTED | LATENT | {"n_group": 4, "topk_group": 2},
    "ernie4_5": {"head_dim": 24},
    "ernie4_5_moe": {"moe_num_experts": 8, "moe_k": 3, "moe_intermediate_size": 24, "moe_num_shared_experts": 2},
    "glm4_moe": ROUTED | {"head_dim": 24},
    "lfm2": {"block_multiple_of": 8, "num_hidden_layers": 4},
    "lfm2_moe": EXPERTS
    | {
        "num_hidden_layers": 4,
        "num_dense_layers": 1,
        "layer_types": [CONV, "full_attention", CONV, "full_attention"],
    },
    "gemma": {"head_dim": 24},
    "gemma2": {"head_dim": 24},
    "gemma3_text": {"head_dim": 24},
    "gemma4_text": {
        "head_dim": 8,
        "global_head_dim": 12,
        "num_hidden_layers": 6,
        "layer_types": [SLIDE, SLIDE, FULL] * 2,
        "num_kv_shared_layers": 3,
        "hidden_size_per_layer_input": 12,
        "vocab_size_per_layer_input": 600,
    },
    "glm": {"head_dim": 16},
    "glm4": {"head_dim": 16},
    "helium": {"head_dim": 16},
    "ministral": {"head_dim": 16},
    "ministral3": {"head_dim": 24},
    "minimax_m2": {"head_dim": 24, "num_local_experts": 4, "intermediate_size": 40, "num_experts_per_tok": 2},
    "mixtral": {"head_dim": 16, "num_local_experts": 4},
    # Without jitter its routers do not sample in training.
    "phimoe": {"head_dim": 16, "num_local_experts": 6, "router_jitter_noise": 0.0},
    "seed_oss": {"head_dim": 24, "attention_dropout": 0.0, "residual_dropout": 0.0},
    "hunyuan_v1_dense": {"head_dim": 24},
    "hunyuan_v1_moe": {"head_dim": 24, "num_experts": 4, "moe_topk": 2, "intermediate_size": 40},
    "qwen3": {"head_dim": 24},
    "qwen3_moe": {**EXPERTS, "head_dim": 24},
    "qwen2_moe": {**EXPERTS, "shared_expert_intermediate_size": 40},
    "nemotron_h": {key: value for key, value in ROUTED.items() if key != "first_k_dense_replace"}
    | {
        "head_dim": 16,
        "layers_block_type": [LINEAR_ATTENTION, MOE, FULL, LINEAR_ATTENTION, MLP],
        "n_group": 1,
        "mamba_num_heads": 8,
        "mamba_head_dim": 12,
        "n_groups": 2,
        "ssm_state_size": 12,
        "layer_norm_epsilon": 1e-2,
        "moe_shared_expert_intermediate_size": 40,
    },
    "falcon_h1": MAMBA | FALCON,
    "olmoe": {"num_experts": 4, "num_experts_per_tok": 2, "intermediate_size": 24},
    "gpt_oss": {"head_dim": 24, "intermediate_size": 40, "num_local_experts": 4, "num_experts_per_tok": 2},
    "gptj": {"rotary_dim": 8, "resid_pdrop": 0.0, "embd_pdrop": 0.0, "attn_pdrop": 0.0},
    "gpt2": {"resid_pdrop": 0.0, "embd_pdrop": 0.0, "attn_pdrop": 0.0},
    "opt": {"init_std": 0.1, "ffn_dim": 96, "word_embed_proj_dim": 64, "dropout": 0.0},
    "llama4_text": {
        "head_dim": 16,
        "intermediate_size": 40,
        "intermediate_size_mlp": 72,
        "num_local_experts": 4,
        "num_experts_per_tok": 2,
        "no_rope_layer_interval": 3,
        "attention_chunk_size": 9,
    },
    "granite": GRANITE,
    "granitemoehybrid": GRANITE
    | {
        "num_local_experts": 4,
        "num_experts_per_tok": 2,
        "intermediate_size": 40,
        "shared_intermediate_size": 48,
        "layer_types": [LINEAR_ATTENTION, FULL, LINEAR_ATTENTION],
        **MAMBA,
    },
    "granitemoe": GRANITE | {"num_local_experts": 4, "num_experts_per_tok": 2, "intermediate_size": 40},
}
# transformers has no sequence classifier for these: their trunk is compared under our head.
BODY_ONLY = {
    "apertus", "cohere", "cohere2", "ernie4_5", "ernie4_5_moe", "falcon_h1", "gemma4_text", "glm4_moe",
    "granite", "granitemoe", "granitemoehybrid", "llama4_text", "lfm2", "lfm2_moe", "minimax_m2", "nemotron_h", "olmoe",
    "qwen3_5_moe_text",
}  # fmt: skip

# Families whose attention, positions, mixers or experts differ from all others: tests that take seconds to compile run
# for these by default, and for all under THOROUGH=1.
UNLIKE = {
    "llama", "gemma2", "gemma3_text", "gemma4_text", "phi3", "smollm3", "gpt2", "opt", "ministral3", "llama4_text",
    "lfm2", "deepseek_v3", "gpt_oss", "phimoe", "qwen3_next", "nemotron_h", "falcon_h1",
}  # fmt: skip

# Families in UNLIKE whose generated tokens generation/test_families.py compares by default, which covers cached logits.
# The others are compared on full texts and in models/test_cached.py; opt's tokens have their own test, phimoe's are in
# generation/test_longrope.py.
GENERATED = UNLIKE - {"llama", "gemma2", "phi3", "deepseek_v3", "gpt2", "lfm2", "opt", "phimoe"}

# Families whose positions are not defined by a single rope_parameters.
OWN_ROPE = {"gpt2", "gptj", "opt", "gemma3_text", "gemma4_text", "olmo3", "phi3", "ministral3"}

VARIANTS = {
    "apertus": {
        "plain": {},
        "biases": {"attention_bias": True, "rms_norm_eps": 1e-2, "num_key_value_heads": 4},
        "rope_of_the_class": {"rope_parameters": None},
        "another_activation": {"hidden_act": "relu2", "rope_parameters": LLAMA3},
    },
    "arcee": {"plain": {}, "biases": {"attention_bias": True, "mlp_bias": True, "rope_parameters": LINEAR}},
    "cohere": {"plain": {}, "qk_norm": {"use_qk_norm": True, "attention_bias": True, "layer_norm_eps": 1e-2}},
    "cohere2": {
        "plain": {"sliding_window": 7},
        "types": {"sliding_window": 9, "layer_types": TYPES, "num_key_value_heads": 1},
    },
    "deepseek_v2": {
        "plain": {},
        "groups": {
            "topk_method": "group_limited_greedy", "n_group": 4, "topk_group": 2, "q_lora_rank": None,
            "attention_bias": True, "rope_parameters": DEEPSEEK_YARN,
        },
    },
    "deepseek_v3": {
        "plain": {},
        "others": {
            "n_group": 1, "topk_group": 1, "q_lora_rank": None, "attention_bias": True, "rope_interleave": False,
            "norm_topk_prob": False, "first_k_dense_replace": 0, "rope_parameters": DEEPSEEK_YARN,
        },
    },
    "ernie4_5": {"plain": {}, "biases": {"use_bias": True, "rms_norm_eps": 1e-2, "num_key_value_heads": 4}},
    "ernie4_5_moe": {
        "plain": {},
        "between": {
            "moe_layer_start_index": 0, "moe_layer_interval": 2, "moe_num_shared_experts": 0, "moe_norm_min": 0.9,
        },
    },
    "glm4_moe": {
        "odd": {"head_dim": 10, "rope_parameters": ROPE | {"partial_rotary_factor": 0.5}},
        "plain": {"rope_parameters": ROPE | {"partial_rotary_factor": 0.5}},
        "groups": {
            "n_group": 2, "topk_group": 1, "use_qk_norm": True, "attention_bias": True, "first_k_dense_replace": 2,
            "rope_parameters": ROPE | {"partial_rotary_factor": 0.5},
        },
    },
    "lfm2": {
        "plain": {"layer_types": [CONV, CONV, FULL, CONV]},
        "biases": {"full_attn_idxs": [0, 3], "conv_bias": True, "conv_L_cache": 4, "block_auto_adjust_ff_dim": False},
    },
    "lfm2_moe": {
        "plain": {"layer_types": [CONV, FULL, CONV, FULL]},
        "others": {
            "layer_types": [FULL, CONV, CONV, CONV], "use_expert_bias": False, "norm_topk_prob": False,
            "routed_scaling_factor": 1.3,
        },
    },
    "exaone4": {
        "plain": {"sliding_window": 7, "sliding_window_pattern": 2},
        "no_window": {"sliding_window": None, "layer_types": [FULL] * 3, "rope_parameters": LLAMA3},
        "types": {"sliding_window": 9, "layer_types": TYPES, "rms_norm_eps": 1e-2},
    },
    "gemma": {"plain": {}, "biases": {"attention_bias": True, "hidden_act": "gelu", "num_key_value_heads": 1}},
    "gemma2": {
        "plain": {"sliding_window": 7, "attn_logit_softcapping": 1.5, "query_pre_attn_scalar": 40},
        "no_caps": {"sliding_window": 9, "attn_logit_softcapping": None, "layer_types": [FULL, SLIDE, SLIDE]},
    },
    "gemma3_text": {
        "plain": {"sliding_window": 7, "rope_parameters": BOTH_ROPES, "layer_types": TYPES},
        "pattern": {"sliding_window": 9, "num_hidden_layers": 7, "query_pre_attn_scalar": 40},
        "old": {
            "sliding_window": 7,
            "layer_types": TYPES,
            "old": {"rope_theta": 700.0, "rope_local_base_freq": 90.0, "rope_scaling": OLD_LINEAR},
        },
    },
    "gemma4_text": {
        "plain": {"sliding_window": 7, "use_double_wide_mlp": True},
        "experts": {
            "sliding_window": 7, "enable_moe_block": True, "num_experts": 4, "top_k_experts": 2,
            "moe_intermediate_size": 24, "num_hidden_layers": 4, "layer_types": [SLIDE, FULL] * 2,
            "num_kv_shared_layers": 0, "attention_k_eq_v": True, "num_global_key_value_heads": 1,
        },
        "no_sharing": {
            "sliding_window": 9, "num_kv_shared_layers": 0, "hidden_size_per_layer_input": 0, "global_head_dim": 8,
            "num_hidden_layers": 7, "layer_types": None, "rope_parameters": PROPORTIONAL,
        },
        "keys_as_values": {
            "sliding_window": 9, "attention_k_eq_v": True, "num_global_key_value_heads": 1, "attention_bias": True,
            "num_kv_shared_layers": 4, "layer_types": [SLIDE, FULL, FULL, SLIDE, SLIDE, FULL],
            "rope_parameters": PROPORTIONAL, "rms_norm_eps": 1e-2,
        },
    },
    "glm": {"plain": {}, "no_bias": {"attention_bias": False, "num_key_value_heads": 1, "head_dim": 24}},
    "glm4": {"plain": {}, "no_bias": {"attention_bias": False, "num_key_value_heads": 1, "head_dim": 24}},
    "gpt2": {
        "plain": {},
        "by_layer": {"scale_attn_by_inverse_layer_idx": True, "n_inner": 80, "activation_function": "relu"},
    },
    "gpt_neox": {
        "plain": {},
        "odd": {"rope_parameters": {"rope_type": "default", "rope_theta": 300.0, "partial_rotary_factor": 0.2}},
        "odd_linear": {"old": {"rotary_pct": 0.32, "rope_scaling": OLD_LINEAR}},
        "still": {"hidden_size": 8, "rotary_pct": 0.25},
        "sequential": {"use_parallel_residual": False, "attention_bias": False},
        "old": {"old": {"rotary_pct": 0.5, "rotary_emb_base": 400}},
    },
    "gpt_oss": {
        "plain": {"sliding_window": 7},
        "original": {"sliding_window": 9, "old": {"rope_theta": 150_000, "rope_scaling": OLD_YARN}},
        "clamped": {
            "sliding_window": 9, "rope_parameters": None, "layer_types": TYPES, "attention_bias": False,
            "swiglu_alpha": 1.2, "swiglu_limit": 0.5, "num_experts_per_tok": 3,
        },
    },
    "gptj": {"plain": {}, "whole": {"rotary_dim": 16, "n_inner": 80}},
    "granite": {"plain": {}, "biases": {"attention_bias": True, "mlp_bias": True}},
    "granitemoe": {
        "plain": {},
        "biases": {"attention_bias": True, "num_experts_per_tok": 3, "rms_norm_eps": 1e-2, "num_key_value_heads": 4},
    },
    "granitemoehybrid": {
        "plain": {"position_embedding_type": "rope"},
        "no_positions": {"layer_types": ["attention"] * 3, "attention_bias": True, "num_experts_per_tok": 3},
        "no_experts": {"layer_types": ["mamba", "mamba", "attention"], "num_local_experts": 0},
        "biases": {
            "layer_types": None, "mamba_proj_bias": True, "mamba_conv_bias": False, "mamba_n_groups": 1,
            "mamba_d_conv": 3, "time_step_limit": [0.3, 1.2], "num_experts_per_tok": 3,
        },
    },
    "helium": {"plain": {}, "biases": {"attention_bias": True, "mlp_bias": True, "rms_norm_eps": 1e-2}},
    "hunyuan_v1_dense": {
        "plain": {},
        "alpha": {"rope_parameters": {"rope_type": "dynamic", "rope_theta": 300.0, "alpha": 50.0, "factor": 1.0}},
    },
    "minimax_m2": {
        "plain": {"rope_parameters": ROPE | {"partial_rotary_factor": 0.5}},
        "rotary_dim": {"num_experts_per_tok": 3, "old": {"rotary_dim": 8, "rope_theta": 300.0}},
    },
    "hunyuan_v1_moe": {
        "plain": {},
        "list": {
            "moe_topk": [3, 3, 3], "attention_bias": True, "rms_norm_eps": 1e-2,
            "rope_parameters": {"rope_type": "dynamic", "rope_theta": 300.0, "alpha": 50.0, "factor": 1.0},
        },
    },
    "llama4_text": {
        "plain": {},
        "growing": {
            "interleave_moe_layer_step": 2, "no_rope_layers": [0, 1, 0], "floor_scale": 8, "attn_scale": 0.7,
            "attention_bias": True, "rms_norm_eps": 1e-2, "rope_parameters": LLAMA3,
        },
        "not_normed": {
            "use_qk_norm": False, "moe_layers": [2], "layer_types": ["full_attention", CHUNKED, CHUNKED],
            "num_experts_per_tok": 1, "floor_scale": 8, "attn_temperature_tuning": False,
        },
    },
    "ministral": {"plain": {"sliding_window": 7}, "types": {"sliding_window": 9, "layer_types": TYPES}},
    "ministral3": {"plain": {"rope_parameters": GROWING}, "window": {"sliding_window": 7, "rope_parameters": GROWING}},
    "mistral": {"plain": {"sliding_window": 7}, "no_window": {"sliding_window": None, "head_dim": 24}},
    "mixtral": {"plain": {}, "window": {"sliding_window": 7, "num_experts_per_tok": 3}},
    "nemotron": {"plain": {}, "biases": {"attention_bias": True, "mlp_bias": True, "norm_eps": 1e-2}},
    "falcon_h1": {
        "plain": {},
        "norm": {"mamba_rms_norm": True, "mamba_norm_before_gate": False, "mamba_d_ssm": None},
        "biases": {
            "mamba_rms_norm": True, "projectors_bias": True, "mamba_proj_bias": True, "mamba_conv_bias": False,
            "attention_bias": True, "mlp_bias": True, "mamba_d_conv": 3, "head_dim": 24,
        },
    },
    "nemotron_h": {
        "plain": {},
        "no_experts": {"layers_block_type": [LINEAR_ATTENTION, MLP, FULL, MLP], "mlp_hidden_act": "silu"},
        "no_mamba": {"layers_block_type": [FULL, MOE, FULL, MLP], "n_groups": 3, "norm_topk_prob": False},
        "latent": {
            "layers_block_type": [MOE, MLP, LINEAR_ATTENTION, FULL], "moe_latent_size": 24, "mlp_bias": True,
            "use_bias": True, "use_conv_bias": False, "n_groups": 4, "conv_kernel": 3, "time_step_min": 0.5,
            "n_group": 4, "topk_group": 2, "norm_topk_prob": False, "num_key_value_heads": 4,
        },
    },
    "olmo": {"plain": {}, "clip": {"clip_qkv": 0.7, "attention_bias": True}},
    "olmo2": {"plain": {}, "biases": {"attention_bias": True, "num_key_value_heads": 4, "rms_norm_eps": 1e-2}},
    "olmo3": {
        "plain": {"sliding_window": 7, "rope_parameters": BOTH_ROPES, "layer_types": TYPES},
        "pattern": {"sliding_window": 9, "num_hidden_layers": 5},
        "old": {
            "sliding_window": 7,
            "layer_types": TYPES,
            "old": {"rope_theta": 700.0, "rope_scaling": OLD_LINEAR},
        },
    },
    "olmoe": {"plain": {}, "renormalized": {"norm_topk_prob": True, "clip_qkv": 0.9, "num_key_value_heads": 4}},
    "opt": {
        "plain": {},
        "no_bias": {"enable_bias": False, "layer_norm_elementwise_affine": False, "activation_function": "gelu"},
        "no_last_norm": {"_remove_final_layer_norm": True, "word_embed_proj_dim": 64},
        "normed_sums": {"do_layer_norm_before": False, "word_embed_proj_dim": 48},
        "normed_sums_no_bias": {"do_layer_norm_before": False, "word_embed_proj_dim": 48, "enable_bias": False},
    },
    "persimmon": {"plain": {}, "no_norm": {"qk_layernorm": False, "rope_parameters": QUARTER}},
    "phi": {"plain": {}, "qk_norm": {"qk_layernorm": True, "layer_norm_eps": 1e-2, "num_key_value_heads": 4}},
    "phi3": {
        "plain": {"sliding_window": 7},
        "short": {"rope_parameters": LONGROPE, "original_max_position_embeddings": 64},
        "long": {"rope_parameters": LONGROPE, "original_max_position_embeddings": 32},
        "partial": {"rope_parameters": ROPE | {"partial_rotary_factor": 0.5}, "num_key_value_heads": 4},
    },
    "phimoe": {
        "plain": {"router_jitter_noise": 0.2},
        "alone": {"rms_norm_eps": 1e-2, "num_key_value_heads": 4},
        # as in Phi-3.5-MoE's own config
        "old": {
            "old": {
                "rope_theta": 300.0, "rope_scaling": {"type": "longrope", **OLD_LONGROPE}, "hidden_dropout": 0.0,
                "original_max_position_embeddings": 64,
            },
            "attention_bias": True, "lm_head_bias": True,
        },
        "long": {
            "rope_parameters": SCALED_LONGROPE | {"original_max_position_embeddings": 32}, "attention_bias": True,
            "sliding_window": 7, "router_jitter_noise": 0.2,
        },
    },
    "qwen2_moe": {"plain": {}, "no_bias": {"qkv_bias": False, "norm_topk_prob": True}},
    "qwen3_5_text": {
        "plain": {"rope_parameters": QUARTER | {"mrope_section": [1, 1, 0], "mrope_interleaved": True}},
        "others": {
            "layer_types": [LINEAR_ATTENTION, FULL, LINEAR_ATTENTION], "attention_bias": True,
            "linear_num_key_heads": 4, "linear_conv_kernel_dim": 3,
            "rope_parameters": ROPE | {"partial_rotary_factor": 0.5},
        },
    },
    "qwen3_5_moe_text": {
        "plain": {"rope_parameters": QUARTER | {"mrope_section": [1, 1, 0], "mrope_interleaved": True}},
        "others": {
            "layer_types": [FULL, LINEAR_ATTENTION, LINEAR_ATTENTION], "attention_bias": True, "num_experts_per_tok": 3,
            "rope_parameters": ROPE | {"partial_rotary_factor": 0.5},
        },
    },
    "qwen3_next": {
        "plain": {},
        "dense": {
            "decoder_sparse_step": 2, "layer_types": [FULL, LINEAR_ATTENTION, LINEAR_ATTENTION], "attention_bias": True,
            "linear_num_value_heads": 2, "norm_topk_prob": False,
        },
    },
    "qwen3_moe": {"plain": {}, "window": {"use_sliding_window": True, "sliding_window": 7, "norm_topk_prob": True}},
    "seed_oss": {"plain": {}, "biases": {"attention_bias": False, "attention_out_bias": True, "mlp_bias": True}},
    "smollm3": {
        "plain": {"no_rope_layer_interval": 2},
        "window": {"no_rope_layers": [0, 1, 0], "use_sliding_window": True, "sliding_window": 7},
    },
    "stablelm": {
        "plain": {},
        "parallel": {"use_parallel_residual": True, "use_qkv_bias": True, "layer_norm_eps": 1e-2},
    },
    "starcoder2": {"plain": {"sliding_window": 7}, "no_bias": {"use_bias": False, "hidden_act": "relu"}},
}  # fmt: skip

ABSENT |= encoders.ABSENT
SHAPES |= encoders.SHAPES
