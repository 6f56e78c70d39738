"""Every family's causal language model: logits, gradients and saved files match transformers."""

from __future__ import annotations

import json

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from compat_tests.effort import only_thorough, usual, usually
from compat_tests.models import causal, variants
from compat_tests.models.families import GENERATED, UNLIKE
from trl_jax.hub.auto import AutoModelForCausalLM
from trl_jax.losses.supervised import load_balancing_loss
from trl_jax.models.model import merge

torch = pytest.importorskip("torch")

QUICKLY = {"xla_backend_optimization_level": 0}
WITH_GRADIENTS = ("apertus", "cohere", "gemma2", "gpt_neox", "granite", "llama", "phi", "olmoe", "gpt_oss")
BALANCED = (
    "ernie4_5_moe", "gpt_oss", "granitemoe", "granitemoehybrid", "minimax_m2", "mixtral", "olmoe", "phimoe",
    "qwen2_moe", "qwen3_5_moe_text", "qwen3_moe",
)  # fmt: skip
ROUTERS = (".gate.weight", ".router.weight")  # transformers' names
TIED = [(family, True) for family in ("llama", "phi", "gpt2")]
CASES = [(family, tie) for family in causal.DECODERS for tie in (False, True)]


@pytest.fixture(scope="module")
def folder_of(tmp_path_factory):
    folders = {}

    def build(family: str, tie: bool):
        if (family, tie) not in folders:
            folders[family, tie] = causal.build(tmp_path_factory.mktemp(f"{family}-{tie}"), family, tie=tie)
        return folders[family, tie]

    return build


@pytest.mark.parametrize(
    ("family", "tie"), usually(lambda *case: (case[0] in UNLIKE - GENERATED and not case[1]) or case in TIED, CASES)
)
def test_logits_and_files(family, tie, folder_of, tmp_path):
    folder, (ids, mask) = folder_of(family, tie), causal.rows()
    model = AutoModelForCausalLM.from_pretrained(folder)
    with torch.no_grad():
        wanted = causal.forward(causal.reference(folder), ids, mask).numpy()
    seen = mask.astype(bool)
    assert wanted[seen].std() > 0.03
    variants.assert_close(np.asarray(model(ids, mask).logits)[seen], wanted[seen], 1e-5, "logits")
    model.save_pretrained(tmp_path)
    for name in ("model.safetensors", "generation_config.json"):
        assert (tmp_path / name).read_bytes() == (folder / name).read_bytes(), name
    before, after = (json.loads((path / "config.json").read_text()) for path in (folder, tmp_path))
    assert before == after


@usual("ernie4_5_moe", "gpt_neox", "granitemoehybrid", "lfm2_moe", "mixtral", "nemotron_h", "qwen3_moe")
@pytest.mark.parametrize("family", causal.DECODERS)
def test_parameters_have_the_names_and_shapes_of_transformers(family, folder_of):
    folder = folder_of(family, False)
    wanted = {name: one.detach().numpy() for name, one in causal.reference(folder).named_parameters()}
    model = AutoModelForCausalLM.from_pretrained(folder)
    found = dict(model.named_parameters())
    # Not a parameter here.
    assert found.keys() == {name for name in wanted if not name.endswith("e_score_correction_bias")}
    assert wanted.keys() <= set(model.names())
    for name, values in found.items():
        np.testing.assert_array_equal(values, wanted[name], name)


@usual("llama-True", "gpt_oss-True")
@pytest.mark.parametrize(
    ("family", "tie"),
    usually(lambda family, tie: family in UNLIKE and tie, [(f, tie) for f in WITH_GRADIENTS for tie in (False, True)]),
)
def test_log_probabilities_and_gradients(family, tie, folder_of, tmp_path):
    folder, (ids, mask) = folder_of(family, tie), causal.rows()
    reads, targets = causal.reads_and_targets(ids, mask)
    pull = np.linspace(-1.0, 1.5, len(reads), dtype=np.float32)
    model = AutoModelForCausalLM.from_pretrained(folder)

    def pulled(params):
        places = np.broadcast_to(np.arange(ids.shape[1], dtype=np.int32), ids.shape)
        causal_lm = merge(model.graph, params)
        found = causal_lm(jnp.asarray(ids), places, reads, targets=targets, valid=jnp.asarray(mask, bool))
        return jnp.sum(found.logps * pull), found

    gradients, found = jax.jit(jax.grad(pulled, has_aux=True), compiler_options=QUICKLY)(model.params)
    theirs = causal.reference(folder)
    logps = torch.log_softmax(causal.forward(theirs, ids, mask), -1).reshape(-1, model.vocab_size)[reads[:-2]]
    at_target = logps[torch.arange(len(logps)), torch.tensor(targets[:-2])]
    variants.assert_close(found.logps[:-2], at_target.detach().numpy(), 1e-5, "log-probabilities")
    entropy = -(logps.exp() * logps).sum(-1).detach().numpy()
    variants.assert_close(found.entropy[:-2], entropy, 1e-4, "entropy")
    assert not any(np.any(values[-2:]) for values in found)
    (at_target * torch.tensor(pull[:-2])).sum().backward()
    wanted = variants.reference_gradients(theirs, tmp_path)
    read = dict(model.backend.on_disk(gradients))
    assert set(read) == set(wanted)
    for tensor, values in wanted.items():
        variants.assert_close(read[tensor], values, 1e-4, tensor)


@pytest.mark.parametrize(
    ("family", "tie"),
    usually(lambda family, _: family in UNLIKE, [(family, False) for family in causal.DECODERS] + TIED),
)
def test_bfloat16_shards_come_back_to_the_byte(family, tie, folder_of, tmp_path):
    theirs = causal.reference(folder_of(family, tie), "bfloat16")
    theirs.save_pretrained(tmp_path / "in", max_shard_size="100KB")
    model = AutoModelForCausalLM.from_pretrained(tmp_path / "in", dtype="auto")
    assert ("lm_head.weight" in model.params) != tie
    model.save_pretrained(tmp_path / "out")
    weights = sorted(path.name for path in (tmp_path / "in").glob("*.safetensors"))
    assert len(weights) > 1
    for name in weights:
        assert (tmp_path / "out" / name).read_bytes() == (tmp_path / "in" / name).read_bytes(), name


def test_the_head_computes_in_the_runs_dtype(folder_of):
    """Logits are rounded to bfloat16 as under autocast, and differ no more from float32 than torch's do."""
    folder, (ids, mask) = folder_of("llama", False), causal.rows()
    model, reference = AutoModelForCausalLM.from_pretrained(folder), causal.reference(folder)
    places = np.broadcast_to(np.arange(ids.shape[1], dtype=np.int32), ids.shape)
    run = jax.jit(lambda params: merge(model.graph, params)(ids, places, None, valid=mask > 0, dtype=jnp.bfloat16))
    ours = np.asarray(run(model.params)).reshape(*ids.shape, -1)[mask > 0]
    np.testing.assert_array_equal(ours, ours.astype(jnp.bfloat16).astype(np.float32))
    with torch.no_grad():
        exact = causal.forward(reference, ids, mask).numpy()[mask > 0]
        theirs = causal.forward(reference.to(torch.bfloat16), ids, mask).float().numpy()[mask > 0]
    off, theirs_off = (np.sqrt(np.mean((found - exact) ** 2)) for found in (ours, theirs))
    assert 1e-4 * exact.std() < off <= theirs_off


@only_thorough
@pytest.mark.parametrize("family", usually("mixtral".__eq__, BALANCED))
def test_the_load_balancing_loss(family, folder_of):
    """Over the visible tokens of all layers, with its gradient."""
    folder, (ids, mask) = folder_of(family, False), causal.rows()
    ids, mask = ids[:2], mask[:2]  # right-padded rows: the others have tokens that see nothing
    model, reference = AutoModelForCausalLM.from_pretrained(folder), causal.reference(folder)
    options = {"attention_mask": torch.tensor(mask), "output_router_logits": True, "use_cache": False}
    wanted = reference(input_ids=torch.tensor(ids), **options).aux_loss
    wanted.backward()
    run = next(run for run in model.source.config.arch.runs if run.kind.experts)
    layer = reference.model.layers[run.first]
    (router,) = (p.grad for n, p in layer.named_parameters() if n.endswith(ROUTERS))
    places = np.broadcast_to(np.arange(ids.shape[1], dtype=np.int32), ids.shape)

    def loss(params):
        arguments = {"targets": np.asarray([3], np.int32), "valid": mask > 0, "router_token_count": mask > 0}
        _, sums = merge(model.graph, params)(ids, places, np.asarray([5], np.int32), **arguments)
        return load_balancing_loss(sums)

    found, gradients = jax.jit(jax.value_and_grad(loss), compiler_options=QUICKLY)(model.params)
    np.testing.assert_allclose(found, wanted.item(), rtol=1e-5)
    variants.assert_close(gradients[f"decoder.{run.name}.mlp.router.weight"][0], router.numpy(), 1e-4)
