"""glm: llama with half of each head's channels rotated, interleaved, and gate and up in one tensor."""

from __future__ import annotations

from dataclasses import replace

from trl_jax.hub.config_reader import ConfigReader, read_rotary_dim
from trl_jax.hub.families import Family, llama, phi3
from trl_jax.hub.tensor_map import Names
from trl_jax.models.arch import Arch


def arch(config: ConfigReader) -> Arch:
    base = llama.arch(config, partial=True)
    rotary_dim = read_rotary_dim(config, base.head_dim, 0.5)
    return replace(base, rotary_dim=rotary_dim, rope_interleaved=True, o_bias=False, mlp_bias=False)


def names(arch: Arch) -> Names:
    return llama.names(arch) | phi3.gate_up(arch)


FAMILY = Family("glm", "Glm", arch, names)
