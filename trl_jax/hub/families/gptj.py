"""gptj: parallel attention and MLP on one layer norm, and interleaved rotary channels."""

from __future__ import annotations

from dataclasses import replace

from trl_jax.hub.config_reader import ConfigReader
from trl_jax.hub.families import Family, gpt2
from trl_jax.hub.tensor_map import Names
from trl_jax.models.arch import Arch
from trl_jax.nn.rope import Rope


def arch(config: ConfigReader) -> Arch:
    base = gpt2.shared(config)
    config.size("n_positions", 2048)
    for key in (*gpt2.OF_OTHER_HEADS, "scale_attn_weights", "gradient_checkpointing"):
        config.value(key)
    rotary_dim = config.size("rotary_dim", base.head_dim, maximum=base.head_dim)
    if rotary_dim % 2:
        raise config.wrong("rotary_dim", rotary_dim, "an even number: rotary positions turn pairs of channels")
    return replace(
        base,
        block="parallel",
        head_bias=True,
        rotary_dim=rotary_dim,
        rope_interleaved=True,
        ropes=(Rope(theta=10_000.0),) * base.num_layers,
    )


def names(arch: Arch) -> Names:
    layer = "transformer.h.{}."
    return {
        "decoder.embed": "transformer.wte",
        "decoder.layers.attention_norm": layer + "ln_1",
        **{f"decoder.layers.attention.{name}": f"{layer}attn.{name}_proj" for name in "kvq"},
        "decoder.layers.attention.o": layer + "attn.out_proj",
        "decoder.layers.mlp.up": layer + "mlp.fc_in",
        "decoder.layers.mlp.down": layer + "mlp.fc_out",
        "decoder.norm": "transformer.ln_f",
    }


FAMILY = Family(
    "gptj",
    "GPTJ",
    arch,
    names,
    base_prefix="transformer.",
    ignored=(r"\.attn\.(masked_)?bias$", r"^lm_head\.bias$"),
)
