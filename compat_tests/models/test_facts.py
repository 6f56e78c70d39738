"""Every fact of Arch and Rope made wrong is noticed: a fact that nothing depends on would be decoration."""

from __future__ import annotations

from dataclasses import fields, replace

import jax
import numpy as np
import pytest

from compat_tests.models import variants
from trl_jax import AutoModelForSequenceClassification
from trl_jax.hub import loading
from trl_jax.hub.families import read_arch
from trl_jax.models.arch import Arch
from trl_jax.models.functional import merge
from trl_jax.nn.rope import Rope

# Fact -> the variant that shows it and a wrong value, by what notices: the table of tensors, or the numbers.
REFUSED = {
    "vocab_size": ("plain", 519),
    "hidden_size": ("plain", 32),
    "mlp_size": ("plain", 64),
    "num_layers": ("plain", 2),
    "num_heads": ("plain", 8),
    "num_key_heads": ("plain", 4),
    "head_dim": ("plain", 8),
    "qkv_bias": ("plain", False),
    "o_bias": ("plain", True),
    "mlp_bias": ("plain", True),
    "qk_norm": ("plain", True),
}
MISCOMPUTED = {
    "norm_eps": ("plain", 1e-3),
    "windows": ("layer_types", (7, None, None)),
    "activation": ("plain", "gelu_pytorch_tanh"),
}
ROPE = {
    "theta": ("plain", 9_000.0),
    "kind": ("llama3", "linear"),
    "factor": ("yarn", 3.0),
    "original_length": ("llama3", 32),
    "low_freq_factor": ("llama3", 2.0),
    "high_freq_factor": ("llama3", 8.0),
    "beta_fast": ("yarn", 2.0),
    "beta_slow": ("yarn", 0.1),
    "truncate": ("yarn", False),
    "attention_factor": ("yarn", 1.0),
}
# Shown by tests of their own below.
ELSEWHERE = {"rope", "attention_dropout", "initializer_range", "tied_embeddings", "padding_idx"}


def test_every_fact_is_here():
    assert {fact.name for fact in fields(Arch)} == {*REFUSED, *MISCOMPUTED, *ELSEWHERE}
    assert {fact.name for fact in fields(Rope)} == set(ROPE)


@pytest.fixture
def load_with(monkeypatch):
    """load_with(folder, **wrong): the model under an Arch with these facts; without any, under its own."""

    def load(folder, **wrong):
        def read_wrongly(raw, source):
            family, arch = read_arch(raw, source)
            return family, replace(arch, **wrong)

        monkeypatch.setattr(loading, "read_arch", read_wrongly)
        return AutoModelForSequenceClassification.from_pretrained(folder)

    return load


def scores(model, **how):
    ids, _ = variants.rows()
    positions = np.broadcast_to(np.arange(ids.shape[1], dtype=np.int32), ids.shape)
    at = np.full(len(ids), ids.shape[1] - 1)
    with jax.disable_jit():  # op by op, so that mutants share what is compiled
        return np.asarray(merge(model.graph, model.params)(ids, positions, at=at, **how))


@pytest.mark.parametrize("fact", REFUSED)
def test_a_fact_of_shape(fact, built, load_with):
    name, wrong = REFUSED[fact]
    with pytest.raises(ValueError, match=r"Missing: .*Unexpected: |wrong shapes: .* config.json asks for"):
        load_with(built("qwen2", name), **{fact: wrong})


def test_heads_of_another_width_that_fit_the_same_weights(built, load_with):
    folder = built("llama", "plain")
    wrong = load_with(folder, num_heads=8, num_key_heads=4, head_dim=8)
    assert _off(scores(wrong), scores(load_with(folder))) > 1e-3


@pytest.mark.parametrize("fact", MISCOMPUTED)
def test_a_fact_of_value(fact, built, load_with):
    name, wrong = MISCOMPUTED[fact]
    folder = built("qwen2", name)
    assert _off(scores(load_with(folder, **{fact: wrong})), scores(load_with(folder))) > 1e-4


@pytest.mark.parametrize("fact", ROPE)
def test_a_fact_of_rope(fact, built, load_with):
    name, wrong = ROPE[fact]
    folder = built("qwen2", name)
    right = load_with(folder)
    rope = right.source.arch.rope
    assert _off(scores(load_with(folder, rope=replace(rope, **{fact: wrong}))), scores(right)) > 1e-4


def test_attention_dropout(built, load_with):
    folder = built("llama", "plain")
    dropped = scores(load_with(folder, attention_dropout=0.3), dropout_key=jax.random.key(0))
    assert _off(dropped, scores(load_with(folder), dropout_key=jax.random.key(0))) > 1e-2


def test_padding_idx(built, load_with):
    """The row of the pad token has no gradient; under a wrong fact another row has none."""
    folder = built("llama", "plain")
    ids = np.asarray([[5, 0, 6, 7]])

    def embedding_gradient(model):
        def total(weight):
            params = model.params | {"decoder.embed.weight": weight}
            return merge(model.graph, params)(ids, np.arange(4)[None], at=np.asarray([3])).sum()

        with jax.disable_jit():
            return np.asarray(jax.grad(total)(model.params["decoder.embed.weight"]))[[0, 5]].any(axis=1)

    assert embedding_gradient(load_with(folder)).tolist() == [False, True]
    assert embedding_gradient(load_with(folder, padding_idx=5)).tolist() == [True, False]
    assert embedding_gradient(load_with(folder, padding_idx=None)).tolist() == [True, True]


def test_initializer_range(built, load_with):
    folder = built("llama", "tied")  # a causal model: its head is drawn
    drawn, wide = load_with(folder).params, load_with(folder, initializer_range=0.2).params
    np.testing.assert_allclose(wide["score.weight"], 2 * drawn["score.weight"], rtol=1e-6)


def test_tied_embeddings_is_the_flag_of_the_config(built, load_with):
    assert load_with(built("llama", "tied")).source.arch.tied_embeddings
    assert not load_with(built("llama", "plain")).source.arch.tied_embeddings


def _off(found, wanted):
    return np.abs(found - wanted).max() / np.abs(wanted).max()
