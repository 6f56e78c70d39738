"""The platform that is compiled for."""

from __future__ import annotations

import jax


def platform() -> str:
    """ "cpu", "gpu" or "tpu": that of the mesh where there is one, which may be of devices that this machine lacks."""
    of_mesh, default = jax.sharding.get_abstract_mesh().abstract_device, jax.config.jax_default_device
    if of_mesh is not None:
        return of_mesh.platform
    return jax.default_backend() if default is None else default.platform
