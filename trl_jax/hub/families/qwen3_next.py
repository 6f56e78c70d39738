"""Qwen3-Next and Qwen 3.5, whose layers are mostly gated delta nets.

qwen3_next: gated delta nets, gated attention in every fourth layer, and experts.
qwen3_5_text: qwen3_next without experts, with each projection in its own tensor.
qwen3_5_moe_text: qwen3_5_text with experts in every layer, one of them shared.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace

from trl_jax.hub.config_reader import ConfigReader, read_rotary_dim
from trl_jax.hub.families import Family, llama, qwen
from trl_jax.hub.heads import ScoreHead, lm_head
from trl_jax.hub.tensor_map import Names, concatenated, in_runs, interleaved
from trl_jax.models.arch import Arch, GatedDelta, LayerKind

_DELTA, _ATTENTION = "linear_attention", "full_attention"
_OURS = "decoder.layers.attention."
IGNORED = (*Family.ignored, r"^mtp\.")  # for multi-token prediction


def arch(config: ConfigReader) -> Arch:
    step, dense = config.size("decoder_sparse_step", 1), config.value("mlp_only_layers") or []
    every = config.with_values(decoder_sparse_step=1, mlp_only_layers=None)
    base = _hybrid_arch(config)
    kinds = tuple(
        LayerKind(kind.mixer, layer not in dense and not (layer + 1) % step) for layer, kind in enumerate(base.kinds)
    )
    experts = qwen.read_experts(every, shared_size=config.size("shared_expert_intermediate_size"))
    return replace(base, experts=experts, kinds=kinds)


def _hybrid_arch(config: ConfigReader, *, extra_keys: frozenset[str] = frozenset()) -> Arch:
    """The architecture of a model of gated delta nets and gated attention; `extra_keys` as in `read_rope`."""
    base = llama.arch(config, partial=True, extra_keys=extra_keys)
    return replace(
        base,
        mlp_bias=False,
        rotary_dim=read_rotary_dim(config, base.head_dim, 0.25),
        norm="rms_one_plus",
        qk_norm="head",
        qk_norm_kind="rms_one_plus",
        gated_attention=True,
        gated_delta=_gated_delta(config),
        kinds=tuple(LayerKind(mixer) for mixer in _mixers(config, base.num_layers)),
    )


def _gated_delta(config: ConfigReader) -> GatedDelta:
    config.refuse("hidden_act", "silu")  # also the convolution's activation
    key_heads, value_heads = config.size("linear_num_key_heads"), config.size("linear_num_value_heads")
    if value_heads % key_heads:
        raise config.wrong("linear_num_value_heads", value_heads, f"a multiple of linear_num_key_heads {key_heads}")
    sizes = (config.size(f"linear_{name}_head_dim") for name in ("key", "value"))
    return GatedDelta(key_heads, value_heads, *sizes, config.size("linear_conv_kernel_dim", 4, minimum=2))


def _mixers(config: ConfigReader, num_layers: int) -> list[str]:
    every = config.size("full_attention_interval", 4)
    default = [_DELTA if (layer + 1) % every else _ATTENTION for layer in range(num_layers)]
    types = config.names("layer_types") or default
    if len(types) != num_layers or set(types) - {_DELTA, _ATTENTION}:
        raise config.wrong("layer_types", types, f"{num_layers} of {_DELTA!r} and {_ATTENTION!r}")
    return ["delta_net" if kind == _DELTA else "attention" for kind in types]


def names(arch: Arch) -> Names:
    return in_runs(arch.runs, lambda kind: _layer_names(arch, kind, _fused_projections))


def _layer_names(arch: Arch, kind: LayerKind, projections: Callable[[Arch], Names]) -> Names:
    """The names of a layer; `projections` maps an Arch to the names of a delta net."""
    mixer = projections(arch) if kind.mixer == "delta_net" else _attention(arch)
    base = qwen.names_v2_moe(arch) if kind.experts else llama.names(arch)
    mlp = {name: place for name, place in base.items() if name.startswith("decoder.layers.mlp.")}
    return {
        "decoder.embed": "model.embed_tokens",
        **mixer,
        **mlp,
        "decoder.layers.attention_norm": "model.layers.{}.input_layernorm",
        "decoder.layers.mlp_norm": "model.layers.{}.post_attention_layernorm",
        "decoder.norm": "model.norm",
    }


def _attention(arch: Arch) -> Names:
    theirs = "model.layers.{}.self_attn."
    return {
        **interleaved(theirs + "q_proj", arch.num_heads, {_OURS + "q": arch.head_dim, _OURS + "gate": arch.head_dim}),
        **{_OURS + name: f"{theirs}{name}_proj" for name in "kvo"},
        **{f"{_OURS}{name}_norm": f"{theirs}{name}_norm" for name in "qk"},
    }


def _fused_projections(arch: Arch) -> Names:
    delta, theirs = arch.gated_delta, "model.layers.{}.linear_attn."
    group = delta.value_heads // delta.key_heads
    values = group * delta.value_dim
    qkvz = {_OURS + "q": delta.key_dim, _OURS + "k": delta.key_dim, _OURS + "v": values, _OURS + "gate": values}
    return {
        **_of_delta_net(arch),
        **interleaved(theirs + "in_proj_qkvz", delta.key_heads, qkvz),
        **interleaved(theirs + "in_proj_ba", delta.key_heads, {_OURS + "beta": group, _OURS + "decay": group}),
        _OURS + "out_norm": theirs + "norm",
        _OURS + "o": theirs + "out_proj",
    }


def _of_delta_net(arch: Arch) -> Names:
    """The names of a delta net's parameters outside linear layers and norms."""
    theirs = "model.layers.{}.linear_attn."
    convolutions = concatenated(theirs + "conv1d.weight", _delta_channels(arch, "_convolution"))
    return {_OURS + name: theirs + name for name in ("dt_bias", "A_log")} | convolutions


def _delta_channels(arch: Arch, ending: str = "") -> dict[str, int]:
    """Our name with this ending -> number of channels, for queries, keys and values."""
    delta = arch.gated_delta
    keys, values = delta.key_heads * delta.key_dim, delta.value_heads * delta.value_dim
    return {f"{_OURS}{name}{ending}": size for name, size in (("q", keys), ("k", keys), ("v", values))}


def _decays(arch: Arch) -> int:
    """transformers draws a decay for each value head even if the checkpoint has these."""
    return arch.gated_delta.value_heads * sum(kind.mixer == "delta_net" for kind in arch.kinds)


HEADS = {"score_head": ScoreHead(unused=_decays), "lm_head": replace(lm_head(), unused=_decays)}


# Unused by texts, which have the same position on all three axes
_OF_IMAGES = frozenset({"mrope_section", "mrope_interleaved"})


def arch_v3_5(config: ConfigReader) -> Arch:
    return _hybrid_arch(config, extra_keys=_OF_IMAGES)


def names_v3_5(arch: Arch) -> Names:
    return in_runs(arch.runs, lambda kind: _layer_names(arch, kind, _separate_projections))


def _separate_projections(arch: Arch) -> Names:
    """The names of a delta net's parameters."""
    theirs = "model.layers.{}.linear_attn."
    return {
        **_of_delta_net(arch),
        _OURS + "out_norm": theirs + "norm",
        _OURS + "o": theirs + "out_proj",
        **concatenated(theirs + "in_proj_qkv", _delta_channels(arch)),
        _OURS + "gate": theirs + "in_proj_z",
        _OURS + "beta": theirs + "in_proj_b",
        _OURS + "decay": theirs + "in_proj_a",
    }


def arch_v3_5_moe(config: ConfigReader) -> Arch:
    size = config.size("moe_intermediate_size")
    base = arch_v3_5(config.with_values(intermediate_size=size))
    experts = qwen.read_experts(config, shared_size=config.size("shared_expert_intermediate_size"))
    kinds = tuple(LayerKind(kind.mixer, experts=True) for kind in base.kinds)
    return replace(base, experts=replace(experts, renormalized=True), kinds=kinds)


FAMILIES = (
    Family("qwen3_next", "Qwen3Next", arch, names, ignored=IGNORED, **HEADS),
    Family("qwen3_5_text", "Qwen3_5Text", arch_v3_5, names_v3_5, ignored=IGNORED, **HEADS),
    Family(
        "qwen3_5_moe_text",
        "Qwen3_5MoeText",
        arch_v3_5_moe,
        names_v3_5,
        ignored=IGNORED,
        in_transformers=False,
        **HEADS,
    ),
)
