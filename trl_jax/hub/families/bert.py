"""bert: a post-norm encoder with learned positions and a pooler before the classifier."""

from __future__ import annotations

from collections.abc import Callable

from trl_jax.hub.config_reader import ConfigReader
from trl_jax.hub.families import Family
from trl_jax.hub.families.llama import read_padding_idx
from trl_jax.hub.heads import Draw, ScoreHead
from trl_jax.hub.tensor_map import Names
from trl_jax.models.arch import EncoderArch, HeadFacts
from trl_jax.models.model import EncoderScorer
from trl_jax.nn.layers import ACTIVATIONS

# Keys of training, and of a pooler that no released model has
UNUSED = """
    directionality gradient_checkpointing output_past pooler_fc_size pooler_num_attention_heads pooler_num_fc_layers
    pooler_size_per_head pooler_type
""".split()
BUFFERS = (r"\bposition_ids$", r"\btoken_type_ids$")


def arch(config: ConfigReader) -> EncoderArch:
    return shared(config, HeadFacts("tanh", dropout_after=read_classifier_dropout(config)))


def shared(config: ConfigReader, head: HeadFacts) -> EncoderArch:
    """The part of the architecture that later encoders share."""
    hidden, heads = read_heads(config, "hidden_size", "num_attention_heads")
    for key in UNUSED:
        config.value(key)
    config.refuse("position_embedding_type", "absolute")
    config.refuse("is_decoder", False)
    config.refuse("add_cross_attention", False)
    dropout = read_dropout(config, "hidden_dropout_prob", 0.1)
    return EncoderArch(
        vocab_size=config.size("vocab_size"),
        hidden_size=hidden,
        mlp_size=config.size("intermediate_size"),
        num_layers=config.size("num_hidden_layers", maximum=4096),
        num_heads=heads,
        norm_eps=config.number("layer_norm_eps", 1e-12),
        head=head,
        activation=config.one_of("hidden_act", ACTIVATIONS, "gelu"),
        learned_positions=config.size("max_position_embeddings", 512),
        type_vocab_size=config.size("type_vocab_size", 2, minimum=0),
        embedding_dropout=dropout,
        attention_dropout=read_dropout(config, "attention_probs_dropout_prob", 0.1),
        attention_out_dropout=dropout,
        mlp_out_dropout=dropout,
        initializer_range=config.number("initializer_range", 0.02),
        padding_idx=read_padding_idx(config),
    )


def read_heads(config: ConfigReader, size: str, count: str) -> tuple[int, int]:
    hidden, heads = config.size(size), config.size(count)
    if hidden % heads:
        raise config.wrong(size, hidden, f"a multiple of {count} {heads}")
    return hidden, heads


def read_dropout(config: ConfigReader, key: str, default: float) -> float:
    return config.number(key, default, maximum=0.99)


def read_classifier_dropout(config: ConfigReader) -> float:
    return read_dropout(config, "classifier_dropout", read_dropout(config, "hidden_dropout_prob", 0.1))


def body(prefix: str) -> Names:
    """The names of bert's body, with this prefix."""
    layer = prefix + "encoder.layer.{}."
    return {
        "encoder.embed": f"{prefix}embeddings.word_embeddings",
        "encoder.position_embed": f"{prefix}embeddings.position_embeddings",
        "encoder.type_embed": f"{prefix}embeddings.token_type_embeddings",
        "encoder.embed_norm": f"{prefix}embeddings.LayerNorm",
        "encoder.layers.attention.q": layer + "attention.self.query",
        "encoder.layers.attention.k": layer + "attention.self.key",
        "encoder.layers.attention.v": layer + "attention.self.value",
        "encoder.layers.attention.o": layer + "attention.output.dense",
        "encoder.layers.attention_out_norm": layer + "attention.output.LayerNorm",
        "encoder.layers.mlp.up": layer + "intermediate.dense",
        "encoder.layers.mlp.down": layer + "output.dense",
        "encoder.layers.mlp_out_norm": layer + "output.LayerNorm",
    }


def names(arch: EncoderArch) -> Names:
    return body("bert.") | {"head.dense": "bert.pooler.dense", "head.out": "classifier"}


def draw_head(dense: str, out: str) -> Callable[[EncoderArch], list[Draw]]:
    """New linear layers of these names: normal weights, zero biases."""

    def drawn(arch: EncoderArch) -> list[Draw]:
        weights = [Draw(f"{name}.weight", arch.initializer_range) for name in (dense, out)]
        return weights + [Draw(f"{name}.bias") for name in (dense, out)]

    return drawn


FAMILY = Family(
    "bert",
    "Bert",
    arch,
    names,
    base_prefix="bert.",
    score_head=ScoreHead(EncoderScorer, (), ("classifier.",), draw_head("bert.pooler.dense", "classifier")),
    lm_head=None,
    ignored=(r"^cls\.", *BUFFERS),
)
