"""DeBERTa 1 to 3.

deberta-v2 and v3: bert with disentangled attention, and in some models a convolution next to the first layer.
deberta: deberta-v2 without distance buckets; query, key and value of each head in one tensor.
"""

from __future__ import annotations

from dataclasses import replace

from trl_jax.hub.config_reader import ConfigReader
from trl_jax.hub.families import Family, bert
from trl_jax.hub.heads import ScoreHead
from trl_jax.hub.tensor_map import Names, PerHead, ordered
from trl_jax.models.arch import ConvolutionFacts, EncoderArch, HeadFacts
from trl_jax.models.model import EncoderScorer
from trl_jax.nn.attention.disentangled import Distances
from trl_jax.nn.layers import ACTIVATIONS

# A key of the language model's head, and one that transformers does not read
_UNUSED = ("legacy", "padding_idx")
_IGNORED = (r"^(cls|lm_predictions|mask_predictions)\.", r"\bposition_embeddings\.", *bert.BUFFERS)


def arch_v2(config: ConfigReader) -> EncoderArch:
    base, longest = _shared(config), _read_longest(config)
    config.refuse("attention_head_size", base.hidden_size // base.num_heads)
    buckets = config.size("position_buckets", -1, minimum=-1)
    if buckets > 0 and not 2 <= buckets // 2 < longest - 1:
        raise config.wrong("position_buckets", buckets, f"4 or more, up to twice {longest - 2}, or -1")
    by_content = _read_products(config)
    distances = Distances(
        span=buckets if buckets > 0 else longest,
        longest=longest if buckets > 0 else None,
        **by_content,
        shared=config.flag("share_att_key"),
        normed=config.one_of("norm_rel_ebd", ("none", "layer_norm"), "none") == "layer_norm",
    )
    return replace(base, distances=distances, convolution=_convolution(config, base))


def _shared(config: ConfigReader) -> EncoderArch:
    """The part of the architecture that deberta shares: all but the attention."""
    config.skip(*_UNUSED)
    dropout = config.dropout("hidden_dropout_prob", 0.1)
    head = HeadFacts(
        config.one_of("pooler_hidden_act", ACTIVATIONS, "gelu"),
        dropout_before=config.dropout("pooler_dropout"),
        dropout_after=config.dropout("cls_dropout", dropout),
    )
    base = bert.shared(config, head)
    config.refuse("pooler_hidden_size", base.hidden_size)
    config.refuse("embedding_size", base.hidden_size)
    config.refuse("relative_attention", True)
    positions = base.learned_positions if config.flag("position_biased_input", True) else None
    return replace(base, learned_positions=positions, distance_dropout=dropout)


def _read_longest(config: ConfigReader) -> int:
    longest = config.size("max_relative_positions", -1, minimum=-1)
    return longest if longest > 0 else config.size("max_position_embeddings", 512)


def _read_products(config: ConfigReader) -> dict[str, bool]:
    """The content-position products in `pos_att_type`, a list or a string separated by "|"."""
    value = config.value("pos_att_type", [])
    kinds = [kind.strip() for kind in value.lower().split("|")] if isinstance(value, str) else value
    if not isinstance(kinds, list) or len(set(kinds)) < len(kinds) or not set(kinds) <= {"c2p", "p2c"}:
        raise config.wrong("pos_att_type", value, "a list of c2p and p2c")
    return {"key_to_query": "c2p" in kinds, "query_to_key": "p2c" in kinds}


def _convolution(config: ConfigReader, base: EncoderArch) -> ConvolutionFacts | None:
    width, groups = config.size("conv_kernel_size", 0, minimum=0), config.size("conv_groups", 1)
    activation = config.one_of("conv_act", ACTIVATIONS, "tanh")
    if width == 0:
        return None
    if width % 2 == 0 or base.hidden_size % groups:
        raise config.wrong("conv_kernel_size", width, "an odd number, and conv_groups one that divides hidden_size")
    return ConvolutionFacts(width, groups, activation, dropout=base.embedding_dropout)


def names_v2(arch: EncoderArch) -> Names:
    prefix = "deberta.encoder.layer.{}.attention.self."
    return _body() | {
        "encoder.distance_norm": "deberta.encoder.LayerNorm",
        "encoder.convolution": "deberta.encoder.conv.conv",
        "encoder.convolution_norm": "deberta.encoder.conv.LayerNorm",
        "encoder.layers.attention.q": prefix + "query_proj",
        "encoder.layers.attention.k": prefix + "key_proj",
        "encoder.layers.attention.v": prefix + "value_proj",
        "encoder.layers.attention.distance_k": prefix + "pos_key_proj",
        "encoder.layers.attention.distance_q": prefix + "pos_query_proj",
    }


def _body() -> Names:
    return bert.body("deberta.") | {
        "encoder.distance_embed": "deberta.encoder.rel_embeddings",
        "head.dense": "pooler.dense",
        "head.out": "classifier",
    }


def arch(config: ConfigReader) -> EncoderArch:
    config.refuse("talking_head", False)
    products = _read_products(config)
    distances = Distances(_read_longest(config), longest=None, **products, key_bias=False)
    return replace(_shared(config), distances=distances)


_MADE_FIRST = ("q.weight", "k.weight", "v.weight", "distance_k", "distance_q")


def names(arch: EncoderArch) -> Names:
    prefix = "deberta.encoder.layer.{}.attention.self."
    fused = {name: (prefix + "in_proj.weight", PerHead(i, arch.num_heads)) for i, name in enumerate("qkv")}
    names = _body() | {
        **{f"encoder.layers.attention.{name}.weight": place for name, place in fused.items()},
        "encoder.layers.attention.q.bias": prefix + "q_bias",
        "encoder.layers.attention.v.bias": prefix + "v_bias",
        "encoder.layers.attention.distance_k": prefix + "pos_proj",
        "encoder.layers.attention.distance_q": prefix + "pos_q_proj",
    }
    made_first = [f"encoder.layers.attention.{name}" for name in _MADE_FIRST]
    return ordered(names, *made_first, before="encoder.layers.attention.o")


_HEAD = ScoreHead(EncoderScorer, (), ("pooler.", "classifier."), bert.draw_head("pooler.dense", "classifier"))
FAMILIES = (
    Family(
        "deberta-v2",
        "DebertaV2",
        arch_v2,
        names_v2,
        base_prefix="deberta.",
        score_head=_HEAD,
        lm_head=None,
        ignored=_IGNORED,
    ),
    Family(
        "deberta",
        "Deberta",
        arch,
        names,
        base_prefix="deberta.",
        score_head=_HEAD,
        lm_head=None,
        ignored=_IGNORED,
    ),
)
