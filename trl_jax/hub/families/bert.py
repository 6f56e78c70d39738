"""BERT, ELECTRA and DistilBERT.

bert: a post-norm encoder with learned positions and a pooler before the classifier.
electra: bert with a smaller embedding, and roberta's head with another activation.
distilbert: bert without token types, with its own names and config keys.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace

from trl_jax.hub.config_reader import ConfigReader
from trl_jax.hub.families import Family, llama
from trl_jax.hub.heads import Draw, ScoreHead
from trl_jax.hub.tensor_map import Names, ordered
from trl_jax.models.arch import EncoderArch, HeadFacts
from trl_jax.models.model import EncoderScorer
from trl_jax.nn.layers import ACTIVATIONS

# Keys for training, and for a pooler that no released model has
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
    config.skip(*UNUSED)
    config.refuse("position_embedding_type", "absolute")
    config.refuse("is_decoder", False)
    config.refuse("add_cross_attention", False)
    dropout = config.dropout("hidden_dropout_prob", 0.1)
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
        attention_dropout=config.dropout("attention_probs_dropout_prob", 0.1),
        attention_out_dropout=dropout,
        mlp_out_dropout=dropout,
        initializer_range=config.number("initializer_range", 0.02),
        padding_idx=llama.read_padding_idx(config),
    )


def read_heads(config: ConfigReader, size: str, count: str) -> tuple[int, int]:
    hidden, heads = config.size(size), config.size(count)
    if hidden % heads:
        raise config.wrong(size, hidden, f"a multiple of {count} {heads}")
    return hidden, heads


def read_classifier_dropout(config: ConfigReader) -> float:
    return config.dropout("classifier_dropout", config.dropout("hidden_dropout_prob", 0.1))


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


def arch_electra(config: ConfigReader) -> EncoderArch:
    config.skip(
        "summary_type", "summary_use_proj", "summary_activation", "summary_last_dropout"
    )  # only for the multiple-choice head
    dropout = read_classifier_dropout(config)
    base = shared(config, HeadFacts("gelu", dropout_before=dropout, dropout_after=dropout))
    return replace(base, embedding_size=config.size("embedding_size", 128))


def names_electra(arch: EncoderArch) -> Names:
    names = body("electra.") | {
        "encoder.projection": "electra.embeddings_project",
        "head.dense": "classifier.dense",
        "head.out": "classifier.out_proj",
    }
    return ordered(names, "encoder.projection", before="encoder.layers.attention.q")


def arch_distilbert(config: ConfigReader) -> EncoderArch:
    hidden, heads = read_heads(config, "dim", "n_heads")
    # Keys for the initialization of positions, for another head or for older code
    config.skip("sinusoidal_pos_embds", "qa_dropout", "tie_weights_", "output_past")
    dropout = config.dropout("dropout", 0.1)
    return EncoderArch(
        vocab_size=config.size("vocab_size"),
        hidden_size=hidden,
        mlp_size=config.size("hidden_dim"),
        num_layers=config.size("n_layers", maximum=4096),
        num_heads=heads,
        norm_eps=1e-12,
        head=HeadFacts("relu", dropout_after=config.dropout("seq_classif_dropout", 0.2)),
        activation=config.one_of("activation", ACTIVATIONS, "gelu"),
        learned_positions=config.size("max_position_embeddings", 512),
        embedding_dropout=dropout,
        attention_dropout=config.dropout("attention_dropout", 0.1),
        mlp_out_dropout=dropout,
        initializer_range=config.number("initializer_range", 0.02),
        padding_idx=llama.read_padding_idx(config),
    )


def names_distilbert(arch: EncoderArch) -> Names:
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


FAMILIES = (
    Family(
        "bert",
        "Bert",
        arch,
        names,
        base_prefix="bert.",
        score_head=ScoreHead(EncoderScorer, (), ("classifier.",), draw_head("bert.pooler.dense", "classifier")),
        lm_head=None,
        ignored=(r"^cls\.", *BUFFERS),
    ),
    Family(
        "electra",
        "Electra",
        arch_electra,
        names_electra,
        base_prefix="electra.",
        score_head=ScoreHead(EncoderScorer, (), ("classifier.",), draw_head("classifier.dense", "classifier.out_proj")),
        lm_head=None,
        ignored=(r"^(discriminator_predictions|generator_predictions|generator_lm_head)\.", *BUFFERS),
    ),
    Family(
        "distilbert",
        "DistilBert",
        arch_distilbert,
        names_distilbert,
        base_prefix="distilbert.",
        score_head=ScoreHead(
            EncoderScorer, (), ("pre_classifier.", "classifier."), draw_head("pre_classifier", "classifier")
        ),
        lm_head=None,
        ignored=(r"^vocab_(transform|layer_norm|projector)\.", *BUFFERS),
    ),
)
