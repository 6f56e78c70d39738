"""The platform that is compiled for."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import jax
import jax.numpy as jnp


def platform() -> str:
    """ "cpu", "gpu" or "tpu": that of the mesh where there is one, which may be of devices that this machine lacks."""
    of_mesh, default = jax.sharding.get_abstract_mesh().abstract_device, jax.config.jax_default_device
    if of_mesh is not None:
        return of_mesh.platform
    return jax.default_backend() if default is None else default.platform


def undivided(call: Callable, in_specs: Any, out_specs: Any) -> Callable:
    """The function as each device computes its part, along those axes of the mesh that are left to the compiler: it
    divides no kernel, nor do JAX's own rules for one beside axes that are divided by hand."""
    axes = set(jax.sharding.get_abstract_mesh().auto_axes)
    if not axes:
        return call
    return jax.shard_map(call, in_specs=in_specs, out_specs=out_specs, axis_names=axes, check_vma=False)


def as_summed(value: jax.Array) -> jax.Array:
    """The value in the dtype in which devices sum it: on a CPU sixteen bits are summed as 32. XLA would do that itself,
    and ends the process instead where the sum is a shard_map's (jaxlib 0.10 to 0.12)."""
    halves = value.dtype in (jnp.bfloat16, jnp.float16) and platform() == "cpu"
    return value.astype(jnp.float32) if halves else value


def psum(value: jax.Array, axis: str) -> jax.Array:
    """`jax.lax.psum` of an array, in the dtype of `as_summed`."""
    return jax.lax.psum(as_summed(value), axis).astype(value.dtype)
