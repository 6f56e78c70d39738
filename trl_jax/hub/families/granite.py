"""Granite 3 and 4.

granite: llama with multipliers on the embedding, the attention scores and the residual updates.
granitemoe: granite with experts; the matrices of a layer's experts are in two tensors.
granitemoehybrid: Granite 4: Mamba-2, attention in some layers, and a shared MLP, with or without experts.
"""

from __future__ import annotations

from dataclasses import replace

from trl_jax.hub.config_reader import FULL, LINEAR, ConfigReader
from trl_jax.hub.families import Family, llama, phi
from trl_jax.hub.tensor_map import ExpertRows, Names, concatenated, in_runs, ordered
from trl_jax.models.arch import Arch, Experts, LayerKind, StateSpace


def arch(config: ConfigReader) -> Arch:
    base = llama.arch(config)
    return replace(
        base,
        embedding_scale=config.number("embedding_multiplier", 1.0),
        residual_scale=config.number("residual_multiplier", 1.0),
        logit_scale=1 / config.number("logits_scaling", 1.0, minimum=1e-9),
        attention_scales=(config.number("attention_multiplier", 1.0),) * base.num_layers,
    )


_MOVED = (
    (".block_sparse_moe.input_linear", ".block_sparse_moe.experts"),
    (".block_sparse_moe.output_linear", ".block_sparse_moe.experts"),
    (".block_sparse_moe.router.layer", ".block_sparse_moe.router"),
)


def arch_moe(config: ConfigReader) -> Arch:
    base = arch(config)
    return replace(base, mlp_bias=False, experts=_read_experts(config, base))


def _read_experts(config: ConfigReader, base: Arch) -> Experts:
    """Experts as wide as the MLP of `base`, which they replace."""
    config.skip("output_router_logits", "router_aux_loss_coef")  # only for the language model's loss
    count, top_k = config.size("num_local_experts"), config.size("num_experts_per_tok")
    # A softmax over the logits of the selected experts equals the renormalized softmax over all of them.
    return Experts(count, top_k, size=base.mlp_size, renormalized=True)


def names_moe(arch: Arch) -> Names:
    experts = _experts_names(arch.experts)
    return ordered(llama.names(arch) | experts, *experts)


def _experts_names(experts: Experts) -> Names:
    ours, theirs, size = "decoder.layers.mlp.", "model.layers.{}.block_sparse_moe.", experts.size
    return {
        ours + "router": theirs + "router.layer",
        ours + "gate": (theirs + "input_linear.weight", ExpertRows(0, size, 2 * size)),
        ours + "up": (theirs + "input_linear.weight", ExpertRows(size, size, 2 * size)),
        ours + "down": theirs + "output_linear.weight",
    }


_OF_MAMBA = (
    "mamba_chunk_size", "mamba_conv_bias", "mamba_d_conv", "mamba_d_head", "mamba_d_state", "mamba_expand",
    "mamba_n_groups", "mamba_n_heads", "mamba_proj_bias", "time_step_limit",
)  # fmt: skip
_OLD_NAMES = {"mamba": LINEAR, "attention": FULL}
_OF_EXPERTS = ("num_experts_per_tok", "output_router_logits", "router_aux_loss_coef")
_OURS = "decoder.layers.attention."


def arch_hybrid(config: ConfigReader) -> Arch:
    config.skip(*_OF_MAMBA, *_OF_EXPERTS, "init_method")
    config.refuse("normalization_function", "rmsnorm")
    base, shared_size = arch(config), config.size("shared_intermediate_size")
    experts, mixers = _experts(config, base, shared_size), _mixers(config, base.num_layers)
    rotates = config.one_of("position_embedding_type", ("rope", "nope", None)) == "rope"
    return replace(
        base,
        mlp_size=shared_size,
        mlp_bias=False,
        ropes=base.ropes if rotates else (None,) * base.num_layers,
        experts=experts,
        state_space=_state_space(config, base.hidden_size) if "mamba" in mixers else None,
        kinds=tuple(LayerKind(mixer, experts is not None) for mixer in mixers),
    )


def _mixers(config: ConfigReader, num_layers: int) -> list[str]:
    types = config.names("layer_types") or config.names("layers_block_type") or [LINEAR] * num_layers
    types = [_OLD_NAMES.get(kind, kind) for kind in types]
    if len(types) != num_layers or set(types) - {LINEAR, FULL}:
        raise config.wrong("layer_types", types, f"{num_layers} of {LINEAR!r} and {FULL!r}")
    return ["mamba" if kind == LINEAR else "attention" for kind in types]


def _state_space(config: ConfigReader, hidden: int) -> StateSpace:
    return read_state_space(config, config.size("mamba_expand") * hidden)


def read_state_space(config: ConfigReader, inner: int) -> StateSpace:
    """The Mamba-2 configuration of layers with `inner` channels."""
    config.skip("mamba_chunk_size")  # does not change the results
    config.refuse("hidden_act", "silu")  # also the convolution's activation
    heads, groups = config.size("mamba_n_heads"), config.size("mamba_n_groups")
    auto = config.value("mamba_d_head") in (None, "auto")
    head_dim = inner // heads if auto else config.size("mamba_d_head")
    if heads * head_dim != inner:
        raise config.wrong("mamba_n_heads", heads, f"a number of heads of {head_dim} channels, {inner} together")
    if heads % groups:
        raise config.wrong("mamba_n_heads", heads, f"a multiple of mamba_n_groups {groups}")
    return StateSpace(
        heads,
        head_dim,
        groups,
        state_dim=config.size("mamba_d_state"),
        width=config.size("mamba_d_conv", minimum=2),
        convolution_bias=config.flag("mamba_conv_bias", True),
        bias=config.flag("mamba_proj_bias"),
        out_bias=config.flag("mamba_proj_bias"),
        dt_limits=config.limits("time_step_limit"),
    )


def _experts(config: ConfigReader, base: Arch, shared_size: int) -> Experts | None:
    if config.size("num_local_experts", minimum=0) == 0:
        return None
    return replace(_read_experts(config, base), shared_size=shared_size, shared_gated=False)


def names_hybrid(arch: Arch) -> Names:
    return in_runs(arch.runs, lambda kind: _layer_names(arch, kind))


def _layer_names(arch: Arch, kind: LayerKind) -> Names:
    """The mixer's parameters come last, after the MLP's."""
    base, layer, mlps = llama.names(arch), "decoder.layers.", "decoder.layers.mlp."
    others = {name: place for name, place in base.items() if not name.startswith((_OURS, mlps))}
    attention = {name: place for name, place in base.items() if name.startswith(_OURS)}
    mixer = mamba_names(arch, "model.layers.{}.mamba.") if kind.mixer == "mamba" else attention
    experts = {} if arch.experts is None else _experts_names(arch.experts)
    mlp = "mlp." if arch.experts is None else "mlp.shared."
    sizes = {mlp + "gate": arch.mlp_size, mlp + "up": arch.mlp_size}
    shared = phi.joined(sizes, "shared_mlp.input_linear")
    return others | experts | shared | {f"{layer}{mlp}down": "model.layers.{}.shared_mlp.output_linear"} | mixer


def mamba_names(arch: Arch, theirs: str, ours: str = _OURS) -> Names:
    """The names of the parameters of Mamba-2, whose module on disk is `theirs`."""
    ssm = arch.state_space
    inner, states = ssm.heads * ssm.head_dim, ssm.groups * ssm.state_dim
    convolved = {"x": inner, "B": states, "C": states}
    projected = {"gate": inner, **convolved, "dt": ssm.heads}
    channels = {f"{ours}{name}_convolution": size for name, size in convolved.items()}
    return {
        **concatenated(theirs + "conv1d.weight", channels),
        **concatenated(theirs + "conv1d.bias", {f"{name}_bias": size for name, size in channels.items()}),
        **concatenated(theirs + "in_proj", {ours + name: size for name, size in projected.items()}),
        **{ours + name: theirs + name for name in ("dt_bias", "A_log", "D")},
        ours + "out_norm": theirs + "norm",
        ours + "o": theirs + "out_proj",
    }


FAMILIES = (
    Family("granite", "Granite", arch, llama.names, in_transformers=False),
    Family("granitemoe", "GraniteMoe", arch_moe, names_moe, moved=_MOVED, in_transformers=False),
    Family("granitemoehybrid", "GraniteMoeHybrid", arch_hybrid, names_hybrid, moved=_MOVED, in_transformers=False),
)
