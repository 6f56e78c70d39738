"""Sums over real examples, without padding."""

from __future__ import annotations

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from trl_jax.losses.supervised import mean_over_shards, real_examples, summed

WEIGHT = np.array([0.5, 0.0, 0.25, 0.25], np.float32)
MICRO_BATCH = np.array([[True, True, False, False], [False, False, True, True], [False, True, False, False]])
VALUES = np.array([1.0, 1000.0, 2.0, 4.0], np.float32)


def test_examples_with_a_weight_count():
    assert real_examples(WEIGHT).tolist() == [True, False, True, True]
    assert real_examples(jnp.asarray(WEIGHT), MICRO_BATCH).tolist() == [
        [True, False, False, False], [False, False, True, True], [False] * 4
    ]  # fmt: skip


@pytest.mark.parametrize(("values", "total", "by_micro_batch"), [(VALUES, 7, [1, 6, 0]), (1.0, 3, [1, 2, 0])])
def test_sums_of_all_and_of_each_micro_batch(values, total, by_micro_batch):
    assert summed(values, real_examples(WEIGHT)) == total
    assert summed(values, real_examples(WEIGHT, MICRO_BATCH)).tolist() == by_micro_batch


@pytest.mark.parametrize("dtype", [bool, "int32", "bfloat16", "float32"])
def test_sums_are_float32(dtype):
    """In bfloat16, 256 plus one is 256."""
    total = summed(jnp.ones(257, dtype), real_examples(np.ones(257)))
    assert total.dtype == jnp.float32 and total == 257


@pytest.mark.parametrize("filler", [np.nan, np.inf])
def test_what_only_fills_the_shape_is_in_neither_sum_nor_gradient(filler):
    values = np.where(WEIGHT > 0, VALUES, filler).astype(np.float32)
    total, gradient = jax.value_and_grad(lambda values: summed(values, real_examples(WEIGHT)))(values)
    assert total == 7 and gradient.tolist() == [1, 0, 1, 1]


def test_the_mean_over_shards_is_the_value_without_several_devices():
    assert jax.jit(mean_over_shards)(np.float32(3)) == 3


def test_the_mean_over_shards_is_of_all_devices_axes():
    mesh = jax.sharding.Mesh(np.asarray(jax.devices()[:1]).reshape(1, 1), ("data", "fsdp"))
    spec = jax.sharding.PartitionSpec(("data", "fsdp"))
    of_shard = jax.shard_map(mean_over_shards, mesh=mesh, in_specs=spec, out_specs=spec, check_vma=False)
    assert jax.jit(of_shard)(np.array([3.0], np.float32)).tolist() == [3]
    assert "psum" in str(jax.make_jaxpr(of_shard)(np.array([3.0], np.float32)))
