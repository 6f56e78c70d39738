"""The remat policy of a step: the first one that fits, separately for each shape."""

from __future__ import annotations

import logging
from types import SimpleNamespace

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from trl_jax.training import devices
from trl_jax.training.devices import Programs, RematFallback, device_memory_limit

ROW = 1 << 10


def fits(steps, room):
    return Programs(RematFallback(steps, room), "The step")


def large(params, state, batch, rate):
    """Needs two products at the same time: 2 n^2 numbers."""
    rows = batch["tokens"]
    return jnp.linalg.norm(jnp.sort(rows @ rows.T) + jnp.sort(rows @ rows.T, axis=0)) + rate


def small(params, state, batch, rate):
    return jnp.sum(batch["tokens"]) + rate


def batch(rows):
    return {"tokens": np.ones((rows, 4), np.float32)}


def test_the_first_that_fits_is_taken_for_each_shape(caplog):
    step = fits([jax.jit(large), jax.jit(small)], 200_000)
    with caplog.at_level(logging.INFO, "trl_jax"):
        found = [float(step(None, None, batch(rows), 0.5)) for rows in (16, ROW, 16, ROW)]
    wanted = float(large(None, None, batch(16), 0.5))
    assert found == pytest.approx([wanted, 4 * ROW + 0.5] * 2)
    (line,) = [record.getMessage() for record in caplog.records if "gradient_checkpointing" in record.getMessage()]
    assert line.startswith("gradient_checkpointing recomputes whole layers: saving matrix products")
    assert line.endswith("of 0.00 GB.") and "would take 0.0" in line


class Refused:
    """A step that an accelerator's compiler refuses."""

    def __init__(self, error):
        self.error, self.tried = error, []

    def lower(self, params, state, batch, rate):
        self.tried.append(len(batch["tokens"]))
        return SimpleNamespace(compile=self.compile)

    def compile(self):
        raise jax.errors.JaxRuntimeError(self.error)


def test_what_the_compiler_refuses_does_not_fit():
    step = fits([Refused("RESOURCE_EXHAUSTED: Ran out of memory"), jax.jit(small)], 1)
    assert float(step(None, None, batch(2), 0.0)) == 8
    with pytest.raises(jax.errors.JaxRuntimeError, match="INTERNAL"):
        fits([Refused("INTERNAL: Mosaic failed"), jax.jit(small)], 1)(None, None, batch(2), 0.0)
    # The error of the last candidate is raised.
    with pytest.raises(jax.errors.JaxRuntimeError, match="RESOURCE_EXHAUSTED"):
        fits([Refused("RESOURCE_EXHAUSTED")], 1)(None, None, batch(2), 0.0)


def test_what_did_not_fit_is_not_tried_with_more():
    never = Refused("RESOURCE_EXHAUSTED")
    step = fits([never, jax.jit(small)], 1)
    assert [float(step(None, None, batch(rows), 0.0)) for rows in (8, 9, 4, 5)] == [32, 36, 16, 20]
    assert never.tried == [8, 4]


def test_the_room_is_the_devices_own_or_half_of_the_host():
    told = SimpleNamespace(memory_stats=lambda: {"bytes_limit": 1000})
    assert device_memory_limit(told) == 950
    first, again = (device_memory_limit(jax.devices("cpu")[0]) for _ in range(2))
    assert first == again > 1e8


def unnamed(name):
    raise ValueError("unrecognized configuration name")


@pytest.mark.parametrize("system", [SimpleNamespace(), SimpleNamespace(sysconf=unnamed)], ids=["Windows", "unnamed"])
def test_where_the_system_does_not_tell_its_memory_nothing_is_kept(system, monkeypatch):
    monkeypatch.setattr(devices, "os", system)
    room = device_memory_limit(jax.devices("cpu")[0])
    assert room == 0
    assert float(fits([None, jax.jit(small)], room)(None, None, batch(2), 0.0)) == 8
