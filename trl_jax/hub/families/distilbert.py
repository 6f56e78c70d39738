"""distilbert: bert without token types, with its own names and config keys."""

from __future__ import annotations

from trl_jax.hub.config_reader import ConfigReader
from trl_jax.hub.families import Family, bert
from trl_jax.hub.families.llama import read_padding_idx
from trl_jax.hub.heads import ScoreHead
from trl_jax.hub.tensor_map import Names
from trl_jax.models.arch import EncoderArch, HeadFacts
from trl_jax.models.model import EncoderScorer
from trl_jax.nn.layers import ACTIVATIONS


def arch(config: ConfigReader) -> EncoderArch:
    hidden, heads = bert.read_heads(config, "dim", "n_heads")
    # Keys of the initialization of positions, of another head or of older code
    for key in ("sinusoidal_pos_embds", "qa_dropout", "tie_weights_", "output_past"):
        config.value(key)
    dropout = bert.read_dropout(config, "dropout", 0.1)
    return EncoderArch(
        vocab_size=config.size("vocab_size"),
        hidden_size=hidden,
        mlp_size=config.size("hidden_dim"),
        num_layers=config.size("n_layers", maximum=4096),
        num_heads=heads,
        norm_eps=1e-12,
        head=HeadFacts("relu", dropout_after=bert.read_dropout(config, "seq_classif_dropout", 0.2)),
        activation=config.one_of("activation", ACTIVATIONS, "gelu"),
        learned_positions=config.size("max_position_embeddings", 512),
        embedding_dropout=dropout,
        attention_dropout=bert.read_dropout(config, "attention_dropout", 0.1),
        mlp_out_dropout=dropout,
        initializer_range=config.number("initializer_range", 0.02),
        padding_idx=read_padding_idx(config),
    )


def names(arch: EncoderArch) -> Names:
    layer = "distilbert.transformer.layer.{}."
    return {
        "encoder.embed": "distilbert.embeddings.word_embeddings",
        "encoder.position_embed": "distilbert.embeddings.position_embeddings",
        "encoder.embed_norm": "distilbert.embeddings.LayerNorm",
        **{f"encoder.layers.attention.{name}": f"{layer}attention.{name}_lin" for name in "qkv"},
        "encoder.layers.attention.o": layer + "attention.out_lin",
        "encoder.layers.attention_out_norm": layer + "sa_layer_norm",
        "encoder.layers.mlp.up": layer + "ffn.lin1",
        "encoder.layers.mlp.down": layer + "ffn.lin2",
        "encoder.layers.mlp_out_norm": layer + "output_layer_norm",
        "head.dense": "pre_classifier",
        "head.out": "classifier",
    }


FAMILY = Family(
    "distilbert",
    "DistilBert",
    arch,
    names,
    base_prefix="distilbert.",
    score_head=ScoreHead(
        EncoderScorer, (), ("pre_classifier.", "classifier."), bert.draw_head("pre_classifier", "classifier")
    ),
    lm_head=None,
    ignored=(r"^vocab_(transform|layer_norm|projector)\.", *bert.BUFFERS),
)
