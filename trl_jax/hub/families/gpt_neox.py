"""gpt_neox: Pythia and others: parallel attention and MLP on two layer norms; q, k and v of each head in one tensor."""

from __future__ import annotations

from dataclasses import replace

from trl_jax.hub.config_reader import ConfigReader, rotated
from trl_jax.hub.families import Family, llama, persimmon
from trl_jax.hub.heads import lm_head
from trl_jax.hub.tensor_map import Names
from trl_jax.models.arch import Arch


def arch(config: ConfigReader) -> Arch:
    heads = config.size("num_attention_heads")  # also of keys; num_key_value_heads has no effect
    base = llama.arch(_with_todays_theta(config).with_values(num_key_value_heads=heads), partial=True)
    base = rotated(config, base, 0.25, "rotary_pct")
    bias, dropout = config.flag("attention_bias", True), config.dropout("hidden_dropout")
    config.optional_number("classifier_dropout")  # only for token classifiers
    return replace(
        base,
        block="parallel_two_norms" if config.flag("use_parallel_residual", True) else "pre",
        norm="layer",
        norm_eps=config.number("layer_norm_eps", 1e-5),
        gated=False,
        qkv_bias=bias,
        o_bias=bias,
        mlp_bias=True,
        embedding_dropout=dropout,
        attention_out_dropout=dropout,
        mlp_out_dropout=dropout,
        padding_idx=None,
    )


def _with_todays_theta(config: ConfigReader) -> ConfigReader:
    return config.with_values(rope_theta=config.number("rotary_emb_base", config.number("rope_theta", 10_000.0)))


def names(arch: Arch) -> Names:
    layer = "gpt_neox.layers.{}."
    return {
        "decoder.embed": "gpt_neox.embed_in",
        "decoder.layers.attention_norm": layer + "input_layernorm",
        "decoder.layers.mlp_norm": layer + "post_attention_layernorm",
        **persimmon.per_head(layer + "attention.query_key_value", arch.num_heads),
        "decoder.layers.attention.o": layer + "attention.dense",
        "decoder.layers.mlp.up": layer + "mlp.dense_h_to_4h",
        "decoder.layers.mlp.down": layer + "mlp.dense_4h_to_h",
        "decoder.norm": "gpt_neox.final_layer_norm",
    }


FAMILY = Family(
    "gpt_neox",
    "GPTNeoX",
    arch,
    names,
    base_prefix="gpt_neox.",
    lm_head=lm_head("embed_out"),
    moved=(("embed_out", "lm_head"),),
    ignored=(r"\.rotary_emb\.inv_freq$", r"\.attention\.(masked_)?bias$"),
)
