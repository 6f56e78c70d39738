"""Every field of Arch and Rope matters: giving it a wrong value is noticed."""

from __future__ import annotations

from dataclasses import fields, replace

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from compat_tests.effort import only_thorough, usual, usually
from compat_tests.models import causal, variants
from trl_jax.core.outputs import reads_of_rows
from trl_jax.hub import config
from trl_jax.hub.auto import AutoModelForCausalLM, AutoModelForSequenceClassification
from trl_jax.hub.families import read_arch
from trl_jax.models.arch import (  # fmt: skip
    Arch,
    Experts,
    GatedDelta,
    Heads,
    Latent,
    LayerEmbedding,
    LayerKind,
    MixerScales,
    ShortConvolution,
    StateSpace,
)
from trl_jax.models.model import merge
from trl_jax.nn.layers import ClampedSwiGLU
from trl_jax.nn.moe import SparseMixer
from trl_jax.nn.rope import Rope

# Field -> the family and variant that show it and a wrong value; grouped by whether loading fails or results differ.
REFUSED = {
    "vocab_size": ("qwen2", "plain", 519),
    "hidden_size": ("qwen2", "plain", 32),
    "mlp_size": ("qwen2", "plain", 64),
    "num_layers": ("qwen2", "plain", 2),
    "num_heads": ("qwen2", "plain", 8),
    "num_key_heads": ("qwen2", "plain", 4),
    "head_dim": ("qwen2", "plain", 8),
    "qkv_bias": ("qwen2", "plain", False),
    "o_bias": ("qwen2", "plain", True),
    "mlp_bias": ("qwen2", "plain", True),
    "qk_norm": ("qwen2", "plain", "head"),
    "gated": ("arcee", "plain", True),
    "last_norm": ("opt", "plain", False),
    "embedding_size": ("opt", "normed_sums", 40),
    "learned_positions": ("gpt2", "plain", 500),
    "experts": ("qwen2_moe", "plain", None),
    "sinks": ("gpt_oss", "plain", False),
    "latent": ("deepseek_v3", "plain", Latent(32, 16, 10, 1e-6)),
    "short_convolution": ("lfm2", "biases", ShortConvolution(3, True)),
    "gated_delta": ("qwen3_next", "plain", GatedDelta(2, 4, 32, 12, 3)),
    "state_space": ("granitemoehybrid", "plain", StateSpace(8, 16, 2, 12, 4, False, False, False, (0.0, 9.0))),
    "layer_embedding": ("gemma4_text", "plain", LayerEmbedding(600, 8)),
    "layer_scalar": ("gemma4_text", "plain", False),
    "kinds": ("lfm2", "plain", (LayerKind("convolution"), LayerKind(), *(LayerKind("convolution"),) * 2)),
}
MISCOMPUTED = {
    "norm_eps": ("qwen2", "plain", 1e-3),
    "windows": ("qwen2", "layer_types", (7, None, None)),
    "activation": ("qwen2", "plain", "gelu_pytorch_tanh"),
    "block": ("gpt_neox", "plain", "pre"),
    "norm": ("gemma", "plain", "rms"),
    "qk_norm_kind": ("gemma3_text", "plain", "rms"),
    "chunks": ("llama4_text", "plain", None),
    "v_norm": ("gemma4_text", "plain", False),
    "qk_norm_after_rope": ("hunyuan_v1_dense", "plain", False),
    "rotary_dim": ("phi", "plain", 16),
    "rope_interleaved": ("helium", "plain", False),
    "ropes": ("smollm3", "plain", (Rope(300.0),) * 3),
    "attention_scales": ("gemma2", "no_caps", None),
    "softcap": ("gemma2", "plain", None),
    "gated_attention": ("qwen3_next", "plain", False),
    "clip_qkv": ("olmo", "clip", None),
    "query_growth": ("ministral3", "plain", None),
    "embedding_scale": ("gemma", "plain", 1.0),
    "residual_scale": ("granite", "plain", 1.0),
    "mixer_scales": ("falcon_h1", "plain", MixerScales(0.8, 0.7, 1.0, 0.6)),
    "mlp_scales": ("falcon_h1", "plain", (1.2, 1.0)),
    "position_offset": ("opt", "plain", 0),
}
EXPERTS = {
    "top_k": ("qwen3_moe", "plain", 1),
    "renormalized": ("qwen3_moe", "plain", True),
    "swiglu": ("gpt_oss", "plain", None),
    "scores": ("deepseek_v3", "plain", "softmax"),
    "weight_floor": ("ernie4_5_moe", "between", 0.0),
    "scale": ("deepseek_v3", "plain", 1.0),
    "weights_inputs": ("llama4_text", "plain", False),
    "groups": ("deepseek_v3", "plain", 1),
    "top_groups": ("deepseek_v3", "plain", 1),
    "group_best": ("deepseek_v3", "plain", 1),
    "sparse_mixer": ("phimoe", "plain", None),
}
# Fields of experts that determine which tensors exist.
EXPERTS_SHAPE = {
    "count": ("qwen2_moe", 3),
    "size": ("qwen2_moe", 20),
    "shared_size": ("qwen2_moe", None),
    "shared_gated": ("qwen2_moe", False),
    "correction_bias": ("deepseek_v3", False),
    "bias": ("gpt_oss", False),
    "gated": ("qwen2_moe", False),
    "latent_size": ("nemotron_h", 16),
    "latent_bias": ("nemotron_h", True),
}
SWIGLU = {"alpha": 1.0, "limit": 0.9}
SPARSE_MIXER = {"jitter": 0.05, "input_jitter": 0.1}
ROPE = {
    "theta": ("qwen2", "plain", 9_000.0),
    "kind": ("qwen2", "llama3", "linear"),
    "factor": ("qwen2", "yarn", 3.0),
    "channels": ("gemma4_text", "plain", 4),
    "fraction": ("gemma4_text", "keys_as_values", 0.25),
    "original_length": ("qwen2", "llama3", 32),
    "low_freq_factor": ("qwen2", "llama3", 2.0),
    "high_freq_factor": ("qwen2", "llama3", 8.0),
    "beta_fast": ("qwen2", "yarn", 2.0),
    "beta_slow": ("qwen2", "yarn", 0.1),
    "truncate": ("qwen2", "yarn", False),
    "attention_factor": ("qwen2", "yarn", 1.0),
    "long_attention_factor": ("phimoe", "long", None),
    "short_factors": ("phi3", "short", (1.0,) * 8),
    "long_factors": ("phi3", "long", (1.0,) * 8),
}
DROPOUTS = {
    "attention_dropout": ("llama", "plain"),
    "embedding_dropout": ("phi", "plain"),
    "attention_out_dropout": ("phi", "plain"),
    "mlp_out_dropout": ("stablelm", "parallel"),
}
# Fields of a language model's head -> the family and a wrong value.
HEAD = {"logit_scale": ("cohere", 1.0), "logit_softcap": ("gemma2", None)}
# Tested separately below; scale_in_table in test_noise.py.
ELSEWHERE = {"counts_visible", "initializer_range", "tied_embeddings", "padding_idx", "scale_in_table", "head_bias"}


# The fields tested by default, of those that need two computations.
SHOWN = {"windows", "ropes", "theta", "attention_dropout"}


# Fields for vision towers and texts with images, tested in compat_tests/hub/vision, as is a rope's `axes`.
OF_VISION = {"rope_sections", "layer_scale", "vision", "image_attention", "clipped_maps"}


def test_every_fact_is_here():
    assert {fact.name for fact in fields(Arch)} == {*REFUSED, *MISCOMPUTED, *DROPOUTS, *HEAD, *ELSEWHERE, *OF_VISION}
    assert {fact.name for fact in fields(Rope)} == {*ROPE, "axes"}
    assert {fact.name for fact in fields(Experts)} == {*EXPERTS, *EXPERTS_SHAPE, "float32_router", "beside_mlp"}
    assert {fact.name for fact in fields(ClampedSwiGLU)} == set(SWIGLU)
    assert {fact.name for fact in fields(SparseMixer)} == set(SPARSE_MIXER)


@pytest.fixture
def load_with(monkeypatch):
    """load_with(folder, **wrong): the model with these fields of its Arch changed; unchanged if none are given."""

    def load(folder, model_class=AutoModelForSequenceClassification, **wrong):
        def read_wrongly(raw, source):
            family, arch = read_arch(raw, source)
            return family, replace(arch, **wrong)

        monkeypatch.setattr(config, "read_arch", read_wrongly)
        return model_class.from_pretrained(folder)

    return load


def scores(model, **how):
    ids, _ = variants.rows()
    positions = np.broadcast_to(np.arange(ids.shape[1], dtype=np.int32), ids.shape)
    reads = reads_of_rows(np.full(len(ids), ids.shape[1] - 1), ids.shape[1])
    with jax.disable_jit():  # op by op, so that mutants reuse compiled operations
        return np.asarray(merge(model.graph, model.params)(ids, positions, reads, **how))


@pytest.mark.parametrize("fact", REFUSED)
def test_a_fact_of_shape(fact, built, load_with):
    family, name, wrong = REFUSED[fact]
    with pytest.raises(ValueError, match=r"Missing: .*Unexpected: |wrong shapes: .* config.json requires"):
        load_with(built(family, name), **{fact: wrong})


@pytest.mark.parametrize(
    ("name", "wrong"),
    [
        ("plain", {"heads": Heads(1, 12)}), ("plain", {"heads": Heads(2, 8)}), ("plain", {"mlp_size": 96}),
        ("plain", {"reuses": False}), ("keys_as_values", {"heads": Heads(1, 12, values_are_keys=False)}),
    ],
)  # fmt: skip
def test_a_fact_of_a_layers_kind(name, wrong, built, load_with):
    """Of layers that reuse keys and values, or of layers with full attention."""
    folder = built("gemma4_text", name)
    kinds = load_with(folder).source.config.arch.kinds
    meant = [kind.heads is not None if "heads" in wrong else kind.reuses for kind in kinds]
    changed = tuple(replace(kind, **wrong) if there else kind for kind, there in zip(kinds, meant, strict=True))
    with pytest.raises(ValueError, match=r"Missing: .*Unexpected: |wrong shapes: .* config.json requires"):
        load_with(folder, kinds=changed)


@only_thorough
def test_layers_without_positions(built, load_with):
    """Layers without positions do not normalize queries and keys, and only their queries grow with length."""
    folder = built("llama4_text", "growing")
    right = load_with(folder)
    arch, wanted = right.source.config.arch, scores(right)
    kinds = tuple(replace(kind, no_rope=False) for kind in arch.kinds)
    for wrong in (
        {"kinds": kinds},
        {"query_growth": replace(arch.query_growth, no_rope=False)},
        {"query_growth": replace(arch.query_growth, first=0)},
    ):
        assert _off(scores(load_with(folder, **wrong)), wanted) > 1e-4


def test_experts_beside_an_mlp(built, load_with):
    folder = built("gemma4_text", "experts")
    experts = replace(load_with(folder).source.config.arch.experts, beside_mlp=False)
    with pytest.raises(KeyError, match="mlp.router"):  # the family has no name for it
        load_with(folder, experts=experts)


@only_thorough
def test_which_keys_are_reused(built, load_with):
    """Those of the nearest earlier layer, not of one further below."""
    folder = built("gemma4_text", "plain")
    right = load_with(folder)
    kinds = right.source.config.arch.kinds
    assert [kind.reused for kind in kinds] == [False, True, True, False, False, False]
    earlier = (replace(kinds[0], reused=True), replace(kinds[1], reused=False), *kinds[2:])
    assert _off(scores(load_with(folder, kinds=earlier)), scores(right)) > 1e-4


@pytest.mark.parametrize("fact", usually({"count", "shared_size"}.__contains__, EXPERTS_SHAPE))
def test_a_fact_of_the_experts_shape(fact, built, load_with):
    family, wrong = EXPERTS_SHAPE[fact]
    folder = built(family, "plain")
    experts = replace(load_with(folder).source.config.arch.experts, **{fact: wrong})
    with pytest.raises(ValueError, match=r"Missing: .*Unexpected: |wrong shapes: .* config.json requires"):
        load_with(folder, experts=experts)


@only_thorough
def test_heads_of_another_width_that_fit_the_same_weights(built, load_with):
    folder = built("llama", "plain")
    wrong = load_with(folder, num_heads=8, num_key_heads=4, head_dim=8, rotary_dim=8)
    assert _off(scores(wrong), scores(load_with(folder))) > 1e-3


@usual("ropes")
@pytest.mark.parametrize("fact", usually(SHOWN.__contains__, MISCOMPUTED))
def test_a_fact_of_value(fact, built, load_with):
    family, name, wrong = MISCOMPUTED[fact]
    folder = built(family, name)
    assert _off(scores(load_with(folder, **{fact: wrong})), scores(load_with(folder))) > 1e-4


@only_thorough
def test_a_router_in_float32(built, load_with):
    """With a router in the run's dtype, scores in bfloat16 differ."""
    folder = built("deepseek_v3", "plain")
    right = load_with(folder)
    wrong = load_with(folder, experts=replace(right.source.config.arch.experts, float32_router=False))
    assert _off(*(scores(model, dtype=jnp.bfloat16) for model in (wrong, right))) > 1e-5


@only_thorough
def test_the_norms_of_latent_attention(built, load_with):
    folder = built("deepseek_v3", "plain")
    right = load_with(folder)
    wrong = load_with(folder, latent=replace(right.source.config.arch.latent, norm_eps=1e-2))
    assert _off(scores(wrong), scores(right)) > 1e-4


@pytest.mark.parametrize("fact", HEAD)
def test_a_fact_of_a_language_models_head(fact, tmp_path, load_with):
    family, wrong = HEAD[fact]
    folder, (ids, mask) = causal.build(tmp_path, family, tie=False), causal.rows()
    logits = load_with(folder, AutoModelForCausalLM)(ids, mask).logits
    assert _off(np.asarray(load_with(folder, AutoModelForCausalLM, **{fact: wrong})(ids, mask).logits), logits) > 1e-4


def test_the_bias_of_a_language_models_head(tmp_path, load_with):
    folder = causal.build(tmp_path, "phi", tie=False)
    right, wrong = load_with(folder, AutoModelForCausalLM), load_with(folder, AutoModelForCausalLM, head_bias=False)
    assert right.params.keys() - wrong.params.keys() == {"lm_head.bias"}


@pytest.mark.parametrize("fact", usually(SHOWN.__contains__, EXPERTS))
def test_a_fact_of_the_experts_value(fact, built, load_with):
    family, name, wrong = EXPERTS[fact]
    folder = built(family, name)
    right = load_with(folder)
    experts = replace(right.source.config.arch.experts, **{fact: wrong})
    assert _off(scores(load_with(folder, experts=experts)), scores(right)) > 1e-4


@only_thorough
@pytest.mark.parametrize("fact", SWIGLU)
def test_a_fact_of_the_clamped_gate(fact, built, load_with):
    folder = built("gpt_oss", "clamped")
    right = load_with(folder)
    experts = right.source.config.arch.experts
    wrong = replace(experts, swiglu=replace(experts.swiglu, **{fact: SWIGLU[fact]}))
    assert _off(scores(load_with(folder, experts=wrong)), scores(right)) > 1e-4


@only_thorough
@pytest.mark.parametrize("fact", SPARSE_MIXER)
def test_a_fact_of_the_sparse_mixer(fact, built, load_with):
    folder = built("phimoe", "plain")
    right = load_with(folder)
    experts = right.source.config.arch.experts
    wrong = replace(experts, sparse_mixer=replace(experts.sparse_mixer, **{fact: SPARSE_MIXER[fact]}))
    key = {"router_key": jax.random.key(0)} if fact == "input_jitter" else {}  # only used in training
    assert _off(scores(load_with(folder, experts=wrong), **key), scores(right, **key)) > 1e-4


@pytest.mark.parametrize("fact", usually(SHOWN.__contains__, ROPE))
def test_a_fact_of_rope(fact, built, load_with):
    family, name, wrong = ROPE[fact]
    folder = built(family, name)
    right = load_with(folder)
    ropes = tuple(replace(rope, **{fact: wrong}) for rope in right.source.config.arch.ropes)
    assert _off(scores(load_with(folder, ropes=ropes)), scores(right)) > 1e-4


@pytest.mark.parametrize("fact", usually(SHOWN.__contains__, DROPOUTS))
def test_a_dropout(fact, built, load_with):
    folder = built(*DROPOUTS[fact])
    dropped = scores(load_with(folder, **{fact: 0.3}), dropout_key=jax.random.key(0))
    assert _off(dropped, scores(load_with(folder), dropout_key=jax.random.key(0))) > 1e-2


def test_positions_that_count_visible_tokens(built, load_with):
    folder, (_, mask) = built("opt", "plain"), variants.rows()
    wrong = scores(load_with(folder, counts_visible=False), valid=mask.astype(bool))
    assert _off(wrong, scores(load_with(folder), valid=mask.astype(bool))) > 1e-4


@only_thorough
def test_padding_idx(built, load_with):
    """The pad token's row has no gradient; with a wrong value, another row has none."""
    folder = built("llama", "plain")
    ids = np.asarray([[5, 0, 6, 7]])

    def embedding_gradient(model):
        def total(weight):
            params = model.params | {"decoder.embed.weight": weight}
            return merge(model.graph, params)(ids, np.arange(4)[None], np.asarray([3])).sum()

        with jax.disable_jit():
            return np.asarray(jax.grad(total)(model.params["decoder.embed.weight"]))[[0, 5]].any(axis=1)

    assert embedding_gradient(load_with(folder)).tolist() == [False, True]
    assert embedding_gradient(load_with(folder, padding_idx=5)).tolist() == [True, False]
    assert embedding_gradient(load_with(folder, padding_idx=None)).tolist() == [True, True]


def test_initializer_range(built, load_with):
    folder = built("llama", "tied")  # a causal model, so its head is initialized randomly
    drawn, wide = load_with(folder).params, load_with(folder, initializer_range=0.2).params
    np.testing.assert_allclose(wide["score.weight"], 2 * drawn["score.weight"], rtol=1e-6)


def test_tied_embeddings_is_the_flag_of_the_config(built, load_with):
    assert load_with(built("llama", "tied")).source.config.arch.tied_embeddings
    assert not load_with(built("llama", "plain")).source.config.arch.tied_embeddings


def _off(found, wanted):
    return np.abs(found - wanted).max() / np.abs(wanted).max()
