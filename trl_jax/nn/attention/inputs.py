"""Queries, keys and values, and their stripes on a sequence axis."""

from __future__ import annotations

from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
from jax.sharding import PartitionSpec

from trl_jax.core.outputs import Packed
from trl_jax.mesh.mesh import SEQUENCE, TENSOR
from trl_jax.nn.cache import CachePlaces, KeysValues, LayersCache
from trl_jax.nn.platform import as_summed, psum
from trl_jax.nn.text_order import PreviousTokens, TextOrder

# ----------------------------------------------------------------------------------------------------
# The inputs of attention beside the hidden states, as one value.


class LayerInputs(NamedTuple):
    """The part that differs from layer to layer: `[L]` arrays that a scan walks along, or the scalars of one layer.

    rope: int32, the number of its rope. scale: float32. window, chunk: int32. Each None where all layers are alike.
    embedded: `[R, T, P]`, the layer's own embedding of each token; None where there is none.
    """

    rope: jax.Array | None = None
    scale: jax.Array | None = None
    window: jax.Array | None = None
    chunk: jax.Array | None = None
    embedded: jax.Array | None = None


class AttentionInputs(NamedTuple):
    """Which keys the queries of a layer see, and how positions and scores are computed.

    scale: multiplies the scores before the softmax; a float, or a float32 scalar where layers differ.
    cos, sin: float32 `[R, T, 1, C / 2]`, as `rotate` takes them, or with a leading axis of ropes until `of_layer` picks
        one; None leaves positions out.
    query_scale: float32 `[R, T, 1, 1]`, multiplies the queries; None does not.
    window: int32 scalar, or `[R, T]` of each query; a query at t sees keys s with |t - s| < window. None: all.
    in_text: int32 `[R, T]`, the places of tokens in their texts, where layers see chunks of these; else None.
    valid: bool `[R, T]`, keys that may be seen; None where causal and every pad stands to the right of the text, and in
        packed rows.
    packed: what tokens of packed rows see; None where each row is a text.
    striped: how tokens are divided over the sequence axis of a mesh; queries, and `packed`, are then this device's.
        None where it has all of them.
    previous: the tokens before each, for convolutions along packed rows; None where each row is a text.
    order: the texts of packed rows, for layers with a state; None where each row is a text.
    lengths: int32 `[R]`, the tokens of each row's text, where a state is wanted behind its last; else None.
    embedded: the layer's own embeddings, as in `LayerInputs`; not of attention's concern.
    distances: `[2 x span, D]`, the table of disentangled attention; None elsewhere.
    reused: the keys and values of an earlier layer, for one that makes none; elsewhere None.
    cache: what the tokens before have left, this layer's or the one's whose keys and values it reuses; each row then
        has one token. None where all tokens are computed here.
    places: how much of the cache is filled.
    virtual: int32 `[R, T]`, the number of each virtual token, below 0 of others, where layers have keys and values of
        them; else None.
    """

    scale: float | jax.Array
    cos: jax.Array | None = None
    sin: jax.Array | None = None
    query_scale: jax.Array | None = None
    window: jax.Array | None = None
    in_text: jax.Array | None = None
    valid: jax.Array | None = None
    packed: Packed | None = None
    striped: Striped | None = None
    previous: PreviousTokens | None = None
    order: TextOrder | None = None
    lengths: jax.Array | None = None
    embedded: jax.Array | None = None
    distances: jax.Array | None = None
    reused: KeysValues | None = None
    cache: LayersCache | None = None
    places: CachePlaces | None = None
    virtual: jax.Array | None = None

    def of_layer(self, layer: LayerInputs) -> AttentionInputs:
        """Those of one layer, from what all layers share."""
        inputs = self
        if self.cos is not None:
            rope = 0 if layer.rope is None else layer.rope
            inputs = inputs._replace(cos=self.cos[rope], sin=self.sin[rope])
        if layer.scale is not None:
            inputs = inputs._replace(scale=layer.scale)
        if layer.embedded is not None:
            inputs = inputs._replace(embedded=layer.embedded)
        if layer.chunk is not None:  # as many as there are in the chunk up to the query
            return inputs._replace(window=self.in_text % layer.chunk + 1)
        return inputs if layer.window is None else inputs._replace(window=layer.window)


# ----------------------------------------------------------------------------------------------------
# Texts longer than a device has room for: their tokens divided in stripes over the sequence axis of a mesh.


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
