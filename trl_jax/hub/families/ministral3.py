"""ministral3: mistral with queries scaled by their position."""

from __future__ import annotations

from dataclasses import replace

from trl_jax.hub.config_reader import ConfigReader
from trl_jax.hub.families import Family, llama, mistral
from trl_jax.models.arch import Arch, QueryGrowth

_DEFAULT = {
    "type": "yarn", "rope_theta": 1_000_000.0, "factor": 16.0, "original_max_position_embeddings": 16384,
    "beta_fast": 32.0, "beta_slow": 1.0, "mscale_all_dim": 1.0, "mscale": 1.0, "llama_4_scaling_beta": 0.1,
}  # fmt: skip


def arch(config: ConfigReader) -> Arch:
    if not config.section("rope_parameters") and not config.section("rope_scaling"):
        config = config.with_values(rope_parameters=_DEFAULT)
    base = mistral.arch(config, extra_keys=frozenset({"llama_4_scaling_beta", "max_position_embeddings"}))
    rope = ConfigReader(config.section("rope_parameters"), f"{config.source}: rope_parameters")
    original = rope.size("original_max_position_embeddings")
    return replace(base, query_growth=QueryGrowth(rope.number("llama_4_scaling_beta"), original))


FAMILY = Family("ministral3", "Ministral3", arch, llama.names)
