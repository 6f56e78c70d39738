"""electra: bert with a smaller embedding, and roberta's head with another activation."""

from __future__ import annotations

from dataclasses import replace

from trl_jax.hub.config_reader import ConfigReader
from trl_jax.hub.families import Family, bert
from trl_jax.hub.heads import ScoreHead
from trl_jax.hub.tensor_map import Names, ordered
from trl_jax.models.arch import EncoderArch, HeadFacts
from trl_jax.models.model import EncoderScorer


def arch(config: ConfigReader) -> EncoderArch:
    for key in ("summary_type", "summary_use_proj", "summary_activation", "summary_last_dropout"):
        config.value(key)  # only for the multiple-choice head
    dropout = bert.read_classifier_dropout(config)
    base = bert.shared(config, HeadFacts("gelu", dropout_before=dropout, dropout_after=dropout))
    return replace(base, embedding_size=config.size("embedding_size", 128))


def names(arch: EncoderArch) -> Names:
    names = bert.body("electra.") | {
        "encoder.projection": "electra.embeddings_project",
        "head.dense": "classifier.dense",
        "head.out": "classifier.out_proj",
    }
    return ordered(names, "encoder.projection", before="encoder.layers.attention.q")


FAMILY = Family(
    "electra",
    "Electra",
    arch,
    names,
    base_prefix="electra.",
    score_head=ScoreHead(
        EncoderScorer, (), ("classifier.",), bert.draw_head("classifier.dense", "classifier.out_proj")
    ),
    lm_head=None,
    ignored=(r"^(discriminator_predictions|generator_predictions|generator_lm_head)\.", *bert.BUFFERS),
)
