"""Llama, and the models that differ from it in a few fields only.

llama: Llama 1 to 3, SmolLM, TinyLlama, Vicuna and most that copied them.
arcee: llama without a gate in its MLP.
helium: llama with interleaved rotary channels and norms that scale in float32.
seed_oss: llama with a separate flag for the bias on o, and dropout after attention and MLP.
smollm3: llama without positions in every fourth layer.
stablelm: llama with layer norms and a quarter of each head's channels rotated.
"""

from __future__ import annotations

from dataclasses import replace

from trl_jax.hub.config_reader import (
    FULL,
    SLIDING,
    ConfigReader,
    read_layer_types,
    read_rope,
    read_rotary_dim,
    read_window,
    windows_of,
)
from trl_jax.hub.families import Family
from trl_jax.hub.tensor_map import Names, ordered
from trl_jax.models.arch import Arch
from trl_jax.nn.layers import ACTIVATIONS


def arch(config: ConfigReader, *, partial: bool = False, extra_keys: frozenset[str] = frozenset()) -> Arch:
    """The architecture of most decoders; a family replaces what differs. `partial`, `extra_keys`: see `read_rope`."""
    hidden, layers = config.size("hidden_size"), config.size("num_hidden_layers", maximum=4096)
    heads, key_heads, head_dim = read_heads(config, hidden)
    bias = config.flag("attention_bias")
    for key in ("rope_interleaved", "use_mrope"):  # in some configs, always false
        config.refuse(key, False)
    return Arch(
        vocab_size=config.size("vocab_size"),
        hidden_size=hidden,
        mlp_size=config.size("intermediate_size"),
        num_layers=layers,
        num_heads=heads,
        num_key_heads=key_heads,
        head_dim=head_dim,
        norm_eps=config.number("rms_norm_eps", 1e-6),
        ropes=(read_rope(config, partial=partial, extra_keys=extra_keys),) * layers,
        rotary_dim=head_dim,
        windows=(None,) * layers,
        activation=config.one_of("hidden_act", ACTIVATIONS, "silu"),
        qkv_bias=bias,
        o_bias=bias,
        mlp_bias=config.flag("mlp_bias"),
        attention_dropout=config.dropout("attention_dropout"),
        initializer_range=config.number("initializer_range", 0.02),
        tied_embeddings=config.flag("tie_word_embeddings"),
        padding_idx=read_padding_idx(config),
    )


def read_heads(config: ConfigReader, hidden: int) -> tuple[int, int, int]:
    """Query heads, key heads, channels of one head."""
    heads = config.size("num_attention_heads")
    if hidden % heads and config.value("head_dim") is None:
        raise config.wrong("hidden_size", hidden, f"a multiple of num_attention_heads {heads}")
    key_heads = config.size("num_key_value_heads", heads)
    if heads % key_heads:
        raise config.wrong("num_attention_heads", heads, f"a multiple of num_key_value_heads {key_heads}")
    head_dim = config.size("head_dim", hidden // heads)
    if head_dim % 2:
        raise config.wrong("head_dim", head_dim, "an even number: rotary positions turn pairs of channels")
    return heads, key_heads, head_dim


def read_padding_idx(config: ConfigReader) -> int | None:
    """The checkpoint's pad token, whose embedding is not trained. If user code sets the pad token later, it is
    trained."""
    if config.value("pad_token_id") is None:
        return None
    size = config.size("vocab_size")
    return config.size("pad_token_id", minimum=-size, maximum=size - 1) % size


def names(arch: Arch) -> Names:
    layer = "model.layers.{}."
    return {
        "decoder.embed": "model.embed_tokens",
        "decoder.layers.attention.q": layer + "self_attn.q_proj",
        "decoder.layers.attention.k": layer + "self_attn.k_proj",
        "decoder.layers.attention.v": layer + "self_attn.v_proj",
        "decoder.layers.attention.o": layer + "self_attn.o_proj",
        "decoder.layers.attention.q_norm": layer + "self_attn.q_norm",
        "decoder.layers.attention.k_norm": layer + "self_attn.k_norm",
        "decoder.layers.mlp.gate": layer + "mlp.gate_proj",
        "decoder.layers.mlp.up": layer + "mlp.up_proj",
        "decoder.layers.mlp.down": layer + "mlp.down_proj",
        "decoder.layers.attention_norm": layer + "input_layernorm",
        "decoder.layers.mlp_norm": layer + "post_attention_layernorm",
        "decoder.norm": "model.norm",
    }


def norms_last(names: Names) -> Names:
    """The same names, with a layer's norms after its attention and MLP."""
    return ordered(names, "decoder.layers.attention_norm", "decoder.layers.mlp_norm")


def arch_arcee(config: ConfigReader) -> Arch:
    return replace(arch(config), gated=False)


def arch_helium(config: ConfigReader) -> Arch:
    return replace(arch(config), rope_interleaved=True, norm="rms_float32", o_bias=False)


def arch_seed_oss(config: ConfigReader) -> Arch:
    dropout = config.dropout("residual_dropout")
    return replace(
        arch(config),
        o_bias=config.flag("attention_out_bias"),
        attention_out_dropout=dropout,
        mlp_out_dropout=dropout,
    )


def arch_smollm3(config: ConfigReader) -> Arch:
    base = arch(config)
    interval = config.size("no_rope_layer_interval", 4)
    turns = config.value("no_rope_layers")
    if turns is None:
        turns = [int((layer + 1) % interval != 0) for layer in range(base.num_layers)]
    if not isinstance(turns, list) or len(turns) != base.num_layers or set(turns) - {0, 1}:
        raise config.wrong("no_rope_layers", turns, f"{base.num_layers} entries, 1 for a layer with positions, else 0")
    window = read_window(config)
    window = window if config.flag("use_sliding_window") else None
    types = read_layer_types(config, [SLIDING if window and not turn else FULL for turn in turns])
    return replace(
        base,
        ropes=tuple(rope if turn else None for rope, turn in zip(base.ropes, turns, strict=True)),
        windows=windows_of(types, window),
    )


def arch_stablelm(config: ConfigReader) -> Arch:
    base = arch(config, partial=True)
    config.refuse("qk_layernorm", False)
    return replace(
        base,
        block="parallel" if config.flag("use_parallel_residual") else "pre",
        norm="layer",
        norm_eps=config.number("layer_norm_eps", 1e-5),
        rotary_dim=read_rotary_dim(config, base.head_dim, 0.25),
        qkv_bias=config.flag("use_qkv_bias"),
        o_bias=False,
        mlp_bias=False,
        mlp_out_dropout=config.dropout("hidden_dropout"),
    )


FAMILIES = (
    Family("llama", "Llama", arch, names),
    Family("arcee", "Arcee", arch_arcee, names),
    Family("helium", "Helium", arch_helium, names),
    Family("seed_oss", "SeedOss", arch_seed_oss, names),
    Family("smollm3", "SmolLM3", arch_smollm3, names),
    Family("stablelm", "StableLm", arch_stablelm, names),
)
