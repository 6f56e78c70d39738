"""A language-model head on eight simulated devices: the results of one device, and neither logits nor weights
gathered."""

from __future__ import annotations

import re

import jax

jax.config.update("jax_num_cpu_devices", 8)

import jax.numpy as jnp
import numpy as np
import pytest
from jax.sharding import NamedSharding, PartitionSpec

from compat_tests.effort import thorough
from trl_jax.mesh.mesh import BATCH, make_mesh
from trl_jax.nn import head
from trl_jax.nn.head import token_outputs

PLACES, ROWS, VOCABULARY, WIDTH = 200, 64, 96, 12
REAL = (150, 0, 200, 60, 10, 1, 199, 64)  # number of positions with a target, per shard
COLLECTIVE = re.compile(r"= (.*) (all-gather|all-reduce|all-to-all|collective-permute|reduce-scatter)(?:-start)?\(")


@pytest.fixture(autouse=True)
def chunks_of_64(monkeypatch):
    monkeypatch.setattr(head, "LOGITS_PER_CHUNK", {"cpu": ROWS * VOCABULARY})
    monkeypatch.setattr(head, "MIN_ROWS_PER_CHUNK", {"cpu": ROWS})


def total(hidden, weight, targets):
    outputs = token_outputs(hidden, weight, targets)
    return sum(map(jnp.sum, outputs[:3])), outputs


with_gradients = jax.value_and_grad(total, argnums=(0, 1), has_aux=True)


def drawn(shards):
    draw = np.random.default_rng(0)
    hidden = draw.normal(size=(shards, PLACES, WIDTH)).astype(np.float32)
    targets = draw.integers(0, VOCABULARY, (shards, PLACES)).astype(np.int32)
    targets = np.where(np.arange(PLACES) < np.asarray(REAL[:shards])[:, None], targets, -1)
    return hidden, draw.normal(size=(VOCABULARY, WIDTH)).astype(np.float32), targets


def of_shards(mesh):
    """Each shard's outputs and gradient of the hidden states, and the sum of the weight gradients."""
    axes = tuple(axis for axis in BATCH if mesh.shape[axis] > 1)
    batch = PartitionSpec(axes)

    def of_shard(hidden, weight, targets):
        (_, outputs), (d_hidden, d_weight) = with_gradients(hidden[0], weight, targets[0])
        return jax.tree.map(lambda leaf: leaf[None], (outputs, d_hidden)), jax.lax.psum(d_weight, axes)

    def run(*arrays):
        places = {"in_specs": (batch, PartitionSpec(), batch), "out_specs": (batch, PartitionSpec())}
        if axes:
            return jax.shard_map(of_shard, mesh=mesh, **places, axis_names=set(axes), check_vma=False)(*arrays)
        with jax.sharding.use_abstract_mesh(mesh.abstract_mesh):
            return of_shard(*arrays)

    by_batch, by_vocabulary = NamedSharding(mesh, batch), NamedSharding(mesh, PartitionSpec("tensor"))
    return jax.jit(run, in_shardings=(by_batch, by_vocabulary, by_batch))


@pytest.mark.parametrize(
    "sizes",
    [{"tensor": 8}, {"data": 2, "tensor": 4}, thorough({"data": 2, "fsdp": 2, "tensor": 2}), {"data": 8}],
    ids=lambda sizes: ",".join(f"{axis}:{size}" for axis, size in sizes.items()),
)
def test_the_numbers_of_one_device(sizes):
    """Shards of the batch have from zero to four chunks, and devices along `tensor` each have a part of the vocabulary.
    Only with both do shards agree on the number of chunks."""
    mesh = make_mesh(sizes)
    hidden, weight, targets = drawn(sizes.get("data", 1) * sizes.get("fsdp", 1))
    run = of_shards(mesh).lower(hidden, weight, targets).compile()
    (outputs, d_hidden), d_weight = run(*map(jax.device_put, (hidden, weight, targets), run.input_shardings[0]))
    alone = [jax.jit(with_gradients)(one, weight, of_one) for one, of_one in zip(hidden, targets, strict=True)]
    for number, ((_, wanted), (of_hidden, _)) in enumerate(alone):
        for found, other in zip(outputs, wanted, strict=True):
            np.testing.assert_allclose(found[number], other, rtol=1e-5, atol=1e-5)
        np.testing.assert_allclose(d_hidden[number], of_hidden, rtol=1e-4, atol=1e-4)
    assert np.any(d_weight)
    np.testing.assert_allclose(d_weight, sum(of_weight for _, (_, of_weight) in alone), rtol=1e-4, atol=1e-4)
    part = VOCABULARY // sizes.get("tensor", 1), WIDTH
    sent = [found.groups() for found in map(COLLECTIVE.search, run.as_text().splitlines()) if found]
    shapes = [tuple(map(int, shape.split(","))) for text, _ in sent for shape in re.findall(r"\[([\d,]+)\]", text)]
    assert {kind for _, kind in sent} == {"all-reduce"}
    assert ("s32[]" in [text for text, _ in sent]) == (len(targets) > 1 and "tensor" in sizes)
    assert set(shapes) <= {(ROWS,), (ROWS, WIDTH), part}
