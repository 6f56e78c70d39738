"""mistral: llama without biases, with one sliding window for all layers."""

from __future__ import annotations

from dataclasses import replace

from trl_jax.hub.config_reader import ConfigReader, read_window
from trl_jax.hub.families import Family, llama
from trl_jax.models.arch import Arch


def arch(config: ConfigReader, *, extra_keys: frozenset[str] = frozenset()) -> Arch:
    # attention_bias has no effect, as in transformers.
    base = llama.arch(config, extra_keys=extra_keys)
    windows = (read_window(config),) * base.num_layers
    return replace(base, qkv_bias=False, o_bias=False, mlp_bias=False, windows=windows)


FAMILY = Family("mistral", "Mistral", arch, llama.names)
