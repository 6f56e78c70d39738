"""LFM2, with and without experts.

lfm2: LFM2: gated short convolutions, and attention in some of the layers.
lfm2_moe: lfm2 with experts in all layers but the first.
"""

from __future__ import annotations

from dataclasses import replace

from trl_jax.hub.config_reader import ConfigReader
from trl_jax.hub.families import Family, llama
from trl_jax.hub.tensor_map import Names, concatenated, in_runs
from trl_jax.models.arch import Arch, Experts, LayerKind, ShortConvolution

_CONVOLUTION, _ATTENTION = "conv", "full_attention"
# Keys of early checkpoints that transformers does not read, or that have no effect
_FIXED = {"block_use_swiglu": True, "use_pos_enc": True, "tie_embedding": True}
_UNREAD = (
    "block_mlp_init_scale", "block_norm_eps", "block_out_init_scale", "block_use_xavier_init", "conv_use_xavier_init",
    "num_heads", "theta",
)  # fmt: skip


def arch(config: ConfigReader) -> Arch:
    config.fix(_FIXED)
    config.skip(*_UNREAD)
    hidden = config.size("hidden_size")
    for key in ("block_dim", "conv_dim", "conv_dim_out"):
        config.refuse(key, hidden)
    base = _hybrid_arch(config)
    types = _types(config, base.num_layers)
    mixers = _read_mixers(config, config.names("layer_types") or types, base.num_layers)
    return replace(base, mlp_size=_mlp_size(config), kinds=tuple(LayerKind(mixer) for mixer in mixers))


def _hybrid_arch(config: ConfigReader) -> Arch:
    """The architecture of a model in which some layers are convolutions."""
    base = llama.arch(config.with_values(rms_norm_eps=config.number("norm_eps", 1e-5)))
    convolution = ShortConvolution(config.size("conv_L_cache", 3, minimum=2), config.flag("conv_bias"))
    return replace(base, qk_norm="head", short_convolution=convolution)


def _read_mixers(config: ConfigReader, types: list[str], num_layers: int) -> list[str]:
    """The mixer of each layer."""
    if len(types) != num_layers or set(types) - {_CONVOLUTION, _ATTENTION}:
        raise config.wrong("layer_types", types, f"{num_layers} of {_CONVOLUTION!r} and {_ATTENTION!r}")
    return ["convolution" if kind == _CONVOLUTION else "attention" for kind in types]


def _types(config: ConfigReader, num_layers: int) -> list[str]:
    attend = config.value("full_attn_idxs", list(range(num_layers)))
    if not isinstance(attend, list) or not all(type(layer) is int for layer in attend):
        raise config.wrong("full_attn_idxs", attend, "a list of the numbers of layers")
    return [_ATTENTION if layer in attend else _CONVOLUTION for layer in range(num_layers)]


def _mlp_size(config: ConfigReader) -> int:
    size = config.size("block_ff_dim", config.size("intermediate_size"))
    factor, multiple = config.optional_number("block_ffn_dim_multiplier"), config.size("block_multiple_of", 256)
    if not config.flag("block_auto_adjust_ff_dim", True):
        return size
    size = int(2 * size / 3)
    return size if factor is None else multiple * -(-int(factor * size) // multiple)


def names(arch: Arch) -> Names:
    return in_runs(arch.runs, lambda kind: llama.norms_last(_mixer_names(arch, kind) | _mlp_names(kind)))


def _mixer_names(arch: Arch, kind: LayerKind) -> Names:
    """The names of a layer, except for its MLP."""
    layer, ours = "model.layers.{}.", "decoder.layers.attention."
    if kind.mixer == "convolution":
        size = arch.hidden_size
        of_mixer = {
            ours + "weight": layer + "conv.conv.weight",
            ours + "bias": layer + "conv.conv.bias",
            **concatenated(layer + "conv.in_proj", {ours + part: size for part in ("in_gate", "out_gate", "value")}),
            ours + "o": layer + "conv.out_proj",
        }
    else:
        of_mixer = {ours + name: f"{layer}self_attn.{name}_proj" for name in "qkv"}
        of_mixer |= {ours + "o": layer + "self_attn.out_proj"}
        of_mixer |= {f"{ours}{name}_norm": f"{layer}self_attn.{name}_layernorm" for name in "qk"}
    return {
        "decoder.embed": "model.embed_tokens",
        "decoder.layers.attention_norm": layer + "operator_norm",
        **of_mixer,
        "decoder.layers.mlp_norm": layer + "ffn_norm",
        "decoder.norm": "model.embedding_norm",
    }


def arch_moe(config: ConfigReader) -> Arch:
    config.refuse("tie_embedding", True)
    config.skip("output_router_logits")
    base = _hybrid_arch(config)
    types, dense = config.names("layer_types") or [], config.size("num_dense_layers", 2, minimum=0)
    mixers = _read_mixers(config, types, base.num_layers)
    kinds = tuple(LayerKind(mixer, layer >= dense) for layer, mixer in enumerate(mixers))
    return replace(base, experts=_experts(config), kinds=kinds)


def _experts(config: ConfigReader) -> Experts:
    return Experts(
        count=config.size("num_experts"),
        top_k=config.size("num_experts_per_tok"),
        size=config.size("moe_intermediate_size"),
        renormalized=config.flag("norm_topk_prob", True),
        scores="sigmoid",
        weight_floor=1e-6,
        scale=config.number("routed_scaling_factor", 1.0),
        correction_bias=config.flag("use_expert_bias", True),
    )


def _mlp_names(kind: LayerKind) -> Names:
    ours, theirs = "decoder.layers.mlp.", "model.layers.{}.feed_forward."
    matrices = {"gate": "w1", "up": "w3", "down": "w2"}
    if not kind.experts:
        return {ours + name: theirs + place for name, place in matrices.items()}
    return {
        ours + "correction_bias": theirs + "expert_bias",
        **{ours + name: f"{theirs}experts.{{}}.{place}.weight" for name, place in matrices.items()},
        ours + "router": theirs + "gate",
    }


FAMILIES = (
    Family("lfm2", "Lfm2", arch, names, in_transformers=False),
    Family("lfm2_moe", "Lfm2Moe", arch_moe, names, in_transformers=False),
)
