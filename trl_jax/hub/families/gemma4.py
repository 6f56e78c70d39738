"""gemma4_text: gemma3_text with other head sizes in full attention, layers that share keys and values, and per-layer
embeddings."""

from __future__ import annotations

from dataclasses import replace

from trl_jax.hub.config_reader import FULL, SLIDING, ConfigReader, read_layer_types, read_ropes, read_window, windows_of
from trl_jax.hub.families import Family, gemma, llama
from trl_jax.hub.tensor_map import ExpertRows, Names, in_runs, ordered
from trl_jax.models.arch import Arch, Experts, Heads, LayerEmbedding, LayerKind
from trl_jax.nn.layers import ACTIVATIONS

_ROPES = {
    SLIDING: {"rope_type": "default", "rope_theta": 1e4},
    FULL: {"rope_type": "proportional", "partial_rotary_factor": 0.25, "rope_theta": 1e6},
}
# Checkpoints also have these for layers that reuse keys and values; transformers drops them.
_UNUSED = r"\.self_attn\.(k_proj|v_proj|k_norm|v_norm)\."


def arch(config: ConfigReader) -> Arch:
    config.refuse("use_bidirectional_attention", None, "vision")  # "vision": only between the tokens of an image
    base = llama.arch(config.with_values(rope_parameters=None, hidden_act=None))
    types = _types(config, base.num_layers)
    heads = _heads(config, base, types)
    base = replace(base, num_key_heads=heads[SLIDING].count, head_dim=heads[SLIDING].channels)
    ropes = read_ropes(
        config.with_values(rope_parameters=_ROPES | config.section("rope_parameters"), rope_theta=None),
        types, local_theta=1e4, channels={kind: head.channels for kind, head in heads.items()},
    )  # fmt: skip
    return replace(
        base,
        block="sandwich",
        norm="rms_float32",
        qk_norm="head",
        qk_norm_kind="rms_float32",
        v_norm=True,
        activation=config.one_of("hidden_activation", ACTIVATIONS, "gelu_pytorch_tanh"),
        mlp_bias=False,
        embedding_scale=base.hidden_size**0.5,
        scale_in_table=True,
        attention_scales=(1.0,) * base.num_layers,
        logit_softcap=config.optional_number("final_logit_softcapping"),
        ropes=ropes,
        rotary_dim=max(head.channels for head in heads.values()),
        windows=windows_of(types, read_window(config)),
        layer_embedding=_layer_embedding(config),
        layer_scalar=True,
        experts=_experts(config),
        kinds=_kinds(config, base, types, heads),
    )


def _types(config: ConfigReader, num_layers: int) -> list[str]:
    """The attention type of each layer; the last layer always has full attention."""
    types = read_layer_types(config, [FULL if (layer + 1) % 6 == 0 else SLIDING for layer in range(num_layers)])
    return [*types[:-1], FULL]


def _heads(config: ConfigReader, base: Arch, types: list[str]) -> dict[str, Heads]:
    """The heads of each type of layer."""
    equal = config.flag("attention_k_eq_v")
    sizes = {SLIDING: (base.num_key_heads, base.head_dim), FULL: (base.num_key_heads, base.head_dim)}
    wide, fewer = config.size("global_head_dim", 512), config.value("num_global_key_value_heads")
    if "per_layer_config" in config.raw:
        sizes |= _by_layer(config, base, types)
    else:
        sizes[FULL] = (fewer if equal and fewer is not None else base.num_key_heads, wide)
    for count, channels in sizes.values():
        if base.num_heads % count or channels % 2:
            raise config.wrong("num_attention_heads", base.num_heads, f"a multiple of {count}, of an even head_dim")
    return {kind: Heads(*sizes[kind], values_are_keys=equal and kind == FULL) for kind in sizes}


def _by_layer(config: ConfigReader, base: Arch, types: list[str]) -> dict[str, tuple[int, int]]:
    """Key heads and channels of each type of layer, which all layers of the type must have."""
    sizes, section = {}, config.section("per_layer_config")
    layers = ConfigReader(section, f"{config.source}: per_layer_config")
    for layer, kind in enumerate(types):
        reader = ConfigReader(layers.section(str(layer)), f"{layers.source}.{layer}")
        size = reader.size("num_key_value_heads", base.num_key_heads), reader.size("head_dim", base.head_dim)
        reader.finish()
        if sizes.setdefault(kind, size) != size:
            raise config.wrong("per_layer_config", section, f"the same for all layers of {kind}")
    return sizes


def _layer_embedding(config: ConfigReader) -> LayerEmbedding | None:
    channels = config.size("hidden_size_per_layer_input", 0, minimum=0)
    rows = config.size("vocab_size_per_layer_input", minimum=config.size("vocab_size") if channels else 1)
    return LayerEmbedding(rows, channels) if channels else None


def _experts(config: ConfigReader) -> Experts | None:
    names = ("num_experts", "top_k_experts", "moe_intermediate_size")
    if not config.flag("enable_moe_block"):
        config.skip(*names)
        return None
    count, top_k, size = (config.size(key) for key in names)
    return Experts(count, top_k, size, renormalized=True, beside_mlp=True)


def _kinds(config: ConfigReader, base: Arch, types: list[str], heads: dict[str, Heads]) -> tuple[LayerKind, ...]:
    shared = config.size("num_kv_shared_layers", 0, minimum=0, maximum=base.num_layers - 1)
    makers, wide = types[: base.num_layers - shared], 2 if config.flag("use_double_wide_mlp") else 1
    if set(types) - set(makers):
        raise config.wrong("num_kv_shared_layers", shared, "a layer of each type in layer_types before those")
    last = {kind: len(makers) - 1 - makers[::-1].index(kind) for kind in set(makers)} if shared else {}
    of_type = {kind: LayerKind(experts=config.flag("enable_moe_block"), heads=heads[kind]) for kind in heads}
    of_type[SLIDING] = replace(of_type[SLIDING], heads=None)
    first = [replace(of_type[kind], reused=last.get(kind) == layer) for layer, kind in enumerate(makers)]
    reusing = {"mlp_size": wide * base.mlp_size, "reuses": True}
    return (*first, *(replace(of_type[kind], **reusing) for kind in types[len(makers) :]))


def names(arch: Arch) -> Names:
    parameters = gemma.names_v2(arch) | _of_layer_embeddings()
    parameters |= {} if arch.experts is None else _of_experts(arch.experts.size)
    norms = ("decoder.layers.attention.q_norm", "decoder.layers.attention.k_norm")
    return in_runs(arch.runs, lambda kind: ordered(parameters, *norms, before="decoder.layers.attention.k"))


def _of_layer_embeddings() -> Names:
    layer, whole = "model.layers.{}.", "model.per_layer_"
    return {
        "decoder.layers.layer_input.gate": layer + "per_layer_input_gate",
        "decoder.layers.layer_input.projection": layer + "per_layer_projection",
        "decoder.layers.layer_input.norm": layer + "post_per_layer_input_norm",
        "decoder.layers.layer_scalar": layer + "layer_scalar",
        "decoder.layer_embed.table": "model.embed_tokens_per_layer",
        "decoder.layer_embed.projection": whole + "model_projection",
        "decoder.layer_embed.norm": whole + "projection_norm",
    }


def _of_experts(size: int) -> Names:
    ours, layer = "decoder.layers.beside.", "model.layers.{}."
    return {
        ours + "moe.router": layer + "router.proj",
        ours + "moe.router_scale": layer + "router.scale",
        ours + "moe.expert_scale": layer + "router.per_expert_scale",
        ours + "moe.gate": (layer + "experts.gate_up_proj", ExpertRows(0, size, 2 * size)),
        ours + "moe.up": (layer + "experts.gate_up_proj", ExpertRows(size, size, 2 * size)),
        ours + "moe.down": layer + "experts.down_proj",
        ours + "mlp_norm": layer + "post_feedforward_layernorm_1",
        ours + "out_norm": layer + "post_feedforward_layernorm_2",
        ours + "norm": layer + "pre_feedforward_layernorm_2",
    }


FAMILY = Family(
    "gemma4_text",
    "Gemma4Text",
    arch,
    names,
    ignored=(*Family.ignored, _UNUSED),
    linear_router=True,
    in_transformers=False,
)
