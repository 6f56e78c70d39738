"""What training needs of an exported model: remat, dropout, half precision, any shape; and saving it."""

from __future__ import annotations

import json

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from compat_tests.effort import only_thorough, thorough
from compat_tests.exported import configs

torch = pytest.importorskip("torch")

from compat_tests.exported.check import PULL, QUICKLY
from compat_tests.parity.reference import read_weights
from trl_jax.core.outputs import reads_of_rows
from trl_jax.hub import model_types
from trl_jax.hub.auto import (
    AutoModelForSequenceClassification,
    find_checkpoint,
)
from trl_jax.hub.torch_bridge import unloaded
from trl_jax.models.model import merge


def load(folder, **how):
    return AutoModelForSequenceClassification.from_pretrained(folder, **how)


def scorer(model, **how):
    """params -> (weighted sum, scores) of `configs.rows`, for gradients."""
    ids, mask = configs.rows()
    reads = reads_of_rows(np.zeros(len(ids), np.int32), ids.shape[1])

    def total(params):
        scores = merge(model.graph, params)(jnp.asarray(ids), None, reads, valid=jnp.asarray(mask, bool), **how)
        return jnp.sum(scores * PULL), scores

    return total


def gradients(model, **how):
    return jax.jit(jax.grad(scorer(model, **how), has_aux=True), compiler_options=QUICKLY)(model.params)


def scores(model, **how):
    return jax.jit(lambda params: scorer(model, **how)(params)[1], compiler_options=QUICKLY)(model.params)


@pytest.fixture(scope="module")
def bloom(tmp_path_factory):
    """A checkpoint with dropout in its config."""
    return configs.build(tmp_path_factory.mktemp("bloom"), "bloom", hidden_dropout=0.3, attention_dropout=0.3)


@pytest.fixture(scope="module")
def model(bloom):
    """The checkpoint loaded once, because an export takes seconds."""
    return load(bloom)


def test_one_program_serves_every_shape(bloom, model):
    theirs = configs.reference(bloom)
    for count, length in ((4, 24), (3, 150)):
        ids, mask = configs.rows(length)
        ids, mask = ids[:count], mask[:count]
        wanted = configs.scores(theirs, ids, mask).detach().numpy()
        np.testing.assert_allclose(model(ids, mask).logits[:, 0], wanted, atol=2e-5 * np.abs(wanted).max())
    [programs] = model.backend._model._programs.values()
    assert len(programs) == 1
    assert model(ids[:0], mask[:0]).logits.shape == (0, 1)


@only_thorough
def test_a_length_beyond_what_the_tracer_took_for_granted_is_exported_anew(tmp_path):
    """This attention processes tokens in blocks of 32 in an unrolled loop."""
    folder = configs.build(tmp_path, "minimax", block_size=32)
    model, theirs = load(folder), configs.reference(folder)
    for length in (32, 64):
        ids, mask = configs.rows(length)
        wanted = configs.scores(theirs, ids, mask).detach().numpy()
        np.testing.assert_allclose(model(ids, mask).logits[:, 0], wanted, atol=1e-5 * np.abs(wanted).max())
    [programs] = model.backend._model._programs.values()
    assert len(programs) == 2


@only_thorough
def test_rows_without_a_mask_and_without_a_pad_token(tmp_path):
    folder = configs.build(tmp_path, "bloom", n_layer=1, pad_token_id=None)
    ids, _ = configs.rows()
    wanted = configs.scores(configs.reference(folder), ids[:1], np.ones_like(ids[:1])).detach().numpy()
    np.testing.assert_allclose(load(folder)(ids[:1]).logits[:, 0], wanted, rtol=1e-5)
    with pytest.raises(ValueError, match="Cannot score 4 rows without config.pad_token_id"):
        load(folder)(ids)


@only_thorough
def test_the_pad_token_that_a_script_sets_is_exported(tmp_path):
    """The position that is read is part of the graph."""
    folder = configs.build(tmp_path, "bloom", pad_token_id=None)
    model, theirs = load(folder), configs.reference(folder)
    ids, mask = configs.rows()
    for pad in (0, int(ids[0, -1])):
        model.config.pad_token_id = theirs.config.pad_token_id = pad
        wanted = configs.scores(theirs, ids, mask).detach().numpy()
        np.testing.assert_allclose(model(ids, mask).logits[:, 0], wanted, atol=1e-5 * np.abs(wanted).max())


@only_thorough
def test_recomputing_changes_nothing_but_memory(model):
    kept, before = gradients(model)
    again, same = gradients(model, remat=True)
    np.testing.assert_allclose(before, same, rtol=1e-6)
    for name, gradient in kept.items():
        np.testing.assert_allclose(again[name], gradient, rtol=1e-4, atol=1e-6, err_msg=name)
    assert saved_bytes(model, remat=True) < saved_bytes(model, remat=False) / 3


def saved_bytes(model, remat) -> int:
    """Bytes of residuals that the backward pass needs, without parameters."""
    pull = jax.eval_shape(lambda params: jax.vjp(scorer(model, remat=remat), params)[1], model.params)
    return sum(x.size * x.dtype.itemsize for x in jax.tree.leaves(pull)) - sum(x.nbytes for x in model.params.values())


@pytest.mark.parametrize(("dtype", "training"), [("float32", False), thorough("bfloat16", True)])
def test_there_is_a_layer_a_piece(model, dtype, training):
    pieces = model.backend._model.program(4, 24, dtype=dtype, training=training).pieces()
    assert [piece.layer.split(".", 1)[1] for piece in pieces if piece.layer] == ["transformer.h.0", "transformer.h.1"]


@only_thorough
def test_dropout_is_drawn_from_the_key_and_nothing_else(model):
    run = jax.jit(lambda key: scorer(model, dropout_key=key)(model.params)[1], compiler_options=QUICKLY)
    one, same, other = run(jax.random.key(0)), run(jax.random.key(0)), run(jax.random.key(1))
    without = scores(model)
    np.testing.assert_array_equal(one, same)
    assert np.abs(one - other).min() > 0 and np.abs(one - without).min() > 0


@only_thorough
def test_dropout_is_the_same_when_recomputed(model):
    key = jax.random.key(3)
    kept, _ = gradients(model, dropout_key=key)
    again, _ = gradients(model, dropout_key=key, remat=True)
    for name, gradient in kept.items():
        np.testing.assert_allclose(again[name], gradient, rtol=1e-4, atol=1e-6, err_msg=name)
    dropping, calm = (model.backend._model.program(4, 24, dtype="float32", training=drops) for drops in (True, False))
    assert dropping is not calm


@only_thorough
def test_bfloat16_is_no_further_from_float32_than_torchs_autocast(tmp_path):
    folder = configs.build(tmp_path, "minimax")
    ids, mask = configs.rows()
    theirs, model = configs.reference(folder), load(folder)
    exact = configs.scores(theirs, ids, mask).detach().numpy()
    with torch.autocast("cpu", torch.bfloat16):
        rounded = configs.scores(theirs, ids, mask).detach().float().numpy()
    ours = scores(model, dtype=jnp.bfloat16)
    assert ours.dtype == jnp.float32 and 0 < np.abs(ours - exact).max() < 2 * np.abs(rounded - exact).max()


@pytest.mark.parametrize("dtype", ["float32", "bfloat16"])
@pytest.mark.parametrize("model_type", ["minimax", "albert"])
def test_an_export_is_byte_for_byte_transformers(model_type, dtype, tmp_path):
    folder = configs.build(tmp_path / "there", model_type, dtype=dtype)
    model = load(folder)
    model.save_pretrained(tmp_path / "back")
    configs.reference(folder, dtype).save_pretrained(tmp_path / "theirs")
    ours, theirs = (json.loads((tmp_path / side / "config.json").read_text()) for side in ("back", "theirs"))
    assert ours == theirs | {"use_cache": False}
    ours, theirs = ((tmp_path / side / "model.safetensors").read_bytes() for side in ("back", "theirs"))
    assert ours == theirs


def test_what_is_saved_is_what_was_trained(model, tmp_path, monkeypatch):
    monkeypatch.setattr(model, "params", {name: array * 1.25 for name, array in model.params.items()})
    model.save_pretrained(tmp_path / "moved")
    ids, mask = configs.rows()
    wanted = configs.scores(configs.reference(tmp_path / "moved"), ids, mask).detach().numpy()
    np.testing.assert_allclose(model(ids, mask).logits[:, 0], wanted, atol=2e-5 * np.abs(wanted).max())


def test_a_head_that_the_checkpoint_lacks_is_drawn_as_trls(tmp_path):
    import transformers

    folder = configs.build(tmp_path, "albert", head=False)
    transformers.set_seed(7)
    theirs = configs.reference(folder)
    before = torch.get_rng_state()
    ours = load(folder, seed=7)
    assert torch.equal(torch.get_rng_state(), before)  # the user's random stream is not disturbed
    np.testing.assert_array_equal(ours.params["classifier.weight"], theirs.classifier.weight.detach().numpy())


@only_thorough
def test_a_parameter_that_torch_does_not_train_has_no_gradient(tmp_path):
    folder = configs.build(tmp_path, "roformer")
    model = load(folder)
    [frozen] = [name for name in model.params if "embed_positions" in name]
    found, _ = gradients(model)
    assert not np.any(found[frozen]) and frozen in model.backend.undecayed


def test_norms_are_known_by_what_they_are(model):
    """transformers does not decay layer norms; this one is called ln_f."""
    assert {"transformer.ln_f.weight", "transformer.h.0.input_layernorm.bias"} <= model.backend.undecayed


@only_thorough  # test_fake_pass compares which parameters these are
def test_what_texts_do_not_use_is_neither_decayed_nor_moved(tmp_path):
    """An entity embedding has no gradient in torch, so torch does not update it."""
    model = load(configs.build(tmp_path, "luke"))
    unused = {name for name in model.params if "entity_embeddings" in name}
    assert unused and unused < model.backend.undecayed
    assert "luke.embeddings.word_embeddings.weight" not in model.backend.undecayed
    found, _ = gradients(model)
    assert not any(np.any(found[name]) for name in unused)


LONGEST = {"albert": 128, "gpt_neo": 128, "openai-gpt": 128, "biogpt": 128, "ibert": 127, "bloom": None}


@pytest.mark.parametrize(("model_type", "most"), LONGEST.items())
def test_a_text_longer_than_the_table_of_positions_is_refused(model_type, most, tmp_path):
    folder = configs.build(tmp_path, model_type, max_position_embeddings=128)
    model = load(folder)
    assert model.backend.traits.max_positions == find_checkpoint(str(folder)).max_positions == most
    if most is not None:
        ids = np.full((1, most + 1), 7)
        reference = configs.reference(folder)
        with pytest.raises((IndexError, RuntimeError)):
            configs.scores(reference, ids, np.ones_like(ids))
        assert configs.scores(reference, ids[:, 1:], np.ones_like(ids[:, 1:])).shape == (1,)
        with pytest.raises(ValueError, match=f"input_ids has {most + 1} tokens per row, .* supports {most}"):
            model(ids)


@pytest.mark.parametrize("model_type", model_types.OFFSETS)
def test_rows_that_no_position_has_are_as_many_as_transformers_leaves_out(model_type):
    parts = unloaded(configs.config(model_type)).modules()
    assert [part.offset for part in parts if "PositionalEmbedding" in type(part).__name__] == [
        model_types.OFFSETS[model_type]
    ]


def test_the_number_of_parameters_is_transformers(bloom, model):
    theirs = configs.reference(bloom)
    assert model.num_parameters() == theirs.num_parameters()
    embedded = theirs.get_input_embeddings().weight.numel()
    assert model.num_parameters(exclude_embeddings=True) == theirs.num_parameters() - embedded
    assert (
        model.vocab_size
        == json.loads((bloom / "config.json").read_text())["vocab_size"]
        == len(read_weights(bloom)["transformer.word_embeddings.weight"])
    )


def test_parameters_are_in_torchs_order_after_training(bloom, model):
    """JAX sorts the keys of dicts that it returns."""
    trained = model.with_params(dict(sorted(model.params.items())))
    wanted = [name for name, _ in configs.reference(bloom).named_parameters()]
    assert [name for name, _ in trained.named_parameters()] == wanted
