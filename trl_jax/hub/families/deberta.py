"""deberta: deberta-v2 without distance buckets; query, key and value of each head in one tensor."""

from __future__ import annotations

from dataclasses import replace

from trl_jax.hub.config_reader import ConfigReader
from trl_jax.hub.families import Family, bert, deberta_v2
from trl_jax.hub.heads import ScoreHead
from trl_jax.hub.tensor_map import Names, PerHead, ordered
from trl_jax.models.arch import EncoderArch
from trl_jax.models.model import EncoderScorer
from trl_jax.nn.attention.disentangled import Distances


def arch(config: ConfigReader) -> EncoderArch:
    config.refuse("talking_head", False)
    products = deberta_v2.read_products(config)
    distances = Distances(deberta_v2.read_longest(config), longest=None, **products, key_bias=False)
    return replace(deberta_v2.shared(config), distances=distances)


_MADE_FIRST = ("q.weight", "k.weight", "v.weight", "distance_k", "distance_q")


def names(arch: EncoderArch) -> Names:
    own = "deberta.encoder.layer.{}.attention.self."
    fused = {name: (own + "in_proj.weight", PerHead(i, arch.num_heads)) for i, name in enumerate("qkv")}
    names = deberta_v2.body() | {
        **{f"encoder.layers.attention.{name}.weight": place for name, place in fused.items()},
        "encoder.layers.attention.q.bias": own + "q_bias",
        "encoder.layers.attention.v.bias": own + "v_bias",
        "encoder.layers.attention.distance_k": own + "pos_proj",
        "encoder.layers.attention.distance_q": own + "pos_q_proj",
    }
    made_first = [f"encoder.layers.attention.{name}" for name in _MADE_FIRST]
    return ordered(names, *made_first, before="encoder.layers.attention.o")


FAMILY = Family(
    "deberta",
    "Deberta",
    arch,
    names,
    base_prefix="deberta.",
    score_head=ScoreHead(EncoderScorer, (), ("pooler.", "classifier."), bert.draw_head("pooler.dense", "classifier")),
    lm_head=None,
    ignored=deberta_v2.IGNORED,
)
