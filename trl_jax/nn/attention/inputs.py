"""Inputs of attention layers, and sequence parallelism by stripes."""

from __future__ import annotations

from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
from jax.sharding import PartitionSpec

from trl_jax.core.outputs import Packed
from trl_jax.mesh.mesh import SEQUENCE, TENSOR, as_summed, psum
from trl_jax.nn.cache import CacheFill, LayerCache, NewTokens
from trl_jax.nn.text_order import PreviousTokens, TextOrder

# Inputs


class LayerInputs(NamedTuple):
    """The inputs that differ between layers: arrays with a leading layer axis L for the scan, or the inputs of one
    layer.

    rope: int32, index of the layer's rope. scale: float32. window, chunk: int32. None if all layers are alike.
    embedded: `[R, T, P]`, the layer's own token embeddings; None if there are none.
    number: int32, the index of the layer, if image features are added after layers; else None.
    image_attention: bool, as in `Arch`; None if no layer has it.
    """

    rope: jax.Array | None = None
    scale: jax.Array | None = None
    window: jax.Array | None = None
    chunk: jax.Array | None = None
    embedded: jax.Array | None = None
    number: jax.Array | None = None
    image_attention: jax.Array | None = None


class AttentionInputs(NamedTuple):
    """What the queries of a layer attend to, and how positions and scores are computed.

    scale: multiplies the scores before the softmax; a float, or a float32 scalar if layers differ.
    cos, sin: float32 `[R, T, 1, C / 2]` for `rotate`; with a leading axis of ropes until `of_layer` selects one. None:
        no positions.
    query_scale: float32 `[R, T, 1, 1]`, multiplies the queries, or None.
    window: int32 scalar, or `[R, T]` per query; a query at t attends to keys s with |t - s| < window. None: no limit.
    ahead: int32 `[R, T]`, how many later tokens of its text a causal query also attends to, regardless of the window
        (see `tokens_ahead`). None: none.
    in_text: int32 `[R, T]`, position of each token in its text, if layers attend within chunks; else None.
    valid: bool `[R, T]`, keys that may be attended to. None for packed rows, and for causal attention with padding only
        on the right.
    packed: what each token attends to, for rows of several texts; None if each row is one text.
    striped: how tokens are split over the sequence axis of the mesh; queries and `packed` are then local to this
        device. None if every device has all tokens.
    previous: the preceding tokens of each token, for convolutions on packed rows; None if each row is one text.
    order: the texts of packed rows, for recurrent layers; None if each row is one text.
    lengths: int32 `[R]`, text lengths, if the recurrent state after the last token of each text is needed; else None.
    embedded: as in `LayerInputs`; not used by attention.
    distances: `[2 x span, D]`, the table of disentangled attention, or None.
    reused: keys and values of an earlier layer, for a layer that computes none; else None.
    cache: the preceding tokens, as cached by this layer or by the layer whose keys and values it reuses. None if all
        tokens are computed here.
    fill: how much of the cache is filled.
    virtual: int32 `[R, T]`, the index of each virtual token, negative for other tokens, if layers have keys and values
        for virtual tokens; else None.
    """

    scale: float | jax.Array
    cos: jax.Array | None = None
    sin: jax.Array | None = None
    query_scale: jax.Array | None = None
    window: jax.Array | None = None
    ahead: jax.Array | None = None
    in_text: jax.Array | None = None
    valid: jax.Array | None = None
    packed: Packed | None = None
    striped: Striped | None = None
    previous: PreviousTokens | None = None
    order: TextOrder | None = None
    lengths: jax.Array | None = None
    embedded: jax.Array | None = None
    distances: jax.Array | None = None
    reused: tuple[NewTokens, NewTokens] | None = None
    cache: LayerCache | None = None
    fill: CacheFill | None = None
    virtual: jax.Array | None = None

    def of_layer(self, layer: LayerInputs) -> AttentionInputs:
        """Fill in the inputs of one layer."""
        inputs = self
        if self.cos is not None:
            rope = 0 if layer.rope is None else layer.rope
            inputs = inputs._replace(cos=self.cos[rope], sin=self.sin[rope])
        if layer.scale is not None:
            inputs = inputs._replace(scale=layer.scale)
        if layer.embedded is not None:
            inputs = inputs._replace(embedded=layer.embedded)
        if self.ahead is not None:
            inputs = inputs._replace(ahead=jnp.where(layer.image_attention, self.ahead, 0))
        if layer.chunk is not None:  # a chunk is a window per query that reaches back to the start of the chunk
            return inputs._replace(window=self.in_text % layer.chunk + 1)
        return inputs if layer.window is None else inputs._replace(window=layer.window)


# Sequence parallelism


class Striped(NamedTuple):
    """Sequence parallelism: blocks of `block` tokens of each row are distributed round-robin over `devices` devices.

    This balances the work under a causal mask; with contiguous shards, the last device would do most of it (Brandon et
    al. 2023, arXiv:2311.09431).
    """

    devices: int
    block: int

    def local(self, array: jax.Array, fill: int = 0) -> jax.Array:
        """This device's shard `[R, T', ...]` of all tokens `[R, T, ...]`; T is padded with `fill` to divide evenly."""
        rows, length, *rest = array.shape
        missing = -length % (self.devices * self.block)
        filled = jnp.pad(array, [(0, 0), (0, missing)] + [(0, 0)] * len(rest), constant_values=fill)
        stripes = filled.reshape(rows, -1, self.devices, self.block, *rest)
        local = jax.lax.dynamic_index_in_dim(stripes, self.number, axis=2, keepdims=False)
        return local.reshape(rows, -1, *rest)

    def gathered(self, heads: jax.Array) -> jax.Array:
        """All-gather the tokens: `[R, T, K, C]` from every device's `[R, T', K, C]`."""
        rows, _, *rest = heads.shape

        def gather(local: jax.Array) -> jax.Array:
            own = as_summed(local).reshape(rows, -1, self.block, *local.shape[2:])  # the gradient is a sum
            return jax.lax.all_gather(own, SEQUENCE, axis=2).astype(local.dtype)

        # Gather per shard of the heads: otherwise XLA would all-gather that axis, too.
        if jax.sharding.get_abstract_mesh().shape[TENSOR] > 1:
            before, after = PartitionSpec(None, None, TENSOR), PartitionSpec(None, None, None, None, TENSOR)
            gather = jax.shard_map(gather, in_specs=before, out_specs=after, axis_names={TENSOR}, check_vma=False)
        return gather(heads).reshape(rows, -1, *rest)

    def read(self, h: jax.Array, rows: jax.Array, places: jax.Array) -> jax.Array:
        """Hidden states `[N, D]` of the tokens at `places` in `rows` (int32 `[N]`), the same on each device.

        Places count the tokens of all devices; `h` `[R, T', D]` is this device's shard.
        """
        number, within = jnp.divmod(places, self.block)
        local = h[rows, number // self.devices * self.block + within]
        mine = number % self.devices == self.number
        return psum(jnp.where(mine[:, None], local, 0), SEQUENCE)

    def summed(self, sums: Any) -> Any:
        """Sum over all devices."""
        return jax.tree.map(lambda part: psum(part, SEQUENCE), sums)

    def places(self, start: int, end: int) -> jax.Array:
        """Positions in the whole row of this device's tokens `[start, end)`; `block` must be 1."""
        return self.number + self.devices * jnp.arange(start, end)

    def blocks(self, rows: int, count: int) -> jax.Array:
        """Indices of this device's blocks, `count` per row, counted along all rows: int32 `[rows x count]`."""
        first = jnp.arange(rows, dtype=jnp.int32)[:, None] * count * self.devices + self.number
        return (first + jnp.arange(count, dtype=jnp.int32) * self.devices).reshape(-1)

    @property
    def number(self) -> jax.Array:
        """The index of this device along the sequence axis."""
        return jax.lax.axis_index(SEQUENCE)


def striped(block: int) -> Striped | None:
    """How tokens are striped on the current mesh; None if every device has all of them."""
    devices = jax.sharding.get_abstract_mesh().shape.get(SEQUENCE, 1)
    return Striped(devices, block) if devices > 1 else None
