"""opt: learned positions that count visible tokens, layer norms, a plain MLP.

The 350M checkpoint norms the residual stream after each addition (post-norm), and has a narrower token embedding.
"""

from __future__ import annotations

from trl_jax.hub.config_reader import ConfigReader
from trl_jax.hub.families import Family, llama
from trl_jax.hub.tensor_map import Names
from trl_jax.models.arch import Arch
from trl_jax.nn.layers import ACTIVATIONS


def arch(config: ConfigReader) -> Arch:
    hidden, layers = config.size("hidden_size"), config.size("num_hidden_layers", maximum=4096)
    heads, bias = config.size("num_attention_heads"), config.flag("enable_bias", True)
    embedding, before = config.size("word_embed_proj_dim", hidden), config.flag("do_layer_norm_before", True)
    config.refuse("layerdrop", 0.0)
    dropout = config.dropout("dropout", 0.1)
    return Arch(
        vocab_size=config.size("vocab_size"),
        hidden_size=hidden,
        mlp_size=config.size("ffn_dim"),
        num_layers=layers,
        num_heads=heads,
        num_key_heads=heads,
        head_dim=hidden // heads,
        norm_eps=1e-5,
        ropes=(None,) * layers,
        rotary_dim=0,
        windows=(None,) * layers,
        block="pre" if before else "normed_sums",
        last_norm=before and not config.flag("_remove_final_layer_norm"),
        norm="layer" if config.flag("layer_norm_elementwise_affine", True) else "layer_plain",
        activation=config.one_of("activation_function", ACTIVATIONS, "relu"),
        gated=False,
        qkv_bias=bias,
        o_bias=bias,
        mlp_bias=bias,
        learned_positions=config.size("max_position_embeddings", 2048) + 2,
        position_offset=2,
        counts_visible=True,
        embedding_size=None if embedding == hidden else embedding,
        attention_dropout=config.dropout("attention_dropout"),
        attention_out_dropout=dropout,
        mlp_out_dropout=dropout,
        initializer_range=config.number("init_std", 0.02),
        tied_embeddings=config.flag("tie_word_embeddings", True),
        padding_idx=llama.read_padding_idx(config),
    )


def names(arch: Arch) -> Names:
    layer = "model.decoder.layers.{}."
    return {
        "decoder.embed": "model.decoder.embed_tokens",
        "decoder.position_embed": "model.decoder.embed_positions",
        "decoder.project_out": "model.decoder.project_out",
        "decoder.project_in": "model.decoder.project_in",
        "decoder.norm": "model.decoder.final_layer_norm",
        **{f"decoder.layers.attention.{name}": f"{layer}self_attn.{name}_proj" for name in "kvq"},
        "decoder.layers.attention.o": layer + "self_attn.out_proj",
        "decoder.layers.attention_norm": layer + "self_attn_layer_norm",
        "decoder.layers.mlp.up": layer + "fc1",
        "decoder.layers.mlp.down": layer + "fc2",
        "decoder.layers.mlp_norm": layer + "final_layer_norm",
    }


FAMILY = Family("opt", "OPT", arch, names)
