"""Models whose routers sample experts in training match transformers in train mode, given the same random numbers."""

from __future__ import annotations

import json

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from compat_tests.effort import only_thorough, thorough
from compat_tests.models import causal, variants
from compat_tests.models.torch_draws import TorchDraws
from trl_jax.hub.auto import AutoModelForCausalLM
from trl_jax.hub.families import read_arch
from trl_jax.losses.supervised import load_balancing_loss
from trl_jax.models.model import merge
from trl_jax.nn.linear import Stream, stream_keys

torch = pytest.importorskip("torch")

QUICKLY = {"xla_backend_optimization_level": 0}
INPUT_JITTER, BALANCED = 0.2, 3.0
KEY = jax.random.key(9)


@pytest.fixture(scope="module")
def folder(tmp_path_factory):
    facts = {"input_jitter_noise": INPUT_JITTER}
    return causal.build(tmp_path_factory.mktemp("phimoe"), "phimoe", tie=False, **facts)


def losses(model, ids, reads, targets, pull):
    """params, options -> the weighted sum of log-probabilities plus the load-balancing loss, and both."""
    places = np.broadcast_to(np.arange(ids.shape[1], dtype=np.int32), ids.shape)

    def total(params, **options):
        options |= {"targets": targets, "router_token_count": jnp.ones(ids.shape, jnp.int32)}
        outputs, sums = merge(model.graph, params)(jnp.asarray(ids), places, reads, **options)
        aux = load_balancing_loss(sums)
        return jnp.sum(outputs.logps * pull) + BALANCED * aux, (outputs.logps, aux)

    return total


@pytest.mark.parametrize("remat", [thorough(False), True])
def test_values_and_gradients_in_training(remat, folder, monkeypatch, tmp_path):
    ids, mask = (rows[[0, 5]] for rows in causal.rows())  # rows without padding
    assert mask.all()
    reads, targets = causal.reads_and_targets(ids, mask)
    pull = np.linspace(-1.0, 1.5, len(reads), dtype=np.float32)
    pull[-2:] = 0
    model, reference = AutoModelForCausalLM.from_pretrained(folder), causal.reference(folder).train()
    total = losses(model, ids, reads, targets, pull)
    run = jax.value_and_grad(lambda params: total(params, router_key=KEY, remat=remat), has_aux=True)
    (_, (logps, aux)), gradients = jax.jit(run, compiler_options=QUICKLY)(model.params)

    draws, arch = TorchDraws(monkeypatch), model.source.config.arch
    for key in stream_keys(KEY, Stream.ROUTERS, arch.num_layers):
        draws.of_jittered_input(key, (*ids.shape, arch.hidden_size), INPUT_JITTER)
        draws.of_sparse_mixer(key, (ids.size, arch.experts.count))
    out = reference(input_ids=torch.tensor(ids), use_cache=False, output_router_logits=True)
    assert draws.used_up
    wanted = torch.log_softmax(out.logits, -1).reshape(-1, model.vocab_size)[torch.tensor(reads), torch.tensor(targets)]
    wanted = wanted[:-2]
    variants.assert_close(logps[:-2], wanted.detach().numpy(), 1e-5, "log-probabilities")
    np.testing.assert_allclose(aux, out.aux_loss.item(), rtol=1e-5)
    ((wanted * torch.tensor(pull[:-2])).sum() + BALANCED * out.aux_loss).backward()
    theirs = variants.reference_gradients(reference, tmp_path)
    found = dict(model.backend.on_disk(gradients))
    assert set(found) == set(theirs)
    for tensor, values in theirs.items():
        variants.assert_close(found[tensor], values, 1e-4, tensor)


@only_thorough  # training/test_noise.py compares evaluation with training
def test_without_a_key_nothing_is_drawn(folder):
    """Evaluation and generation match transformers' eval mode, which the tests of all families compare."""
    ids, mask = causal.rows()
    reads, targets = causal.reads_and_targets(ids, mask)
    model = AutoModelForCausalLM.from_pretrained(folder)
    total = jax.jit(losses(model, ids, reads, targets, np.zeros(len(reads), np.float32)), compiler_options=QUICKLY)
    calm = total(model.params)[1][0]
    drawn, same, other = (total(model.params, router_key=key)[1][0] for key in (KEY, KEY, jax.random.key(10)))
    np.testing.assert_array_equal(drawn, same)
    assert np.abs(drawn - calm).max() > 1e-2 and np.abs(drawn - other).max() > 1e-2
    with_dropout = total(model.params, dropout_key=KEY)[1][0]  # this model has no dropout
    np.testing.assert_allclose(with_dropout, calm, atol=1e-5)


@pytest.mark.parametrize(
    "values",
    [
        {"num_experts_per_tok": 1}, {"num_local_experts": 1}, {"num_experts": 5}, {"hidden_dropout": 0.1},
        {"rope_parameters": {"rope_type": "linear", "factor": 2.0, "short_mscale": 1.0}},
    ],
    ids=str,
)  # fmt: skip
def test_values_that_are_not_computed_are_refused(values, folder):
    path = folder / "config.json"
    raw, [key] = json.loads(path.read_text()) | values, values
    named = "long_mscale" if key == "rope_parameters" else key
    with pytest.raises(ValueError, match=f"{named} must be .*, got "):
        read_arch(raw, path)


@only_thorough
def test_other_ropes_are_scaled_by_length_too(tmp_path):
    """In transformers, every type except the default is."""
    linear = {"rope_type": "linear", "rope_theta": 300.0, "factor": 3.0, "short_mscale": 1.1, "long_mscale": 0.6}
    for original in (16, 200):
        rope = linear | {"original_max_position_embeddings": original}
        folder, (ids, mask) = tmp_path / str(original), causal.rows()
        causal.build(folder, "phimoe", tie=False, rope_parameters=rope)
        with torch.no_grad():
            wanted = causal.forward(causal.reference(folder), ids, mask).numpy()
        found, seen = np.asarray(AutoModelForCausalLM.from_pretrained(folder)(ids, mask).logits), mask > 0
        variants.assert_close(found[seen], wanted[seen], 1e-5, "logits")
