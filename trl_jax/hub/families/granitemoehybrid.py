"""granitemoehybrid: Granite 4: Mamba-2, attention in some layers, and a shared MLP, with or without experts."""

from __future__ import annotations

from dataclasses import replace

from trl_jax.hub.config_reader import FULL, LINEAR, ConfigReader
from trl_jax.hub.families import Family, granite, granitemoe, llama, phi3
from trl_jax.hub.tensor_map import Names, concatenated, in_runs
from trl_jax.models.arch import Arch, Experts, LayerKind, StateSpace

_OF_MAMBA = (
    "mamba_chunk_size", "mamba_conv_bias", "mamba_d_conv", "mamba_d_head", "mamba_d_state", "mamba_expand",
    "mamba_n_groups", "mamba_n_heads", "mamba_proj_bias", "time_step_limit",
)  # fmt: skip
_OLD_NAMES = {"mamba": LINEAR, "attention": FULL}
_OF_EXPERTS = ("num_experts_per_tok", "output_router_logits", "router_aux_loss_coef")
OURS = "decoder.layers.attention."


def arch(config: ConfigReader) -> Arch:
    for key in (*_OF_MAMBA, *_OF_EXPERTS, "init_method"):
        config.value(key)
    config.refuse("normalization_function", "rmsnorm")
    base, shared_size = granite.arch(config), config.size("shared_intermediate_size")
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
    config.value("mamba_chunk_size")  # does not change the results
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
    return replace(granitemoe.read_experts(config, base), shared_size=shared_size, shared_gated=False)


def names(arch: Arch) -> Names:
    return in_runs(arch.runs, lambda kind: _layer_names(arch, kind))


def _layer_names(arch: Arch, kind: LayerKind) -> Names:
    """The mixer's parameters come last, after the MLP's."""
    found, layer, mlps = llama.names(arch), "decoder.layers.", "decoder.layers.mlp."
    others = {name: place for name, place in found.items() if not name.startswith((OURS, mlps))}
    attention = {name: place for name, place in found.items() if name.startswith(OURS)}
    mixer = mamba_names(arch, "model.layers.{}.mamba.") if kind.mixer == "mamba" else attention
    experts = {} if arch.experts is None else granitemoe.experts_names(arch.experts)
    mlp = "mlp." if arch.experts is None else "mlp.shared."
    sizes = {mlp + "gate": arch.mlp_size, mlp + "up": arch.mlp_size}
    shared = phi3.joined(sizes, "shared_mlp.input_linear")
    return others | experts | shared | {f"{layer}{mlp}down": "model.layers.{}.shared_mlp.output_linear"} | mixer


def mamba_names(arch: Arch, theirs: str, ours: str = OURS) -> Names:
    """The names of the parameters of Mamba-2, whose module on disk is `theirs`."""
    facts = arch.state_space
    inner, states = facts.heads * facts.head_dim, facts.groups * facts.state_dim
    convolved = {"x": inner, "B": states, "C": states}
    projected = {"gate": inner, **convolved, "dt": facts.heads}
    channels = {f"{ours}{name}_convolution": size for name, size in convolved.items()}
    return {
        **concatenated(theirs + "conv1d.weight", channels),
        **concatenated(theirs + "conv1d.bias", {f"{name}_bias": size for name, size in channels.items()}),
        **concatenated(theirs + "in_proj", {ours + name: size for name, size in projected.items()}),
        **{ours + name: theirs + name for name in ("dt_bias", "A_log", "D")},
        ours + "out_norm": theirs + "norm",
        ours + "o": theirs + "out_proj",
    }


FAMILY = Family("granitemoehybrid", "GraniteMoeHybrid", arch, names, moved=granitemoe.MOVED, in_transformers=False)
