"""qwen3_5_moe: qwen3_5_moe_text beside a tower for images, which is carried along unused."""

from __future__ import annotations

from trl_jax.hub.checkpoint.tensor_map import Names
from trl_jax.hub.config.reader import ConfigReader
from trl_jax.hub.families import Family, qwen3_5, qwen3_5_moe_text
from trl_jax.models.arch import Arch


def arch(config: ConfigReader) -> Arch:
    return qwen3_5.arch_of_text(config, qwen3_5_moe_text.FAMILY)


def names(arch: Arch) -> Names:
    return qwen3_5.with_prefix(qwen3_5.PREFIX, qwen3_5_moe_text.names(arch))


FAMILY = Family("qwen3_5_moe", "Qwen3_5Moe", arch, names, in_transformers=False, **qwen3_5.BESIDE_A_TOWER)
