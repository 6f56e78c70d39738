"""cohere2: cohere with a window in three of four layers; the others have no positions."""

from __future__ import annotations

from dataclasses import replace

from trl_jax.hub.config_reader import FULL, SLIDING, ConfigReader, read_layer_types, read_window, windows_of
from trl_jax.hub.families import Family, cohere, llama
from trl_jax.models.arch import Arch

# Keys of early checkpoints that transformers does not read; it computes as if they had these values.
_SAID = {
    "order_of_interleaved_layers": "local_attn_first", "position_embedding_type": "rope_gptj", "rotary_pct": 1.0,
    "use_embedding_sharing": True, "use_gated_activation": True, "use_parallel_block": True,
    "use_parallel_embedding": False,
}  # fmt: skip


def arch(config: ConfigReader) -> Arch:
    for key, value in _SAID.items():
        config.refuse(key, value)
    base, pattern = cohere.arch(config), config.size("sliding_window_pattern", 4)
    config.refuse("layer_switch", pattern)
    types = read_layer_types(config, [SLIDING if (i + 1) % pattern else FULL for i in range(base.num_layers)])
    windows = windows_of(types, read_window(config))
    ropes = tuple(None if window is None else base.ropes[0] for window in windows)
    return replace(base, windows=windows, ropes=ropes)


FAMILY = Family("cohere2", "Cohere2", arch, llama.names, in_transformers=False)
