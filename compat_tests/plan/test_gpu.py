"""Plans for GPUs that this machine lacks: the options of their compiler, and its results where it is installed."""

from __future__ import annotations

import os
from types import SimpleNamespace

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from trl_jax.nn.attention import cudnn
from trl_jax.plan import compile
from trl_jax.plan.chips import CHIPS, topology

PACKING = cudnn._packing
GPUS = [kind for kind, chip in CHIPS.items() if chip.axes == 1]
os.environ.setdefault("JAX_SKIP_CUDA_CONSTRAINTS_CHECK", "1")
HERE = compile.no_compiler(topology("h100:1")) is None


@pytest.fixture(autouse=True)
def as_before(monkeypatch):
    monkeypatch.setattr(cudnn, "_absent", None)
    monkeypatch.setattr(cudnn, "_packing", lambda: None)


@pytest.mark.parametrize("kind", GPUS)
def test_a_description_has_the_published_figures(kind):
    told = compile.gpu_description(topology(f"{kind}:8"))
    assert f"memory_bandwidth: {int(CHIPS[kind].bandwidth)} " in told
    assert f"device_memory_size: {int(CHIPS[kind].memory)}\n" in told and told.count("{") == told.count("}")
    assert f"major: {8 if kind == 'a100' else 9} minor: 0" in told


@pytest.mark.parametrize(("count", "shape"), [(1, "1x1x1"), (4, "1x1x4"), (8, "1x1x8"), (16, "1x2x8"), (9, "1x3x3")])
def test_eight_are_a_host_and_attention_is_chosen_for_them(monkeypatch, count, shape):
    asked = []

    def described(**told):
        asked.append(told)
        return SimpleNamespace(devices=[None] * count)

    monkeypatch.setattr(compile.topologies, "get_topology_desc", described)
    place = topology(f"a100:{count}")
    assert len(compile.gpu_devices(place)) == count
    assert asked[0]["topology"] == shape and asked[0]["target_config"] == compile.gpu_description(place)
    assert cudnn._capability() == 8.0


def test_why_there_is_no_compiler(monkeypatch):
    monkeypatch.setattr(compile, "_is_installed", lambda module: False)
    assert 'pip install "trl_jax[cuda]"' in compile.no_compiler(topology("h100:1"))

    def fails(**told):
        raise jax.errors.JaxRuntimeError("no such field\nmore")

    monkeypatch.setattr(compile, "_is_installed", lambda module: True)
    monkeypatch.setattr(compile.topologies, "get_topology_desc", fails)
    assert compile.no_compiler(topology("h100:1")).endswith("does not start: no such field")


def test_a_run_has_what_xla_takes_of_a_gpu(monkeypatch):
    memory = SimpleNamespace(
        argument_size_in_bytes=1, temp_size_in_bytes=1, host_temp_size_in_bytes=0, output_size_in_bytes=1,
        alias_size_in_bytes=1, peak_memory_in_bytes=int(0.8 * CHIPS["h100"].memory),
    )  # fmt: skip
    program = SimpleNamespace(memory_analysis=lambda: memory, as_text=lambda: "")
    monkeypatch.setattr(compile.hlo, "cost", lambda text: None)
    platforms = []

    def lower(lowering_platforms):
        platforms.append(lowering_platforms)
        return SimpleNamespace(compile=lambda: program)

    found = {}
    for fraction in (None, "0.9"):
        if fraction is not None:
            monkeypatch.setenv("XLA_PYTHON_CLIENT_MEM_FRACTION", fraction)
        found[fraction] = compile.compiled(SimpleNamespace(lower=lower), topology("h100:1"))
    assert [found[None].fits, found["0.9"].fits] == [False, True] and platforms == [("cuda",)] * 2
    assert found[None].room == int(0.75 * CHIPS["h100"].memory)


@pytest.mark.skipif(not HERE, reason="JAX's plugin for NVIDIA GPUs is not installed")
@pytest.mark.parametrize("place", ["a100:1", "h100:8"])
def test_a_step_with_cudnns_kernel_is_compiled(monkeypatch, place):
    monkeypatch.setattr(cudnn, "_packing", PACKING)
    devices = np.array(compile.gpu_devices(topology(place)))[:, None]
    mesh = jax.sharding.Mesh(devices, ("fsdp", "tensor"), axis_types=(jax.sharding.AxisType.Auto,) * 2)
    rows = {"in_specs": jax.P("fsdp"), "out_specs": jax.P("fsdp"), "axis_names": {"fsdp"}, "check_vma": False}
    attend = jax.shard_map(lambda q: cudnn.attend_cudnn(q, q, q, scale=0.1), **rows)
    with jax.set_mesh(mesh):
        shape, places = (len(devices), 256, 4, 64), jax.NamedSharding(mesh, jax.P("fsdp"))
        step = jax.jit(jax.grad(lambda q: attend(q).astype(jnp.float32).sum()))
        traced = step.trace(jax.ShapeDtypeStruct(shape, jnp.bfloat16, sharding=places))
        found = compile.compiled(traced, topology(place))
    assert found.fits and found.peak > 2 * 256 * 4 * 64 * 2
