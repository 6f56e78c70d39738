"""Every field of an encoder's Arch matters: giving it a wrong value is noticed."""

from __future__ import annotations

from dataclasses import fields, is_dataclass, replace

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from compat_tests.effort import only_thorough, usual, usually
from compat_tests.models import encoders
from trl_jax.hub import config
from trl_jax.hub.auto import AutoModelForSequenceClassification
from trl_jax.hub.families import read_arch
from trl_jax.models.arch import ConvolutionFacts, EncoderArch, HeadFacts
from trl_jax.models.model import merge
from trl_jax.nn.attention.disentangled import Distances
from trl_jax.nn.rope import Rope

BERT, MODERN, V2 = ("bert", "plain"), ("modernbert", "biases"), ("deberta-v2", "convolved")
OLD = ("deberta", "plain")

# Field -> the variant that shows it and a wrong value; grouped by whether loading fails or results differ.
REFUSED = {
    "vocab_size": (BERT, 519),
    "hidden_size": (BERT, 32),
    "mlp_size": (BERT, 64),
    "num_layers": (BERT, 2),
    "embedding_size": (("electra", "plain"), 64),
    "prenorm": (MODERN, False),
    "norm": (MODERN, "layer_unbiased"),
    "attention_bias": (MODERN, False),
    "mlp_bias": (MODERN, False),
    "learned_positions": (BERT, 511),
    "type_vocab_size": (BERT, 1),
    "distances": (V2, None),
    "convolution": (V2, None),
    "head.dense_bias": (MODERN, False),
    "head.normed": (MODERN, False),
    "distances.span": (V2, 9),
    "distances.shared": (V2, False),
    "distances.normed": (V2, False),
    "distances.key_bias": (OLD, True),
    "convolution.width": (V2, 5),
    "convolution.groups": (V2, 1),
}
MISCOMPUTED = {
    "gated": (MODERN, False),
    "num_heads": (BERT, 8),
    "norm_eps": (BERT, 0.1),
    "activation": (BERT, "relu"),
    "ropes": (MODERN, (Rope(900.0),) * 3),
    "windows": (MODERN, (4, None, 5)),
    "positions_skip_pads": (("roberta", "plain"), False),
    "head.activation": (BERT, "relu"),
    "head.pooling": (MODERN, "first"),
    "distances.longest": (V2, 30),
    "distances.key_to_query": (V2, True),
    "distances.query_to_key": (V2, False),
    "convolution.activation": (V2, "tanh"),
}
DROPPED = {
    "embedding_dropout": BERT,
    "attention_dropout": BERT,
    "attention_out_dropout": BERT,
    "mlp_dropout": MODERN,
    "mlp_out_dropout": BERT,
    "distance_dropout": V2,
    "convolution.dropout": V2,
    "head.dropout_before": BERT,
    "head.dropout_after": BERT,
}
# Tested separately: random initialization, and the row without a gradient.
ELSEWHERE = {"initializer_range", "initializer_cutoff", "padding_idx", "head"}


# The fields tested by default, of those that need two computations.
SHOWN = {"windows", "attention_dropout"}


def test_every_fact_is_here():
    parts = {"head": HeadFacts, "distances": Distances, "convolution": ConvolutionFacts}
    facts = {fact.name for fact in fields(EncoderArch)}
    facts |= {f"{part}.{fact.name}" for part, kind in parts.items() for fact in fields(kind)}
    assert facts == {*REFUSED, *MISCOMPUTED, *DROPPED, *ELSEWHERE}


@pytest.fixture(scope="module")
def folder(tmp_path_factory):
    """folder(family, variant); each is built once."""
    made = {}

    def build(family, name):
        if (family, name) not in made:
            made[family, name] = encoders.build(tmp_path_factory.mktemp(family), family, name)
        return made[family, name]

    return build


@pytest.fixture
def load_with(monkeypatch):
    """load_with(folder, fact, wrong): the model with this field of its Arch changed; unchanged if no field is given."""

    def load(folder, fact=None, wrong=None):
        def read_wrongly(raw, source):
            family, arch = read_arch(raw, source)
            return family, arch if fact is None else _with(arch, fact.split("."), wrong)

        monkeypatch.setattr(config, "read_arch", read_wrongly)
        return AutoModelForSequenceClassification.from_pretrained(folder)

    return load


def _with(facts, path, wrong):
    first, *rest = path
    inner = getattr(facts, first)
    assert not rest or is_dataclass(inner)
    return replace(facts, **{first: _with(inner, rest, wrong) if rest else wrong})


def _scores(model, **how):
    ids, mask = (rows[:3, 8:] for rows in encoders.rows())
    ids = ids.copy()
    ids[:, 7] = 0  # a visible pad
    positions = np.broadcast_to(np.arange(ids.shape[1], dtype=np.int32), ids.shape)
    with jax.disable_jit():  # op by op, so that mutants reuse compiled operations
        scorer, reads = merge(model.graph, model.params), np.arange(len(ids)) * ids.shape[1]
        return np.asarray(scorer(jnp.asarray(ids), positions, reads, valid=jnp.asarray(mask, bool), **how))


def _off(found, wanted):
    return np.abs(found - wanted).max() / np.abs(wanted).max()


@pytest.mark.parametrize("fact", REFUSED)
def test_a_fact_of_shape(fact, folder, load_with):
    place, wrong = REFUSED[fact]
    noticed = r"Missing: .*Unexpected: |wrong shapes: .* config.json requires|attention_out_norm"
    with pytest.raises((ValueError, KeyError), match=noticed):
        load_with(folder(*place), fact, wrong)


@usual(
    "gated", "num_heads", "norm_eps", "activation", "ropes", "positions_skip_pads", "head.activation", "head.pooling",
    "distances.longest", "distances.key_to_query", "distances.query_to_key", "convolution.activation",
)  # fmt: skip
@pytest.mark.parametrize("fact", usually(SHOWN.__contains__, MISCOMPUTED))
def test_a_fact_of_value(fact, folder, load_with):
    place, wrong = MISCOMPUTED[fact]
    assert _off(_scores(load_with(folder(*place), fact, wrong)), _scores(load_with(folder(*place)))) > 1e-4


@only_thorough
@pytest.mark.parametrize("fact", usually(SHOWN.__contains__, DROPPED))
def test_a_rate_of_dropout(fact, folder, load_with):
    """Dropout is applied only if a key is passed, at the config's rate."""
    model, key = load_with(folder(*DROPPED[fact]), fact, 0.0), jax.random.key(0)
    more = load_with(folder(*DROPPED[fact]), fact, 0.5)
    np.testing.assert_array_equal(_scores(more), _scores(model))
    assert _off(_scores(more, dropout_key=key), _scores(model, dropout_key=key)) > 1e-3


@only_thorough
def test_padding_idx(folder, load_with):
    """The pad's rows have no gradient, neither in the token embedding nor in the position embedding; a wrong value
    changes which rows those are."""

    def untrained(model):
        def total(params):
            ids, positions = jnp.asarray([[5, 0, 6, 7]]), np.arange(4)[None]
            return merge(model.graph, params)(ids, positions, jnp.zeros(1, int), valid=ids >= 0).sum()

        with jax.disable_jit():
            gradients = jax.grad(total)(model.params)
        return [not gradients[f"encoder.{name}.weight"][0].any() for name in ("embed", "position_embed")]

    place = folder("roberta", "plain")
    assert untrained(load_with(place)) == [True, True]
    assert untrained(load_with(place, "padding_idx", 5)) == [False, True]  # position 0 is not used


def test_what_is_drawn(folder, load_with, tmp_path):
    base = encoders.build(tmp_path, "modernbert", "plain", head="base")
    dense = load_with(base).params["head.dense.weight"]
    assert np.abs(dense).max() <= 2 * 0.1 / np.sqrt(6)
    wide = load_with(base, "initializer_range", 0.2).params["head.dense.weight"]
    np.testing.assert_allclose(wide, 2 * dense, rtol=1e-6)
    far = load_with(base, "initializer_cutoff", 3.0).params["head.dense.weight"]
    assert np.abs(far).max() > 2 * 0.1 / np.sqrt(6)


def test_buckets_of_distances_are_the_ones_a_large_table_was_trained_with():
    """For 512 distances and 256 buckets: exact up to 128, then wider buckets, symmetric in both directions."""
    rows = Distances(256, 512, key_to_query=True, query_to_key=True).rows
    ahead = np.arange(600)
    np.testing.assert_array_equal(rows(ahead[:129]), 256 + ahead[:129])
    np.testing.assert_array_equal(rows(-ahead[:256]), 512 - rows(ahead[:256]))
    assert (np.diff(rows(ahead)) >= 0).all() and rows(np.asarray(511)) == 511 and rows(np.asarray(599)) == 511
