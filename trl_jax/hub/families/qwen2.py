"""qwen2: llama with biases on q, k and v, and a sliding window on some layers."""

from __future__ import annotations

from dataclasses import replace

from trl_jax.hub.config import ConfigReader
from trl_jax.hub.families import Family, llama
from trl_jax.models.arch import Arch


def read_windows(config: ConfigReader, num_layers: int) -> tuple[int | None, ...]:
    """A window for each layer: `layer_types` says where, or `max_window_layers` from where on."""
    switched_off = "sliding_window" in config.raw and config.value("sliding_window") is None  # null means no window
    used = config.flag("use_sliding_window") and not switched_off
    window = config.size("sliding_window", 4096)
    first = config.size("max_window_layers", 28, least=0)
    types = config.names("layer_types")
    if types is None:
        types = ["sliding_attention" if used and i >= first else "full_attention" for i in range(num_layers)]
    if len(types) != num_layers or set(types) - {"full_attention", "sliding_attention"}:
        raise ValueError(
            f"{config.source}: layer_types has {len(types)} entries of {sorted(set(types))}, wanted {num_layers} of "
            "full_attention or sliding_attention."
        )
    if "sliding_attention" in types and not used:
        raise ValueError(
            f"{config.source}: layer_types names sliding_attention but use_sliding_window is false or sliding_window "
            "null. Make them agree."
        )
    return tuple(window if kind == "sliding_attention" else None for kind in types)


def arch(config: ConfigReader) -> Arch:
    config.size("num_key_value_heads")  # unlike llama's, it does not default to num_attention_heads
    base = llama.arch(config)
    return replace(
        base, qkv_bias=True, o_bias=False, mlp_bias=False, windows=read_windows(config, base.num_layers)
    )


FAMILY = Family("qwen2", "Qwen2ForSequenceClassification", arch, llama.table)
