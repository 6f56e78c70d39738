"""Texts longer than a device has room for: their tokens divided in stripes over the sequence axis of a mesh."""

from __future__ import annotations

from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
from jax.sharding import PartitionSpec

from trl_jax.core.layer_gather import SEQUENCE, TENSOR
from trl_jax.nn.platform import as_summed, psum


class Striped(NamedTuple):
    """Each row's tokens go to `devices` in turn, `block` of them at a time.

    Under a causal mask that gives each as much to see, where one contiguous part each would leave most to the last
    (Brandon et al. 2023, arXiv:2311.09431).
    """

    devices: int
    block: int

    def local(self, array: jax.Array, fill: int = 0) -> jax.Array:
        """This device's `[R, T', ...]` of all tokens `[R, T, ...]`; T is filled up with `fill` to come out even."""
        rows, length, *rest = array.shape
        missing = -length % (self.devices * self.block)
        filled = jnp.pad(array, [(0, 0), (0, missing)] + [(0, 0)] * len(rest), constant_values=fill)
        stripes = filled.reshape(rows, -1, self.devices, self.block, *rest)
        local = jax.lax.dynamic_index_in_dim(stripes, self.number, axis=2, keepdims=False)
        return local.reshape(rows, -1, *rest)

    def gathered(self, heads: jax.Array) -> jax.Array:
        """All tokens `[R, T, K, C]` of every device's `[R, T', K, C]`."""
        rows, _, *rest = heads.shape

        def gather(local: jax.Array) -> jax.Array:
            own = as_summed(local).reshape(rows, -1, self.block, *local.shape[2:])  # their gradients are
            return jax.lax.all_gather(own, SEQUENCE, axis=2).astype(local.dtype)

        if jax.sharding.get_abstract_mesh().shape[TENSOR] > 1:  # part by part of the heads: XLA would gather those
            before, after = PartitionSpec(None, None, TENSOR), PartitionSpec(None, None, None, None, TENSOR)
            gather = jax.shard_map(gather, in_specs=before, out_specs=after, axis_names={TENSOR}, check_vma=False)
        return gather(heads).reshape(rows, -1, *rest)

    def read(self, h: jax.Array, rows: jax.Array, places: jax.Array) -> jax.Array:
        """Hidden states `[N, D]`, the same on each device, of the tokens at `places` of these `rows`, int32 `[N]`.

        Places are counted over all devices; `h` `[R, T', D]` is each one's own.
        """
        number, within = jnp.divmod(places, self.block)
        local = h[rows, number // self.devices * self.block + within]
        mine = number % self.devices == self.number
        return psum(jnp.where(mine[:, None], local, 0), SEQUENCE)

    def summed(self, sums: Any) -> Any:
        """Sums over all tokens, of each device's over its own."""
        return jax.tree.map(lambda part: psum(part, SEQUENCE), sums)

    def places(self, start: int, end: int) -> jax.Array:
        """The places of this device's tokens `[start, end)` of a row among all; `block` is 1."""
        return self.number + self.devices * jnp.arange(start, end)

    def blocks(self, rows: int, count: int) -> jax.Array:
        """The numbers of this device's blocks, `count` of each row, along all rows: int32 `[rows x count]`."""
        first = jnp.arange(rows, dtype=jnp.int32)[:, None] * count * self.devices + self.number
        return (first + jnp.arange(count, dtype=jnp.int32) * self.devices).reshape(-1)

    @property
    def number(self) -> jax.Array:
        """This device's along the axis."""
        return jax.lax.axis_index(SEQUENCE)


def striped(block: int) -> Striped | None:
    """How tokens are divided where this is traced; None where every device has them all."""
    devices = jax.sharding.get_abstract_mesh().shape.get(SEQUENCE, 1)
    return Striped(devices, block) if devices > 1 else None
