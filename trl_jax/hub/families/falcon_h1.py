"""falcon_h1: Falcon-H1: parallel attention and Mamba-2 in each layer, with multipliers on their outputs."""

from __future__ import annotations

from dataclasses import replace

from trl_jax.hub.config_reader import ConfigReader
from trl_jax.hub.families import Family, granite, llama
from trl_jax.hub.tensor_map import Names
from trl_jax.models.arch import Arch, LayerKind, MixerScales, StateSpace

# Keys of early checkpoints that transformers does not read; it computes as if they had these values.
_FIXED = {"attn_layer_indices": None, "mamba_use_mlp": True}
_UNREAD = (
    "layers_block_type", "layer_types", "mlp_expansion_factor", "num_logits_to_keep", "time_step_floor",
    "time_step_max", "time_step_min", "time_step_rank",
)  # fmt: skip


def arch(config: ConfigReader) -> Arch:
    config.fix(_FIXED)
    config.skip(*_UNREAD)
    base = llama.arch(config)
    scale = base.head_dim**-0.5 * _scale(config, "key_multiplier")
    named = ("attention_in_multiplier", "attention_out_multiplier", "ssm_in_multiplier", "ssm_out_multiplier")
    return replace(
        base,
        attention_scales=(scale,) * base.num_layers,
        embedding_scale=_scale(config, "embedding_multiplier"),
        logit_scale=_scale(config, "lm_head_multiplier"),
        mlp_scales=_scales(config, "mlp_multipliers", 2),
        mixer_scales=MixerScales(*(_scale(config, name) for name in named)),
        state_space=_state_space(config, base.hidden_size),
        kinds=(LayerKind("attention+mamba"),) * base.num_layers,
    )


def _state_space(config: ConfigReader, hidden: int) -> StateSpace:
    expand, ssm_size = config.size("mamba_expand"), config.value("mamba_d_ssm")
    inner = expand * hidden if ssm_size is None or config.is_null("mamba_d_ssm") else config.size("mamba_d_ssm")
    normed, before = config.flag("mamba_rms_norm"), config.flag("mamba_norm_before_gate", True)
    return replace(
        granite.read_state_space(config, inner),
        out_bias=config.flag("projectors_bias"),
        norm=("before_gate" if before else "after_gate") if normed else None,
        scales=_scales(config, "ssm_multipliers", 5),
    )


def _scale(config: ConfigReader, key: str) -> float:
    return config.number(key, 1.0, minimum=-1e30)


def _scales(config: ConfigReader, key: str, count: int) -> tuple[float, ...]:
    if config.value(key) is None:
        return (1.0,) * count
    scales = config.numbers(key)
    if len(scales) != count:
        raise config.wrong(key, list(scales), f"{count} numbers")
    return scales


def names(arch: Arch) -> Names:
    """The MLP's parameters come first, then Mamba's."""
    layer, ours = "model.layers.{}.", "decoder.layers."
    attention, mlp = ours + "attention.attention.", ours + "mlp."
    return {
        "decoder.embed": "model.embed_tokens",
        **{mlp + name: f"{layer}feed_forward.{name}_proj" for name in ("gate", "up", "down")},
        **granite.mamba_names(arch, layer + "mamba.", ours + "attention.mamba."),
        **{attention + name: f"{layer}self_attn.{name}_proj" for name in "qkvo"},
        ours + "attention_norm": layer + "input_layernorm",
        ours + "mlp_norm": layer + "pre_ff_layernorm",
        "decoder.norm": "model.final_layernorm",
    }


FAMILY = Family("falcon_h1", "FalconH1", arch, names, in_transformers=False)
