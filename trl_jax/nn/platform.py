"""The platform that is compiled for."""

from __future__ import annotations

import jax
import jax.numpy as jnp


def platform() -> str:
    """ "cpu", "gpu" or "tpu": that of the mesh where there is one, which may be of devices that this machine lacks."""
    of_mesh, default = jax.sharding.get_abstract_mesh().abstract_device, jax.config.jax_default_device
    if of_mesh is not None:
        return of_mesh.platform
    return jax.default_backend() if default is None else default.platform


def as_summed(value: jax.Array) -> jax.Array:
    """The value in the dtype in which devices sum it: on a CPU sixteen bits are summed as 32. XLA would do that itself,
    and ends the process instead where the sum is a shard_map's (jaxlib 0.10 to 0.12)."""
    halves = value.dtype in (jnp.bfloat16, jnp.float16) and platform() == "cpu"
    return value.astype(jnp.float32) if halves else value


def psum(value: jax.Array, axis: str) -> jax.Array:
    """`jax.lax.psum` of an array, in the dtype of `as_summed`."""
    return jax.lax.psum(as_summed(value), axis).astype(value.dtype)
