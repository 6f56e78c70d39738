"""llama: Llama 1 to 3, SmolLM, TinyLlama, Vicuna and most that copied them."""

from __future__ import annotations

from trl_jax.hub.config import ConfigReader
from trl_jax.hub.families import Family
from trl_jax.hub.rope import read_rope
from trl_jax.hub.wires import HEAD, Wire
from trl_jax.models.arch import Arch
from trl_jax.nn.mlp import ACTIVATIONS


def arch(config: ConfigReader) -> Arch:
    hidden, layers = config.size("hidden_size"), config.size("num_hidden_layers", most=4096)
    heads, key_heads, head_dim = read_heads(config, hidden)
    bias = config.flag("attention_bias")
    for key in ("rope_interleaved", "use_mrope"):  # written into some configs, always false
        if config.flag(key):
            raise config.wrong(key, True, "false")
    return Arch(
        vocab_size=config.size("vocab_size"),
        hidden_size=hidden,
        mlp_size=config.size("intermediate_size"),
        num_layers=layers,
        num_heads=heads,
        num_key_heads=key_heads,
        head_dim=head_dim,
        norm_eps=config.number("rms_norm_eps", 1e-6),
        rope=read_rope(config),
        windows=(None,) * layers,
        activation=config.one_of("hidden_act", ACTIVATIONS, "silu"),
        qkv_bias=bias,
        o_bias=bias,
        mlp_bias=config.flag("mlp_bias"),
        attention_dropout=config.number("attention_dropout", 0.0, most=0.99),
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
    """The pad token that the checkpoint names; one that a script sets later trains like any other."""
    if config.value("pad_token_id") is None:
        return None
    size = config.size("vocab_size")
    return config.size("pad_token_id", least=-size, most=size - 1) % size


def table(arch: Arch) -> list[Wire]:
    layer = {
        "attention_norm": "input_layernorm",
        "attention.q": "self_attn.q_proj",
        "attention.k": "self_attn.k_proj",
        "attention.v": "self_attn.v_proj",
        "attention.o": "self_attn.o_proj",
        "mlp_norm": "post_attention_layernorm",
        "mlp.gate": "mlp.gate_proj",
        "mlp.up": "mlp.up_proj",
        "mlp.down": "mlp.down_proj",
    }
    if arch.qk_norm:
        layer |= {"attention.q_norm": "self_attn.q_norm", "attention.k_norm": "self_attn.k_norm"}
    biased = dict.fromkeys(("attention.q", "attention.k", "attention.v"), arch.qkv_bias)
    biased |= dict.fromkeys(("mlp.gate", "mlp.up", "mlp.down"), arch.mlp_bias) | {"attention.o": arch.o_bias}

    wires = [Wire("decoder.embed.weight", "model.embed_tokens.weight")]
    for ours, theirs in layer.items():
        wires.append(Wire(f"decoder.layers.{ours}.weight", f"model.layers.{{}}.{theirs}.weight"))
        if biased.get(ours):
            wires.append(Wire(f"decoder.layers.{ours}.bias", f"model.layers.{{}}.{theirs}.bias"))
    return [*wires, Wire("decoder.norm.weight", "model.norm.weight"), Wire("score.weight", HEAD)]


FAMILY = Family("llama", "LlamaForSequenceClassification", arch, table)
