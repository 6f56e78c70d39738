"""DeepSeek V2, V3 and R1.

deepseek_v2: latent attention, and softmax-routed experts with a shared one.
deepseek_v3: DeepSeek V3 and R1: latent attention, and sigmoid-routed experts in groups with a shared one.
"""

from __future__ import annotations

from dataclasses import replace

from trl_jax.hub.config_reader import ConfigReader, read_score_scale
from trl_jax.hub.families import Family, llama, qwen
from trl_jax.hub.tensor_map import Names, in_runs, ordered
from trl_jax.models.arch import Arch, Experts, Latent, LayerKind

# Keys of early checkpoints that transformers does not read; it computes as if they had these values.
_SAID_V3 = {"topk_method": "noaux_tc", "scoring_func": "sigmoid", "moe_layer_freq": 1}
_OF_TRAINING = (
    "aux_loss_alpha", "ep_size", "num_nextn_predict_layers", "num_mtp_layers", "output_router_logits", "seq_aux",
)  # fmt: skip
_LATENT_EPS = 1e-6
ROUTER = r"\.gate\.weight$|\.e_score_correction_bias$"


def arch_v3(config: ConfigReader) -> Arch:
    config.fix(_SAID_V3)
    base = _latent_arch(config)
    return replace(
        base,
        mlp_bias=False,
        rope_interleaved=config.flag("rope_interleave", True),
        experts=read_experts(config),
        kinds=read_kinds(config, base.num_layers),
    )


def _latent_arch(config: ConfigReader) -> Arch:
    """The architecture of a model with latent attention."""
    config.skip("head_dim", "qk_head_dim", *_OF_TRAINING)  # the first two follow from others
    heads, rotary_dim = config.size("num_attention_heads"), config.size("qk_rope_head_dim")
    config.refuse("num_key_value_heads", heads)
    head_dim = config.size("qk_nope_head_dim") + rotary_dim
    base = llama.arch(config.with_values(head_dim=head_dim))
    rank = None if config.value("q_lora_rank") is None or config.is_null("q_lora_rank") else config.size("q_lora_rank")
    latent = Latent(rank, config.size("kv_lora_rank"), config.size("v_head_dim"), _LATENT_EPS)
    scale = head_dim**-0.5 * read_score_scale(config)
    return replace(base, rotary_dim=rotary_dim, latent=latent, attention_scales=(scale,) * base.num_layers)


def read_experts(config: ConfigReader) -> Experts:
    size, groups = config.size("moe_intermediate_size"), config.size("n_group", 1)
    count = config.size("n_routed_experts")
    if count % groups or (groups > 1 and count // groups < 2):
        raise config.wrong("n_routed_experts", count, f"a multiple of n_group {groups}, at least two in a group")
    return Experts(
        count=count,
        top_k=config.size("num_experts_per_tok"),
        size=size,
        renormalized=config.flag("norm_topk_prob", True),
        shared_size=size * config.size("n_shared_experts"),
        shared_gated=False,
        scores="sigmoid",
        float32_router=True,
        weight_floor=1e-20,
        scale=config.number("routed_scaling_factor", 1.0),
        correction_bias=True,
        groups=groups,
        top_groups=config.size("topk_group", 1, maximum=groups),
    )


def read_kinds(config: ConfigReader, num_layers: int) -> tuple[LayerKind, ...]:
    """The first `first_k_dense_replace` layers have an MLP; the others have experts."""
    dense = config.size("first_k_dense_replace", 0, minimum=0)
    return tuple(LayerKind(experts=layer >= dense) for layer in range(num_layers))


def names(arch: Arch) -> Names:
    return in_runs(arch.runs, lambda kind: llama.norms_last(_latent_names(arch) | mlp_names(arch, kind)))


def mlp_names(arch: Arch, kind: LayerKind, *, router_first: bool = False) -> Names:
    """The names of an MLP, or of routed and shared experts; the router comes before or after them."""
    ours, theirs = "decoder.layers.mlp.", "model.layers.{}.mlp."
    if not kind.experts:
        return {ours + name: f"{theirs}{name}_proj" for name in ("gate", "up", "down")}
    moe = {name: place for name, place in qwen.names_v2_moe(arch).items() if name.startswith(ours)}
    moe.pop(ours + "shared_gate")
    moe |= {f"{ours}shared.{name}": f"{theirs}shared_experts.{name}_proj" for name in ("gate", "up", "down")}
    moe[ours + "correction_bias"] = theirs + "gate.e_score_correction_bias"
    if router_first:
        return moe
    return ordered(moe, *(ours + name for name in ("gate", "up", "down")), before=ours + "router")


def _latent_names(arch: Arch) -> Names:
    ours, theirs = "decoder.layers.attention.", "model.layers.{}.self_attn."
    down = arch.latent.query_rank is not None
    return {
        "decoder.embed": "model.embed_tokens",
        "decoder.layers.attention_norm": "model.layers.{}.input_layernorm",
        **({ours + "q_down": theirs + "q_a_proj", ours + "q_norm": theirs + "q_a_layernorm"} if down else {}),
        ours + "q": theirs + ("q_b_proj" if down else "q_proj"),
        ours + "kv_down": theirs + "kv_a_proj_with_mqa",
        ours + "kv_norm": theirs + "kv_a_layernorm",
        ours + "kv": theirs + "kv_b_proj",
        ours + "o": theirs + "o_proj",
        "decoder.layers.mlp_norm": "model.layers.{}.post_attention_layernorm",
        "decoder.norm": "model.norm",
    }


_SAID_V2 = {"scoring_func": "softmax", "moe_layer_freq": 1, "mlp_bias": False}


def arch_v2(config: ConfigReader) -> Arch:
    config.fix(_SAID_V2)
    config.skip("norm_topk_prob")  # transformers' router does not read it
    base = _latent_arch(config.with_values(num_key_value_heads=_key_heads(config)))
    kinds = read_kinds(config, base.num_layers)
    return replace(base, rope_interleaved=True, experts=_experts_v2(config), kinds=kinds)


def _key_heads(config: ConfigReader) -> int:
    return config.size("num_key_value_heads", config.size("num_attention_heads"))


def _experts_v2(config: ConfigReader) -> Experts:
    grouped = config.one_of("topk_method", ("greedy", "group_limited_greedy"), "greedy") == "group_limited_greedy"
    size, count = config.size("moe_intermediate_size"), config.size("n_routed_experts")
    groups, top_groups = (config.size("n_group"), config.size("topk_group")) if grouped else (1, 1)
    config.skip("n_group", "topk_group")
    if count % groups:
        raise config.wrong("n_routed_experts", count, f"a multiple of n_group {groups}")
    return Experts(
        count=count,
        top_k=config.size("num_experts_per_tok"),
        size=size,
        renormalized=False,
        shared_size=size * config.size("n_shared_experts"),
        shared_gated=False,
        float32_router=True,
        scale=config.number("routed_scaling_factor", 1.0),
        groups=groups,
        top_groups=top_groups,
        group_best=1,
    )


FAMILIES = (
    Family(
        "deepseek_v3",
        "DeepseekV3",
        arch_v3,
        names,
        ignored=(*Family.ignored, r"^model\.layers\.61\."),  # for multi-token prediction
        in_float32=ROUTER,
    ),
    Family("deepseek_v2", "DeepseekV2", arch_v2, names, in_float32=ROUTER),
)
