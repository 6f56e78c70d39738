"""GPT-2 and GPT-J.

gpt2: learned positions, layer norms, a plain MLP, weights on disk as (in, out).
gptj: parallel attention and MLP on one layer norm, and interleaved rotary channels.
"""

from __future__ import annotations

from dataclasses import replace

from trl_jax.hub.config_reader import ConfigReader
from trl_jax.hub.families import Family
from trl_jax.hub.tensor_map import Names, concatenated
from trl_jax.models.arch import Arch
from trl_jax.nn.layers import ACTIVATIONS
from trl_jax.nn.rope import Rope

# Keys for other heads or for older code
_OF_OTHER_HEADS = """
    summary_type summary_use_proj summary_activation summary_proj_to_labels summary_first_dropout n_ctx
""".split()


def arch(config: ConfigReader) -> Arch:
    base = _shared(config)
    config.skip(
        *_OF_OTHER_HEADS, "reorder_and_upcast_attn", "classifier_dropout"
    )  # reorder_and_upcast_attn only affects rounding in float16
    scale = base.head_dim**-0.5 if config.flag("scale_attn_weights", True) else 1.0
    by_layer = config.flag("scale_attn_by_inverse_layer_idx")
    return replace(
        base,
        qkv_bias=True,
        o_bias=True,
        learned_positions=config.size("n_positions", 1024),
        attention_scales=tuple(scale / (i + 1 if by_layer else 1) for i in range(base.num_layers)),
    )


def _shared(config: ConfigReader) -> Arch:
    """The part of the architecture that gptj shares."""
    hidden, layers, heads = config.size("n_embd"), config.size("n_layer", maximum=4096), config.size("n_head")
    if hidden % heads:
        raise config.wrong("n_embd", hidden, f"a multiple of n_head {heads}")
    dropout = config.dropout("resid_pdrop")
    return Arch(
        vocab_size=config.size("vocab_size"),
        hidden_size=hidden,
        mlp_size=config.size("n_inner", 4 * hidden),
        num_layers=layers,
        num_heads=heads,
        num_key_heads=heads,
        head_dim=hidden // heads,
        norm_eps=config.number("layer_norm_epsilon", 1e-5),
        ropes=(None,) * layers,
        rotary_dim=0,
        windows=(None,) * layers,
        norm="layer",
        activation=config.one_of("activation_function", ACTIVATIONS, "gelu_new"),
        gated=False,
        mlp_bias=True,
        attention_dropout=config.dropout("attn_pdrop"),
        embedding_dropout=config.dropout("embd_pdrop"),
        attention_out_dropout=dropout,
        mlp_out_dropout=dropout,
        initializer_range=config.number("initializer_range", 0.02),
        tied_embeddings=config.flag("tie_word_embeddings", True),
    )


def names(arch: Arch) -> Names:
    layer, hidden = "transformer.h.{}.", arch.hidden_size
    qkv = {f"decoder.layers.attention.{name}": hidden for name in "qkv"}
    return {
        "decoder.embed": "transformer.wte",
        "decoder.position_embed": "transformer.wpe",
        "decoder.layers.attention_norm": layer + "ln_1",
        **concatenated(layer + "attn.c_attn", qkv, transposed=True),
        **concatenated(layer + "attn.c_proj", {"decoder.layers.attention.o": hidden}, transposed=True),
        "decoder.layers.mlp_norm": layer + "ln_2",
        **concatenated(layer + "mlp.c_fc", {"decoder.layers.mlp.up": arch.mlp_size}, transposed=True),
        **concatenated(layer + "mlp.c_proj", {"decoder.layers.mlp.down": hidden}, transposed=True),
        "decoder.norm": "transformer.ln_f",
    }


def arch_j(config: ConfigReader) -> Arch:
    base = _shared(config)
    config.size("n_positions", 2048)
    config.skip(*_OF_OTHER_HEADS, "scale_attn_weights", "gradient_checkpointing")
    rotary_dim = config.size("rotary_dim", base.head_dim, maximum=base.head_dim)
    if rotary_dim % 2:
        raise config.wrong("rotary_dim", rotary_dim, "an even number: rotary positions turn pairs of channels")
    return replace(
        base,
        block="parallel",
        head_bias=True,
        rotary_dim=rotary_dim,
        rope_interleaved=True,
        ropes=(Rope(theta=10_000.0),) * base.num_layers,
    )


def names_j(arch: Arch) -> Names:
    layer = "transformer.h.{}."
    return {
        "decoder.embed": "transformer.wte",
        "decoder.layers.attention_norm": layer + "ln_1",
        **{f"decoder.layers.attention.{name}": f"{layer}attn.{name}_proj" for name in "kvq"},
        "decoder.layers.attention.o": layer + "attn.out_proj",
        "decoder.layers.mlp.up": layer + "mlp.fc_in",
        "decoder.layers.mlp.down": layer + "mlp.fc_out",
        "decoder.norm": "transformer.ln_f",
    }


FAMILIES = (
    Family(
        "gpt2",
        "GPT2",
        arch,
        names,
        base_prefix="transformer.",
        ignored=(r"\.attn\.(masked_)?bias$",),
    ),
    Family(
        "gptj",
        "GPTJ",
        arch_j,
        names_j,
        base_prefix="transformer.",
        ignored=(r"\.attn\.(masked_)?bias$", r"^lm_head\.bias$"),
    ),
)
