"""phi3: llama with q, k, v in one tensor, gate and up in another, and LongRoPE."""

from __future__ import annotations

from dataclasses import replace

from trl_jax.hub.config_reader import ConfigReader, read_rotary_dim, read_window
from trl_jax.hub.families import Family, llama
from trl_jax.hub.tensor_map import Names, concatenated, ordered
from trl_jax.models.arch import Arch


def arch(config: ConfigReader) -> Arch:
    base = llama.arch(config, partial=True)
    dropout = config.number("resid_pdrop", 0.0, maximum=0.99)
    config.value("original_max_position_embeddings")  # only for longrope
    config.number("embd_pdrop", 0.0, maximum=0.99)  # no effect, as in transformers
    return replace(
        base,
        qkv_bias=False,
        o_bias=False,
        mlp_bias=False,
        rotary_dim=read_rotary_dim(config, base.head_dim, 1.0),
        windows=(read_window(config),) * base.num_layers,
        attention_out_dropout=dropout,
        mlp_out_dropout=dropout,
    )


def names(arch: Arch) -> Names:
    queries, keys = arch.num_heads * arch.head_dim, arch.num_key_heads * arch.head_dim
    qkv = {"attention.q": queries, "attention.k": keys, "attention.v": keys}
    names = llama.names(arch) | joined(qkv, "self_attn.qkv_proj") | gate_up(arch)
    return ordered(names, "decoder.layers.attention.o", before="decoder.layers.attention.q")


def gate_up(arch: Arch) -> Names:
    return joined({"mlp.gate": arch.mlp_size, "mlp.up": arch.mlp_size}, "mlp.gate_up_proj")


def joined(sizes: dict[str, int], module: str) -> Names:
    ours = {f"decoder.layers.{name}": size for name, size in sizes.items()}
    return concatenated("model.layers.{}." + module, ours)


FAMILY = Family("phi3", "Phi3", arch, names)
