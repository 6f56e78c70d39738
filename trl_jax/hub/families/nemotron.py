"""Nemotron, and the hybrids of Nemotron-H.

nemotron: llama with layer norms that scale by 1 + weight, a plain MLP, and half of each head's channels rotated.
nemotron_h: Nemotron-H and Nemotron 3: each layer is Mamba-2, attention without positions, an MLP, or experts.
"""

from __future__ import annotations

from dataclasses import replace

from trl_jax.hub.config_reader import FULL, LINEAR, ConfigReader, read_rotary_dim
from trl_jax.hub.families import Family, deepseek, granite, llama
from trl_jax.hub.tensor_map import Names, in_runs
from trl_jax.models.arch import Arch, Experts, LayerKind, StateSpace
from trl_jax.nn.layers import ACTIVATIONS


def arch(config: ConfigReader) -> Arch:
    base = llama.arch(config, partial=True)
    return replace(
        base,
        norm="layer_one_plus",
        norm_eps=config.number("norm_eps", 1e-5),
        rotary_dim=read_rotary_dim(config, base.head_dim, 0.5),
        gated=False,
    )


_KINDS = {
    LINEAR: LayerKind("mamba", mlp=False),
    FULL: LayerKind("attention", mlp=False),
    "mlp": LayerKind(None),
    "moe": LayerKind(None, experts=True),
}
_OLD_NAMES = {"mamba": LINEAR, "attention": FULL}
_LETTERS = {"M": LINEAR, "*": FULL, "-": "mlp", "E": "moe"}
# Names in early configs -> current names
_RENAMED = {
    "mamba_n_groups": "n_groups", "mamba_d_conv": "conv_kernel", "mamba_dt_min": "time_step_min",
    "mamba_conv_bias": "use_conv_bias",
}  # fmt: skip
# Keys that have no effect without such layers
_OF_MAMBA = (
    "conv_kernel", "mamba_head_dim", "mamba_hidden_act", "mamba_num_heads", "n_groups", "ssm_state_size",
    "time_step_min", "use_bias", "use_conv_bias",
)  # fmt: skip
_OF_EXPERTS = (
    "moe_intermediate_size", "moe_latent_size", "moe_shared_expert_intermediate_size", "n_group", "n_routed_experts",
    "norm_topk_prob", "num_experts_per_tok", "routed_scaling_factor", "topk_group",
)  # fmt: skip
# Keys without effect, also in transformers: among them positions, windows and the biases of attention
_UNREAD = (
    "attention_bias", "chunk_size", "expand", "hidden_dropout", "mamba_chunk_size", "mamba_dt_init_floor",
    "mamba_dt_limit", "mamba_dt_max", "mamba_expand", "mamba_proj_bias", "mamba_ssm_cache_dtype",
    "moe_shared_expert_overlap", "mtp_hybrid_override_pattern", "mtp_layers_block_type", "n_shared_experts",
    "num_hidden_layers", "num_logits_to_keep", "num_nextn_predict_layers", "output_router_logits",
    "partial_rotary_factor", "rescale_prenorm_residual", "residual_in_fp32", "rope_parameters", "rope_scaling",
    "rope_theta", "sliding_window", "time_step_floor", "time_step_limit", "time_step_max", "time_step_rank",
    "use_mamba_kernels",
)  # fmt: skip


def arch_hybrid(config: ConfigReader) -> Arch:
    config.skip(*_UNREAD, *_RENAMED, *_OF_MAMBA, *_OF_EXPERTS)
    config = config.with_values(**{new: config.raw[old] for old, new in _RENAMED.items() if old in config.raw})
    kinds, eps = _kinds(config), config.number("layer_norm_epsilon", 1e-5)
    for key in ("norm_eps", "rms_norm_eps"):
        config.refuse(key, eps)
    config.refuse("attention_head_dim", config.size("head_dim", 128))
    activation = config.one_of("mlp_hidden_act", ACTIVATIONS, "relu2")
    count, bias = len(kinds), config.flag("mlp_bias")
    same = {"num_hidden_layers": count, "rms_norm_eps": eps, "hidden_act": activation, "attention_bias": False}
    return replace(
        llama.arch(config.with_values(**same, rope_theta=1e4, rope_parameters=None, rope_scaling=None)),
        gated=False,
        norm="rms_float32",
        mlp_bias=bias,
        ropes=(None,) * count,
        experts=_experts(config, bias) if any(kind.experts for kind in kinds) else None,
        state_space=_state_space(config) if any(kind.mixer == "mamba" for kind in kinds) else None,
        kinds=kinds,
        tied_embeddings=False,  # regardless of the config
        padding_idx=None,
    )


def _kinds(config: ConfigReader) -> tuple[LayerKind, ...]:
    pattern, types = config.value("hybrid_override_pattern"), _types(config)
    if types is None and pattern is not None:
        if not isinstance(pattern, str) or set(pattern) - set(_LETTERS):
            raise config.wrong("hybrid_override_pattern", pattern, f"letters among {' '.join(_LETTERS)}")
        types = [_LETTERS[letter] for letter in pattern]
    if not types or set(types) - set(_KINDS):
        raise config.wrong("layers_block_type", types, f"a list of {', '.join(map(repr, _KINDS))}")
    return tuple(_KINDS[kind] for kind in types)


def _types(config: ConfigReader) -> list[str] | None:
    types = config.names("layers_block_type") or config.names("layer_types")
    return None if types is None else [_OLD_NAMES.get(kind, kind) for kind in types]


def _experts(config: ConfigReader, bias: bool) -> Experts:
    size, latent = config.size("moe_shared_expert_intermediate_size"), config.value("moe_latent_size")
    return replace(
        deepseek.read_experts(config.with_values(n_shared_experts=1)),  # their number is not read
        gated=False,
        shared_size=size,
        latent_size=None if latent is None else config.size("moe_latent_size"),
        latent_bias=bias,
    )


def _state_space(config: ConfigReader) -> StateSpace:
    config.refuse("mamba_hidden_act", "silu")
    heads, head_dim = config.size("mamba_num_heads"), config.size("mamba_head_dim")
    as_granite = {
        "mamba_n_heads": heads, "mamba_d_head": head_dim, "mamba_n_groups": config.size("n_groups"),
        "mamba_d_state": config.size("ssm_state_size"), "mamba_d_conv": config.size("conv_kernel"),
        "mamba_conv_bias": config.flag("use_conv_bias", True), "mamba_proj_bias": config.flag("use_bias"),
        "time_step_limit": [config.number("time_step_min"), float("inf")], "hidden_act": "silu",
    }  # fmt: skip
    return granite.read_state_space(config.with_values(**as_granite), heads * head_dim)


def names_hybrid(arch: Arch) -> Names:
    return in_runs(arch.runs, lambda kind: _layer_names(arch, kind))


def _layer_names(arch: Arch, kind: LayerKind) -> Names:
    layer = "backbone.layers.{}."
    norm = "decoder.layers.mlp_norm" if kind.mixer is None else "decoder.layers.attention_norm"
    return {
        "decoder.embed": "backbone.embeddings",
        norm: layer + "norm",
        **_mixer_names(arch, kind, layer + "mixer."),
        "decoder.norm": "backbone.norm_f",
    }


def _mixer_names(arch: Arch, kind: LayerKind, theirs: str) -> Names:
    ours = "decoder.layers.mlp."
    if kind.mixer == "mamba":
        return granite.mamba_names(arch, theirs)
    if kind.mixer == "attention":
        return {f"decoder.layers.attention.{name}": f"{theirs}{name}_proj" for name in "qkvo"}
    if not kind.experts:
        return {f"{ours}{name}": f"{theirs}{name}_proj" for name in ("up", "down")}
    return {
        **{f"{ours}{name}": f"{theirs}experts.{{}}.{name}_proj.weight" for name in ("up", "down")},
        ours + "router": theirs + "gate",
        ours + "correction_bias": theirs + "gate.e_score_correction_bias",
        **{f"{ours}shared.{name}": f"{theirs}shared_experts.{name}_proj" for name in ("up", "down")},
        ours + "into_latent": theirs + "fc1_latent_proj",
        ours + "from_latent": theirs + "fc2_latent_proj",
    }


FAMILIES = (
    Family("nemotron", "Nemotron", arch, llama.names),
    Family(
        "nemotron_h",
        "NemotronH",
        arch_hybrid,
        names_hybrid,
        base_prefix="backbone.",
        other_prefixes=("model.",),
        ignored=(*Family.ignored, r"^mtp\."),  # for multi-token prediction
        in_float32=deepseek.ROUTER,
        in_transformers=False,
    ),
)
