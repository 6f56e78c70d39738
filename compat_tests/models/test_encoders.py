"""Every encoder family in every variant: scores, gradients, loading and saving match transformers."""

from __future__ import annotations

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from safetensors.numpy import load_file, save_file

from compat_tests.effort import usual, usually
from compat_tests.models import encoders, variants
from trl_jax.hub import families
from trl_jax.hub.auto import AutoModelForSequenceClassification
from trl_jax.hub.checkpoint import save
from trl_jax.hub.config_reader import read_config
from trl_jax.hub.families import read_arch
from trl_jax.models.model import merge
from trl_jax.nn.attention import attention

torch = pytest.importorskip("torch")

QUICKLY = {"xla_backend_optimization_level": 0}  # compiles in a third of the time with the same result
WEIGHTS = "model.safetensors"
every_family = pytest.mark.parametrize("family", encoders.FAMILIES)
every_variant = pytest.mark.parametrize(("family", "name"), encoders.CASES)
# Two families are roberta under another name; parity/test_encoder_curves.py covers plain variants.
TOLD_APART = usually(
    lambda family, name: name != "plain" and family not in {"xlm-roberta", "camembert"}, encoders.CASES
)


@pytest.fixture(scope="module")
def built(tmp_path_factory):
    """built(family, name, **how) -> the folder of that variant; shared, so do not write to it."""
    folders = {}

    def build(family: str, name: str = "plain", **how):
        key = (family, name, *sorted(how.items()))
        if key not in folders:
            folders[key] = encoders.build(tmp_path_factory.mktemp(f"{family}-{name}"), family, name, **how)
        return folders[key]

    return build


def load(folder):
    return AutoModelForSequenceClassification.from_pretrained(folder)


def inputs(ids, mask):
    """Arguments of the model: tokens, positions, one read per row, and which tokens are visible."""
    positions = np.broadcast_to(np.arange(ids.shape[1], dtype=np.int32), ids.shape)
    given = {"tokens": jnp.asarray(ids), "positions": positions, "valid": jnp.asarray(mask, bool)}
    return given | {"reads": np.arange(len(ids)) * ids.shape[1]}


@usual("bert-other", "roberta-other_pad", "distilbert-other", "modernbert-old", "deberta-text", "deberta-v2-absolute")
@pytest.mark.parametrize(("family", "name"), TOLD_APART)
def test_scores_and_gradients(family, name, built):
    """Gradients of a weighted sum of scores, for every tensor on disk."""
    folder = built(family, name)
    ids, mask = encoders.rows()
    pull = np.linspace(-1.0, 1.5, len(ids), dtype=np.float32)
    model = load(folder)

    def total(params):
        scores = merge(model.graph, params)(**inputs(ids, mask))
        return jnp.sum(scores * pull), scores

    value = jax.jit(jax.value_and_grad(total, has_aux=True), compiler_options=QUICKLY)
    (_, scores), gradients = value(model.params)
    reference = variants.reference(folder)
    logits = reference(input_ids=torch.tensor(ids), attention_mask=torch.tensor(mask)).logits[:, 0]
    assert logits.std() > 0.01
    variants.assert_close(scores, logits.detach().numpy(), 1e-5)
    (logits * torch.tensor(pull)).sum().backward()
    _assert_gradients(gradients, model, {name: p.grad for name, p in reference.named_parameters()}, folder)


def _assert_gradients(gradients, model, wanted, folder):
    """Compared as checkpoints: the gradients are saved like weights."""
    out = folder / "gradients"
    save(out, gradients, model.source, changed={})
    found = load_file(out / WEIGHTS)
    assert set(found) == set(wanted)
    for tensor, gradient in wanted.items():
        right = np.zeros_like(found[tensor]) if gradient is None else gradient.numpy()
        largest = max(np.abs(right).max(), 1e-2)  # biases of keys have only rounding noise
        assert np.abs(found[tensor] - right).max() <= 1e-4 * largest, tensor


@every_variant
def test_what_is_saved_is_what_was_read(family, name, built):
    folder = built(family, name)
    model = load(folder)
    model.save_pretrained(folder / "saved")
    assert (folder / "saved" / WEIGHTS).read_bytes() == (folder / WEIGHTS).read_bytes()


@pytest.mark.parametrize("family", ["bert", "electra", "modernbert", "deberta"])
def test_parameters_have_the_names_of_transformers(family, built):
    folder = built(family)
    wanted = {name: one.detach().numpy() for name, one in variants.reference(folder).named_parameters()}
    found = dict(load(folder).named_parameters())
    assert found.keys() == wanted.keys() and all(np.array_equal(found[name], wanted[name]) for name in found)


@pytest.mark.parametrize("family", ["bert", "roberta", "modernbert", "deberta-v2"])
def test_calling_the_model(family, built):
    """With a mask, and without one."""
    folder = built(family)
    ids, mask = encoders.rows()
    model = load(folder)
    variants.assert_close(model(ids, mask).logits, variants.reference_logits(folder, ids, mask), 1e-5)
    unmasked = variants.reference_logits(folder, ids, np.ones_like(ids))
    variants.assert_close(model(ids, token_type_ids=np.zeros_like(ids)).logits, unmasked, 1e-5, "without a mask")
    with pytest.raises(ValueError, match="token_type_ids must be all 0 because single texts are scored"):
        model(ids, mask, token_type_ids=np.ones_like(ids))


@pytest.mark.parametrize("family", ["modernbert", "deberta-v2"])
def test_queries_in_blocks_score_as_in_one(family, built, monkeypatch):
    folder, (ids, mask) = built(family), encoders.rows()
    monkeypatch.setattr(attention, "QUERY_BLOCK", 13)
    model = load(folder)

    def score(params):
        return merge(model.graph, params)(**inputs(ids, mask))

    found = jax.jit(score, compiler_options=QUICKLY)(model.params)
    variants.assert_close(found, variants.reference_logits(folder, ids, mask)[:, 0], 1e-5)


def test_remat_changes_no_gradient(built):
    ids, mask = encoders.rows()
    model = load(built("modernbert"))

    def gradient(remat):
        def total(params):
            scorer = merge(model.graph, params)
            return scorer(**inputs(ids, mask), remat=remat).sum()

        program = str(jax.make_jaxpr(jax.grad(total))(model.params))
        assert ("nothing_saveable" in program) == remat
        return jax.jit(jax.grad(total), compiler_options=QUICKLY)(model.params)

    plain, again = gradient(False), gradient(True)
    for path, wanted in plain.items():
        assert np.abs(again[path] - wanted).max() <= 1e-5 * max(np.abs(wanted).max(), 1e-2), path


@every_family
def test_an_unknown_key_is_refused(family, built, monkeypatch):
    monkeypatch.setattr(families, "is_unread", lambda config_class, key: False)
    raw = read_config(built(family)) | {"attention_twist": 2}
    with pytest.raises(ValueError, match=f"does not know for model_type '{family}': attention_twist=2"):
        read_arch(raw, "config.json")


REFUSED = [
    ("bert", {"is_decoder": True}, "is_decoder must be False.*, got True"),
    ("bert", {"position_embedding_type": "relative_key"},
     "position_embedding_type must be 'absolute'.*, got 'relative_key'"),
    ("bert", {"num_attention_heads": 5}, "hidden_size must be a multiple of num_attention_heads 5.*, got 64"),
    ("roberta", {"pad_token_id": None}, "pad_token_id must be the id of a token.*, got None"),
    ("modernbert", {"rope_scaling": {"type": "linear"}}, "rope_scaling must be None"),
    ("modernbert", {"classifier_pooling": "max"}, "classifier_pooling must be one of cls, mean.*, got 'max'"),
    ("modernbert", {"initializer_cutoff_factor": 0.1},
     "initializer_cutoff_factor must be a number from 0.4, got 0.1"),
    ("modernbert", {"hidden_size": 68}, "hidden_size must be an even number of channels a head.*, got 68"),
    ("deberta", {"talking_head": True}, "talking_head must be False.*, got True"),
    ("deberta", {"pos_att_type": ["p2p"]}, "pos_att_type must be a list of c2p and p2c.*, got .*'p2p'.*"),
    ("deberta-v2", {"relative_attention": False}, "relative_attention must be True.*, got False"),
    ("deberta-v2", {"pooler_hidden_size": 32}, "pooler_hidden_size must be 64.*, got 32"),
    ("deberta-v2", {"embedding_size": 32}, "embedding_size must be 64.*, got 32"),
    ("deberta-v2", {"position_buckets": 60}, "position_buckets must be 4 or more, up to twice 18, or -1.*, got 60"),
    ("deberta-v2", {"conv_kernel_size": 4}, "conv_kernel_size must be an odd number.*, got 4"),
]  # fmt: skip


@pytest.mark.parametrize(("family", "wrong", "message"), REFUSED)
def test_what_is_not_computed_is_refused(family, wrong, message, built):
    with pytest.raises(ValueError, match=message):
        read_arch(read_config(built(family)) | wrong, "config.json")


def test_a_text_longer_than_the_positions_is_refused(built):
    model = load(built("roberta", "other_pad"))
    assert model.max_positions == 512 - 7 - 1 and load(built("modernbert")).max_positions is None
    with pytest.raises(ValueError, match="input_ids has 505 tokens per row, but the model supports 504"):
        model(np.ones((1, 505), int))
    # Padded to 512 for the computation, although the padding has no positions.
    assert np.isfinite(model(np.ones((1, 504), int)).logits).all()


HEADS = [
    *((family, "masked") for family in encoders.FAMILIES),
    *((family, "base") for family in ("bert", "roberta", "modernbert", "deberta-v2")),
    *((family, "pretraining") for family in ("bert", "electra")),
]


@pytest.mark.parametrize(("family", "head"), HEADS)
def test_a_new_head_is_drawn_as_transformers_draws_it(family, head, built):
    import transformers

    folder = built(family, "biases" if family == "modernbert" else "plain", head=head)
    transformers.set_seed(7)
    wanted = variants.reference(folder).state_dict()
    AutoModelForSequenceClassification.from_pretrained(folder, seed=7).save_pretrained(folder / "saved")
    found = load_file(folder / "saved" / WEIGHTS)
    assert set(found) == set(wanted)
    for tensor, values in found.items():
        np.testing.assert_allclose(values, wanted[tensor].numpy(), rtol=0, atol=1e-6, err_msg=tensor)


def test_the_old_names_of_norms_are_read_and_kept(built, tmp_path):
    """transformers also saves a checkpoint under its original names."""
    folder = built("bert")
    old = {"LayerNorm.weight": "LayerNorm.gamma", "LayerNorm.bias": "LayerNorm.beta"}
    tensors = load_file(folder / WEIGHTS)
    for today, name in old.items():
        tensors = {tensor.replace(today, name): values for tensor, values in tensors.items()}
    tensors["bert.embeddings.position_ids"] = np.arange(512)[None]  # a buffer in old files
    save_file(tensors, tmp_path / WEIGHTS, metadata={"format": "pt"})
    (tmp_path / "config.json").write_text((folder / "config.json").read_text())
    model, today = load(tmp_path), load(folder)
    for path, array in today.params.items():
        np.testing.assert_array_equal(model.params[path], array, err_msg=path)
    model.save_pretrained(tmp_path / "ours")
    variants.reference(tmp_path).save_pretrained(tmp_path / "theirs")
    ours, theirs = (load_file(tmp_path / side / WEIGHTS) for side in ("ours", "theirs"))
    assert set(ours) == set(theirs) and "bert.embeddings.LayerNorm.gamma" in ours


def test_positions_that_a_relative_model_does_not_use_are_dropped(built, tmp_path):
    folder = built("deberta-v2")
    tensors = load_file(folder / WEIGHTS)
    extra = {"deberta.embeddings.position_embeddings.weight": np.ones((512, 64), np.float32)}
    save_file(tensors | extra, tmp_path / WEIGHTS, metadata={"format": "pt"})
    (tmp_path / "config.json").write_text((folder / "config.json").read_text())
    load(tmp_path).save_pretrained(tmp_path / "saved")
    assert set(load_file(tmp_path / "saved" / WEIGHTS)) == set(tensors)
