"""The target platform, and workarounds for collectives and kernels on a mesh."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import jax
import jax.numpy as jnp


def platform() -> str:
    """The platform to compile for, "cpu", "gpu" or "tpu". A mesh decides, even one of devices that are not present."""
    of_mesh, default = jax.sharding.get_abstract_mesh().abstract_device, jax.config.jax_default_device
    if of_mesh is not None:
        return of_mesh.platform
    return jax.default_backend() if default is None else default.platform


def undivided(call: Callable, in_specs: Any, out_specs: Any) -> Callable:
    """Run `call` per device over the mesh axes that are left to the compiler. The compiler cannot partition a kernel,
    and JAX's own partitioning rules for one do not work inside a shard_map over other axes."""
    axes = set(jax.sharding.get_abstract_mesh().auto_axes)
    if not axes:
        return call
    return jax.shard_map(call, in_specs=in_specs, out_specs=out_specs, axis_names=axes, check_vma=False)


def as_summed(value: jax.Array) -> jax.Array:
    """Cast a value to the dtype in which devices sum it. On a CPU, 16-bit values are summed in float32: XLA would do
    that itself, but crashes if the sum is in a shard_map (jaxlib 0.10 to 0.12)."""
    halves = value.dtype in (jnp.bfloat16, jnp.float16) and platform() == "cpu"
    return value.astype(jnp.float32) if halves else value


def psum(value: jax.Array, axis: str) -> jax.Array:
    """`jax.lax.psum`, in the dtype of `as_summed`."""
    return jax.lax.psum(as_summed(value), axis).astype(value.dtype)
