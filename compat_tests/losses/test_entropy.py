"""Which tokens have the highest entropy: against torch.quantile, for several micro-batches and several devices."""

from __future__ import annotations

import os
import subprocess
import sys

import jax
import numpy as np
import pytest

from compat_tests.effort import only_thorough
from trl_jax.losses.policy_gradient import entropy_mask, next_entropy_coef

compiled = jax.jit(entropy_mask, static_argnums=2, static_argnames="groups")
RANDOM = np.random.default_rng(3)


@pytest.mark.parametrize("top", [0.0, 0.1, 0.2, 0.25, 0.5, 0.8, 1.0])
@pytest.mark.parametrize("count", [1, 2, 3, 7, 11, 50, 256])
def test_the_quantile_is_torchs(top, count):
    """Exact to the last bit, because one of the values is often the quantile itself."""
    torch = pytest.importorskip("torch")
    values = RANDOM.gamma(2.0, 1.0, 300).astype(np.float32)
    mask = np.zeros(300, bool)
    mask[RANDOM.permutation(300)[:count]] = True
    threshold = torch.quantile(torch.tensor(values[mask]), 1 - top).item()
    found = compiled(values, mask, top)
    assert found.tolist() == (mask & (values >= np.float32(threshold))).tolist() and found.any()


def test_each_micro_batch_has_its_own_quantile():
    values, group = RANDOM.gamma(2.0, 1.0, (2, 40)), RANDOM.integers(0, 3, (2, 40))
    values = values.astype(np.float32) + group.astype(np.float32) * 10
    mask = RANDOM.random((2, 40)) < 0.8
    found = compiled(values, mask, 0.3, group=group, groups=4)  # the last group has no token
    assert found.shape == (2, 40)
    for number in range(3):
        alone = compiled(values, mask & (group == number), 0.3)
        assert alone.any() and (found & (group == number)).tolist() == alone.tolist()


def test_without_a_token():
    assert not entropy_mask(np.ones(3, np.float32), np.zeros(3), 0.5).any()


OF_DEVICES = """
import jax, numpy as np
from functools import partial
from jax.sharding import Mesh, PartitionSpec as P
from trl_jax.losses.policy_gradient import entropy_mask
values = np.random.default_rng(0).gamma(2.0, 1.0, 64).astype(np.float32) + np.arange(64, dtype=np.float32) / 20
mask = np.arange(64) % 5 != 0
mesh = Mesh(np.asarray(jax.devices()).reshape(2, 2), ("data", "sequence"))
mapped = partial(jax.shard_map, mesh=mesh, in_specs=P("data"), out_specs=P("data"), check_vma=False)
of_all = jax.jit(mapped(lambda values, mask: entropy_mask(values, mask, 0.37)))(values, mask)
of_each = np.concatenate([entropy_mask(values[i : i + 32], mask[i : i + 32], 0.37) for i in (0, 32)])
assert np.asarray(of_all).tolist() == np.asarray(entropy_mask(values, mask, 0.37)).tolist() != of_each.tolist()
"""


@only_thorough
def test_the_quantile_is_that_of_all_devices():
    """Devices along the sequence axis have the same tokens, which count once."""
    flags = os.environ.get("XLA_FLAGS", "") + " --xla_force_host_platform_device_count=4"
    environment = os.environ | {"XLA_FLAGS": flags}
    command = [sys.executable, "-c", OF_DEVICES]
    done = subprocess.run(command, capture_output=True, text=True, env=environment, timeout=300)
    assert done.returncode == 0, done.stderr


@pytest.mark.parametrize(("coef", "entropy", "after"), [
    (0.1, 0.2, 0.15), (0.1, 0.1, 0.15), (0.1, 0.21, 0.05), (0.98, 0.0, 1.0), (0.02, 5.0, 0.01), (0.1, np.inf, 0.05),
])  # fmt: skip
def test_the_coefficient_follows_the_entropy(coef, entropy, after):
    assert next_entropy_coef(coef, entropy, target=0.2, delta=0.05, least=0.01) == pytest.approx(after)
