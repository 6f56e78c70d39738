"""Rotary frequencies against transformers, exact except for the last bit."""

from __future__ import annotations

import jax.numpy as jnp
import numpy as np
import pytest

from trl_jax.hub.config_reader import ConfigReader, read_rope
from trl_jax.nn.rope import Rope, rope_angles, rotate

LLAMA3 = {
    "factor": 8.0,
    "low_freq_factor": 1.0,
    "high_freq_factor": 4.0,
    "original_max_position_embeddings": 8192,
}
KINDS = {
    "default": {"rope_type": "default"},
    "linear": {"rope_type": "linear", "factor": 2.5},
    "llama3": {"rope_type": "llama3", **LLAMA3},
    "llama3_steep": {"rope_type": "llama3", **LLAMA3, "factor": 32.0, "high_freq_factor": 1.5},
    "llama3_own_length": {
        "rope_type": "llama3",
        "factor": 4.0,
        "low_freq_factor": 1.0,
        "high_freq_factor": 4.0,
    },
    "yarn": {"rope_type": "yarn", "factor": 4.0, "original_max_position_embeddings": 32768},
    "yarn_own_length": {"rope_type": "yarn", "factor": 4.0},
    "yarn_betas": {"rope_type": "yarn", "factor": 16.0, "beta_fast": 20.0, "beta_slow": 2.0},
    "yarn_untruncated": {"rope_type": "yarn", "factor": 16.0, "truncate": False},
    "yarn_mscale": {"rope_type": "yarn", "factor": 40.0, "mscale": 1.0, "mscale_all_dim": 0.7},
    "yarn_one_mscale": {"rope_type": "yarn", "factor": 40.0, "mscale": 0.7},
    "yarn_attention": {"rope_type": "yarn", "factor": 2.0, "attention_factor": 1.7},
    "yarn_shrinking": {"rope_type": "yarn", "factor": 0.5},
    "yarn_one_pair": {
        "rope_type": "yarn",
        "factor": 4.0,
        "beta_fast": 1.0,
        "beta_slow": 1.0,
        "truncate": False,
    },
}


def config(kind: str, theta: float, head_dim: int, old: str | None):
    facts = {"model_type": "llama", "max_position_embeddings": 4096, "head_dim": head_dim}
    if old is None:
        return {**facts, "rope_parameters": {"rope_theta": theta, **KINDS[kind]}}
    scaling = dict(KINDS[kind])
    name = scaling.pop("rope_type")
    return {**facts, "rope_theta": theta, "rope_scaling": {old: name, **scaling}}


@pytest.mark.parametrize("old", [None, "type", "rope_type"])
@pytest.mark.parametrize(("theta", "head_dim"), [(10_000.0, 64), (500_000.0, 128), (1_000_000.0, 24)])
@pytest.mark.parametrize("kind", KINDS)
def test_frequencies(kind, theta, head_dim, old):
    pytest.importorskip("torch")
    from transformers import LlamaConfig
    from transformers.models.llama.modeling_llama import LlamaRotaryEmbedding

    raw = config(kind, theta, head_dim, old)
    rope = read_rope(ConfigReader(raw, "config.json"))
    theirs = LlamaConfig(**raw, hidden_size=head_dim * 2, num_attention_heads=2)
    wanted = LlamaRotaryEmbedding(theirs)
    found = rope.frequencies(head_dim, 1)
    assert found.dtype == np.float32
    np.testing.assert_allclose(found, wanted.inv_freq.numpy(), rtol=1e-7)
    assert rope.attention_factor == wanted.attention_scaling


def test_rotation_keeps_lengths_and_depends_on_distance():
    rope = read_rope(ConfigReader(config("linear", 100.0, 16, None), "config.json"))
    q, k = (np.random.default_rng(seed).normal(size=(1, 1, 1, 16)).astype(np.float32) for seed in (0, 1))

    def turned(x, position):
        [cos], [sin] = rope_angles(jnp.asarray([[position]]), [rope], 16, 1)
        return np.asarray(rotate(jnp.asarray(x), cos, sin))

    assert np.linalg.norm(turned(q, 9)) == pytest.approx(np.linalg.norm(q), rel=1e-6)
    assert np.sum(turned(q, 9) * turned(k, 4)) == pytest.approx(np.sum(turned(q, 25) * turned(k, 20)), rel=1e-4)
    assert np.sum(turned(q, 9) * turned(k, 4)) != pytest.approx(np.sum(turned(q, 9) * turned(k, 5)), rel=1e-2)


@pytest.mark.parametrize(("theta", "head_dim"), [(10_000.0, 64), (500.0, 16), (100.0, 24)])
def test_axes_that_take_frequencies_in_turn(theta, head_dim):
    torch = pytest.importorskip("torch")
    from transformers import PixtralVisionConfig
    from transformers.models.pixtral.modeling_pixtral import PixtralVisionRotaryEmbedding

    facts = {"hidden_size": 2 * head_dim, "num_attention_heads": 2}
    theirs = PixtralVisionRotaryEmbedding(PixtralVisionConfig(**facts, rope_parameters={"rope_theta": theta}))
    places = np.random.default_rng(0).integers(0, 110, (9, 2))
    wanted = theirs(torch.zeros(1), torch.tensor(places))
    axes = (0,) * (head_dim // 4) + (1,) * (head_dim // 4)
    rope = Rope(theta, "axial_in_turn", axes=axes)
    np.testing.assert_allclose(rope.frequencies(head_dim, 1), theirs.inv_freq.numpy(), rtol=1e-7)
    for found, whole in zip(rope_angles(jnp.asarray(places[None]), [rope], head_dim, 1), wanted, strict=True):
        np.testing.assert_allclose(found[0, 0, :, 0], whole[:, : head_dim // 2].numpy(), atol=1e-5)
