"""RoBERTa and the models that copied it.

roberta: bert with positions that skip pads, and a head of two linear layers.
camembert: roberta in French.
xlm-roberta: roberta in a hundred languages.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace

from trl_jax.hub.config_reader import ConfigReader
from trl_jax.hub.families import Family, bert
from trl_jax.hub.heads import ScoreHead
from trl_jax.hub.tensor_map import Names, ordered
from trl_jax.models.arch import EncoderArch, HeadFacts
from trl_jax.models.model import EncoderScorer


def arch(config: ConfigReader) -> EncoderArch:
    dropout = bert.read_classifier_dropout(config)
    base = bert.shared(config, HeadFacts("tanh", dropout_before=dropout, dropout_after=dropout))
    if base.padding_idx is None:
        raise config.wrong("pad_token_id", None, "the id of a token: positions are counted from it")
    return replace(base, positions_skip_pads=True)


def names(arch: EncoderArch) -> Names:
    names = bert.body("roberta.") | {"head.dense": "classifier.dense", "head.out": "classifier.out_proj"}
    return ordered(names, "encoder.type_embed", "encoder.embed_norm", before="encoder.position_embed")


def _names_head_first(arch: EncoderArch) -> Names:
    """The names in the order of the models that copied roberta: the head comes first."""
    return ordered(names(arch), "head.dense", "head.out", before="encoder.embed")


def _family(model_type: str, architecture: str, names: Callable[[EncoderArch], Names]) -> Family:
    return Family(
        model_type,
        architecture,
        arch,
        names,
        base_prefix="roberta.",
        score_head=ScoreHead(
            EncoderScorer, (), ("classifier.",), bert.draw_head("classifier.dense", "classifier.out_proj")
        ),
        lm_head=None,
        ignored=(r"^lm_head\.", r"(^|\.)pooler\.", *bert.BUFFERS),
    )


FAMILIES = (
    _family("roberta", "Roberta", names),
    _family("camembert", "Camembert", _names_head_first),
    _family("xlm-roberta", "XLMRoberta", _names_head_first),
)
