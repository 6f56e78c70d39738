"""Properties that hold for any weights."""

from __future__ import annotations

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from flax import nnx

from compat_tests.models import variants
from trl_jax.core.outputs import reads_of_rows
from trl_jax.hub.auto import AutoModelForSequenceClassification
from trl_jax.models.decoder import Block
from trl_jax.models.model import merge
from trl_jax.nn.attention.inputs import AttentionInputs
from trl_jax.nn.rope import rope_angles

QUICKLY = {"xla_backend_optimization_level": 0}
LAST = variants.LENGTH - 1


@pytest.fixture(scope="module")
def model(built):
    return AutoModelForSequenceClassification.from_pretrained(built("qwen3", "layer_types"))


@pytest.fixture(scope="module")
def hidden(model):
    """hidden(ids) -> `[rows, T, D]`."""

    @jax.jit
    def run(params, ids):
        return merge(model.graph, params).decoder(ids, _positions(ids)).reshape(*ids.shape, -1)

    return lambda ids: np.asarray(run(model.params, ids))


def _positions(ids):
    return jnp.broadcast_to(jnp.arange(ids.shape[1], dtype=jnp.int32), ids.shape)


@pytest.mark.parametrize("at", [0, 1, 17, LAST])
def test_a_later_token_changes_nothing_earlier(at, hidden):
    ids, _ = variants.rows()
    before, after = hidden(ids), hidden(_changed(ids, at))
    np.testing.assert_array_equal(before[:, :at], after[:, :at])
    assert np.abs(before[:, at] - after[:, at]).max() > 1e-2


def test_a_window_of_7_sees_6_back_and_not_7(model):
    ids = variants.rows()[0][:1]
    assert model.source.config.arch.windows[0] == 7
    decoder = merge(model.graph, model.params).decoder
    layer_zero = jax.jit(lambda ids: _layer(decoder, 0, decoder.embed(ids, jnp.float32), ids))
    last, changed_6, changed_7 = (
        np.asarray(layer_zero(seen))[0, LAST] for seen in (ids, _changed(ids, LAST - 6), _changed(ids, LAST - 7))
    )
    assert np.abs(changed_6 - last).max() > 1e-4
    np.testing.assert_array_equal(changed_7, last)


def _last(ids):
    return reads_of_rows(np.full(len(ids), LAST), ids.shape[1])


def _changed(ids, at):
    changed = ids.copy()
    changed[:, at] = (changed[:, at] + 100) % 512
    return changed


def _layer(decoder, index, h, ids):
    """A single layer of the stack."""
    arch = decoder.arch
    cos, sin = rope_angles(_positions(ids), arch.ropes[:1], arch.rotary_dim, ids.shape[1])
    graph, _ = nnx.split(nnx.eval_shape(lambda: Block(arch, arch.runs[0].kind)))
    _, stack = nnx.split(decoder.layers)
    window = None if arch.windows[index] is None else jnp.int32(arch.windows[index])
    return nnx.merge(graph, jax.tree.map(lambda leaf: leaf[index], stack))(
        h, AttentionInputs(arch.head_dim**-0.5, cos[0], sin[0], window=window), dtype=h.dtype
    ).h


def test_the_scanned_stack_is_its_layers_one_after_another(model, hidden):
    ids, _ = variants.rows()
    decoder = merge(model.graph, model.params).decoder

    @jax.jit
    def one_by_one():
        h = decoder.embed(ids, jnp.float32)
        for index in range(decoder.arch.num_layers):
            h = _layer(decoder, index, h, ids)
        return decoder.norm(h)

    variants.assert_close(hidden(ids), np.asarray(one_by_one()), 1e-5, "hidden states")


@pytest.mark.parametrize("pads", [1, 25])
def test_pads_to_the_right_change_nothing(pads, model):
    ids = np.random.default_rng(1).integers(1, 512, (7, LAST + 1 - pads))
    padded = np.pad(ids, ((0, 0), (0, pads)))
    alone, with_mask, without = model(ids), model(padded, (padded != 0).astype(int)), model(padded)
    variants.assert_close(with_mask.logits, np.asarray(alone.logits), 1e-6)
    variants.assert_close(without.logits, np.asarray(alone.logits), 1e-6)


def test_rows_do_not_know_each_other(model):
    ids, mask = variants.rows()
    order = [4, 2, 6, 0, 5, 1, 3]
    found = np.asarray(model(ids[order], mask[order]).logits)
    np.testing.assert_array_equal(found, np.asarray(model(ids, mask).logits)[order])


def test_remat_changes_no_value(model):
    ids, _ = variants.rows()

    def run(remat):
        def total(params):
            scorer = merge(model.graph, params)
            return scorer(ids, _positions(ids), _last(ids), remat=remat).sum()

        both = jax.value_and_grad(total)
        return str(jax.make_jaxpr(both)(model.params)), jax.jit(both, compiler_options=QUICKLY)(model.params)

    (program, (score, gradients)), (program_again, (score_again, gradients_again)) = run(False), run(True)
    assert "nothing_saveable" in program_again and "nothing_saveable" not in program
    np.testing.assert_allclose(score, score_again, rtol=1e-6)
    for path, gradient in gradients.items():
        variants.assert_close(gradients_again[path], np.asarray(gradient), 1e-5, path)


def test_bfloat16_computes_close_and_scores_in_float32(model):
    ids, _ = variants.rows()
    scorer = merge(model.graph, model.params)
    run = jax.jit(lambda dtype: scorer(ids, _positions(ids), _last(ids), dtype=dtype), static_argnums=0)
    scores, wanted = run(jnp.bfloat16), run(jnp.float32)
    assert scores.dtype == jnp.float32
    assert 1e-5 < np.abs(scores - wanted).max() / np.abs(wanted).max() < 0.1
