"""Command R and its successors.

cohere: parallel attention and MLP on one layer norm without bias, and interleaved rotary channels.
cohere2: cohere with a window in three of four layers; the others have no positions.
"""

from __future__ import annotations

from dataclasses import replace

from trl_jax.hub.config_reader import FULL, SLIDING, ConfigReader, read_layer_types, read_window, windows_of
from trl_jax.hub.families import Family, llama
from trl_jax.models.arch import Arch


def arch(config: ConfigReader) -> Arch:
    scale = config.optional_number("logit_scale")
    return replace(
        llama.arch(config),
        block="parallel",
        norm="layer_unbiased",
        norm_eps=config.number("layer_norm_eps", 1e-5),
        rope_interleaved=True,
        mlp_bias=False,
        qk_norm="each_head" if config.flag("use_qk_norm") else None,
        qk_norm_kind="layer_unbiased",
        logit_scale=1.0 if scale is None else scale,
    )


# Keys of early checkpoints that transformers does not read; it computes as if they had these values.
_FIXED = {
    "order_of_interleaved_layers": "local_attn_first", "position_embedding_type": "rope_gptj", "rotary_pct": 1.0,
    "use_embedding_sharing": True, "use_gated_activation": True, "use_parallel_block": True,
    "use_parallel_embedding": False,
}  # fmt: skip


def arch_v2(config: ConfigReader) -> Arch:
    config.fix(_FIXED)
    base, pattern = arch(config), config.size("sliding_window_pattern", 4)
    config.refuse("layer_switch", pattern)
    types = read_layer_types(config, [SLIDING if (i + 1) % pattern else FULL for i in range(base.num_layers)])
    windows = windows_of(types, read_window(config))
    ropes = tuple(None if window is None else base.ropes[0] for window in windows)
    return replace(base, windows=windows, ropes=ropes)


FAMILIES = (
    Family("cohere", "Cohere", arch, llama.names, in_transformers=False),
    Family("cohere2", "Cohere2", arch_v2, llama.names, in_transformers=False),
)
