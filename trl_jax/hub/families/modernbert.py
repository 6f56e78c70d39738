"""modernbert: an encoder with rotary positions, two-sided windows in most layers, and gated MLPs."""

from __future__ import annotations

import math

from trl_jax.hub.config_reader import FULL, SLIDING, ConfigReader, read_layer_types, read_ropes, windows_of
from trl_jax.hub.families import Family, bert, llama
from trl_jax.hub.heads import Draw, ScoreHead
from trl_jax.hub.tensor_map import Names, concatenated
from trl_jax.models.arch import EncoderArch, HeadFacts
from trl_jax.models.model import EncoderScorer
from trl_jax.nn.layers import ACTIVATIONS
from trl_jax.nn.rope import Rope

# Keys of kernels and of the language model's head; position_embedding_type and layer_norm_eps have no effect.
UNUSED = """
    cls_token_id decoder_bias deterministic_flash_attn gradient_checkpointing layer_norm_eps position_embedding_type
    reference_compile repad_logits_with_grad sparse_pred_ignore_index sparse_prediction
""".split()
_LEAST_CUTOFF = 0.4  # below this, torch uses another algorithm


def arch(config: ConfigReader) -> EncoderArch:
    config.skip(*UNUSED)
    hidden, heads = bert.read_heads(config, "hidden_size", "num_attention_heads")
    if hidden // heads % 2:
        raise config.wrong("hidden_size", hidden, "an even number of channels a head: rotary positions turn pairs")
    layers = config.size("num_hidden_layers", maximum=4096)
    every = config.size("global_attn_every_n_layers", 3)
    types = read_layer_types(config, [SLIDING if i % every else FULL for i in range(layers)])
    reach = config.size("local_attention", 128, minimum=2) // 2  # to either side
    dropout = config.dropout("attention_dropout")
    return EncoderArch(
        vocab_size=config.size("vocab_size"),
        hidden_size=hidden,
        mlp_size=config.size("intermediate_size"),
        num_layers=layers,
        num_heads=heads,
        norm_eps=config.number("norm_eps", 1e-5),
        head=_head(config),
        prenorm=True,
        norm="layer" if config.flag("norm_bias") else "layer_unbiased",
        activation=config.one_of("hidden_activation", ACTIVATIONS, "gelu"),
        gated=True,
        attention_bias=config.flag("attention_bias"),
        mlp_bias=config.flag("mlp_bias"),
        ropes=_ropes(config, types),
        windows=windows_of(types, reach + 1),
        embedding_dropout=config.dropout("embedding_dropout"),
        attention_dropout=dropout,
        attention_out_dropout=dropout,
        mlp_dropout=config.dropout("mlp_dropout"),
        initializer_range=config.number("initializer_range", 0.02),
        initializer_cutoff=config.number("initializer_cutoff_factor", 3.0, minimum=_LEAST_CUTOFF),
        padding_idx=llama.read_padding_idx(config),
    )


def _head(config: ConfigReader) -> HeadFacts:
    pooling = config.one_of("classifier_pooling", ("cls", "mean"), "cls")
    return HeadFacts(
        config.one_of("classifier_activation", ACTIVATIONS, "gelu"),
        pooling="first" if pooling == "cls" else "mean",
        dense_bias=config.flag("classifier_bias"),
        normed=True,
        dropout_after=config.dropout("classifier_dropout"),
    )


def _ropes(config: ConfigReader, types: list[str]) -> tuple[Rope, ...]:
    config.refuse("rope_scaling", None)
    theta, local = (config.number(f"{name}_rope_theta", x) for name, x in (("global", 160_000.0), ("local", 10_000.0)))
    return read_ropes(config.with_values(rope_theta=theta, rope_local_base_freq=local), types, local_theta=local)


def names(arch: EncoderArch) -> Names:
    layer, ours = "model.layers.{}.", "encoder.layers."
    return {
        "encoder.embed": "model.embeddings.tok_embeddings",
        "encoder.embed_norm": "model.embeddings.norm",
        "encoder.attention_norm": (layer + "attn_norm", 1),
        **concatenated(layer + "attn.Wqkv", {f"{ours}attention.{name}": arch.hidden_size for name in "qkv"}),
        ours + "attention.o": layer + "attn.Wo",
        ours + "mlp_norm": layer + "mlp_norm",
        **concatenated(layer + "mlp.Wi", {f"{ours}mlp.{name}": arch.mlp_size for name in ("gate", "up")}),
        ours + "mlp.down": layer + "mlp.Wo",
        "encoder.norm": "model.final_norm",
        "head.dense": "head.dense",
        "head.norm": "head.norm",
        "head.out": "classifier",
    }


def draw_head(arch: EncoderArch) -> list[Draw]:
    """Each new weight is first drawn as in other linear layers, then again from a truncated normal."""
    plain, cutoff = arch.initializer_range, arch.initializer_cutoff
    dense, out = plain / math.sqrt(2 * arch.num_layers), arch.hidden_size**-0.5
    weights = [
        *(Draw("head.dense.weight", plain), Draw("head.dense.weight", dense, cutoff)),
        *(Draw("classifier.weight", plain), Draw("classifier.weight", out, cutoff)),
    ]
    constant = [Draw("classifier.bias"), Draw("head.norm.weight", fill=1.0)]
    constant += [Draw("head.dense.bias")] if arch.head.dense_bias else []
    constant += [Draw("head.norm.bias")] if arch.norm == "layer" else []
    return weights + constant


FAMILY = Family(
    "modernbert",
    "ModernBert",
    arch,
    names,
    score_head=ScoreHead(EncoderScorer, (), ("head.", "classifier."), draw_head),
    lm_head=None,
    ignored=(r"^decoder\.",),
)
