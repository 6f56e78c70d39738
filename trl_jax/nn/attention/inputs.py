"""Inputs of attention layers, which keys each query attends to, and sequence parallelism by stripes."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
from jax.sharding import PartitionSpec

from trl_jax.core.outputs import BLOCK, Packed
from trl_jax.mesh.mesh import SEQUENCE, TENSOR, as_summed, psum
from trl_jax.nn.cache import CacheFill, LayerCache, NewTokens, prompt_positions
from trl_jax.nn.text_order import PreviousTokens, TextOrder

SAVED = "attended"  # name of attention results in checkpoint policies: cheaper to save than to recompute

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

    A query attends to keys of its own text only. In a decoder, the query at position t attends to the keys at positions
    s <= t, in an encoder to all. `window` leaves those with |t - s| < window, and `ahead` adds those with
    t < s <= t + ahead. The layout of a row decides which keys are of its text:

    - one text per row (`packed` and `cache` are None): all of the row; with `valid`, only these tokens
    - several texts per row: the ranges of `packed`
    - with a `cache`: the prompt and the completion of the row in the cache, and then the row itself

    "Which keys each query attends to" below has the masks and ranges of the kernels for each layout.

    scale: multiplies the scores before the softmax; a float, or a float32 scalar if layers differ.
    cos, sin: float32 `[R, T, 1, C / 2]` for `rotate`; with a leading axis of ropes until `of_layer` selects one. None:
        no positions.
    query_scale: float32 `[R, T, 1, 1]`, multiplies the queries, or None.
    window: int32 scalar, or `[R, T]` per query. None: no limit.
    ahead: int32 `[R, T]`, see `tokens_ahead`; only in decoders. None: none.
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


# Which keys each query attends to


def padded_mask(inputs: AttentionInputs, places_T: jax.Array, last: int, *, causal: bool) -> jax.Array:
    """For rows of one text each: which keys in `[0, last)` the queries at these positions attend to. Bool,
    broadcastable to `[R, K, G, T, S]`; so are `window` and `ahead` of `inputs`, for these queries."""
    distance_TS = places_T[:, None] - jnp.arange(last)
    mask = distance_TS >= 0 if causal else jnp.ones_like(distance_TS, bool)
    if causal and inputs.ahead is not None:
        mask = -distance_TS <= inputs.ahead
    if inputs.window is not None:
        mask = mask & ((distance_TS if causal else jnp.abs(distance_TS)) < inputs.window)
    if inputs.valid is not None:
        valid = inputs.valid[:, None, None, None, :last]
        # Padding attends to itself so that no softmax is empty; bidirectionally, it can attend to any real token.
        mask = mask & (valid | (distance_TS == 0) if causal else valid)
    return mask


def cached_masks(inputs: AttentionInputs, places: int, capacity: int) -> tuple[jax.Array, jax.Array]:
    """For one more token of each completion: which of `places` prompt tokens and of `capacity` completion tokens of the
    cache it attends to, bool `[P, S]` and `[P, T]`."""
    lengths_P, new_P = inputs.fill.prompt_lengths, inputs.fill.completion_lengths
    position_P = lengths_P + new_P
    back_T, position_PS = inputs.fill.tokens_back(capacity), prompt_positions(lengths_P, places)
    seen_PS = position_PS < lengths_P[:, None]
    seen_PT = back_T <= new_P[:, None]
    if inputs.window is not None:
        window = inputs.window.reshape(len(lengths_P), -1)[:, :1] if inputs.window.ndim else inputs.window
        seen_PS &= position_P[:, None] - position_PS < window
        seen_PT &= back_T < window
    return seen_PS, seen_PT


def continued_mask(inputs: AttentionInputs, places: int, length: int) -> jax.Array:
    """For rows of `length` tokens that continue prompts: which of `places` prompt tokens of the cache and of the row's
    tokens they attend to, bool `[R, T, S]`."""
    lengths_R, new_T = inputs.fill.prompt_lengths, jnp.arange(length)
    position_RP = prompt_positions(lengths_R, places)
    position_RS = jnp.concatenate([position_RP, lengths_R[:, None] + new_T], axis=1)
    in_text_RS = jnp.concatenate([position_RP < lengths_R[:, None], jnp.ones((len(lengths_R), length), bool)], axis=1)
    distance_RTS = (lengths_R[:, None] + new_T)[:, :, None] - position_RS[:, None]
    mask = in_text_RS[:, None] & (distance_RTS >= 0)
    if inputs.window is not None:
        mask &= distance_RTS < (inputs.window[..., None] if inputs.window.ndim else inputs.window)
    return mask


class KeyRanges(NamedTuple):
    """The keys that each query attends to, `first <= s < end`: int32, `[N]` or in blocks.

    An optional second range follows the first. Either may be empty.
    """

    first: jax.Array
    end: jax.Array
    second: jax.Array | None = None
    second_end: jax.Array | None = None

    def blocks(self, queries: int, keys: int, count: int) -> jax.Array:
        """Which of `count` blocks of `keys` keys any query of a block of `queries` attends to: bool `[N, count]`."""
        starts = jnp.arange(count, dtype=jnp.int32) * keys

        def overlaps(first: jax.Array, end: jax.Array) -> jax.Array:
            first, end = (y.reshape(-1, queries, 1) for y in (first, end))
            return jnp.any(jnp.maximum(first, starts) < jnp.minimum(end, starts + keys), axis=1)

        return self._either(overlaps)

    def see(self, keys: jax.Array) -> jax.Array:
        """Whether queries `[..., N]` attend to the keys at these positions `[S]`: bool `[..., N, S]`."""
        return self._either(lambda first, end: (keys >= first[..., None]) & (keys < end[..., None]))

    def _either(self, of_range: Callable[[jax.Array, jax.Array], jax.Array]) -> jax.Array:
        in_first = of_range(self.first, self.end)
        return in_first if self.second is None else in_first | of_range(self.second, self.second_end)


def key_ranges(inputs: AttentionInputs, length: int) -> KeyRanges:
    """For packed rows: key ranges `[N]`, with keys counted along all rows, `length` per row."""
    ranges = _ranges_within_window(inputs.packed, inputs.window, inputs.striped, length)
    return ranges if inputs.ahead is None else _with_ahead(ranges, inputs, length)


def text_key_ranges(inputs: AttentionInputs) -> KeyRanges:
    """For packed rows whose keys are rearranged `by_text`: one range per query, `[N]`, with keys counted along all
    texts."""
    rows, count, length = inputs.packed.texts.places.shape
    slots = inputs.packed.texts.rows[:, 0]  # within the first text that contains the token
    place = slots + jnp.arange(rows, dtype=jnp.int32)[:, None] * (count * length)
    before = slots % length  # number of tokens before the query in its text
    if inputs.window is not None:
        before = jnp.minimum(before, inputs.window - 1)
    inside = slots < count * length
    after = 1 if inputs.ahead is None else 1 + inputs.ahead
    return KeyRanges(*(jnp.where(inside, y, 0).reshape(-1) for y in (place - before, place + after)))


def _ranges_within_window(packed: Packed, window: jax.Array | None, striped: Striped | None, length: int) -> KeyRanges:
    rows, queries = packed.first.shape
    offset = jnp.arange(rows, dtype=jnp.int32)[:, None] * length
    first, end = ((y + offset).reshape(-1) for y in (packed.first, packed.end))
    context = None
    if packed.context is not None:
        context = tuple((y + offset).reshape(-1) for y in (packed.context, packed.context_end))
    if window is None:
        return KeyRanges(first, end) if context is None else KeyRanges(*context, first, end)
    window = window.reshape(-1) if window.ndim else window
    place = _places(rows, queries, striped)
    nearest, last = jnp.maximum(first, place - window + 1), place + jnp.minimum(end - place, window)
    if context is not None:  # the first token of a branch follows the last token of its context
        begin, branch = context
        return KeyRanges(jnp.maximum(begin, branch + (place - first) - window + 1), branch, nearest, last)
    if packed.prompt is None:
        return KeyRanges(nearest, last)
    # A completion stored before its prompt: its first token follows the last token of the prompt, not its neighbor.
    prompt = (packed.prompt + offset).reshape(-1)
    before, position = place < prompt, end - 1 - place
    second = prompt + jnp.maximum(position - window + 1, 0)
    return KeyRanges(nearest, jnp.where(before, jnp.minimum(last, prompt), last), jnp.where(before, second, end), end)


def _places(rows: int, queries: int, striped: Striped | None) -> jax.Array:
    """The positions of all queries, counted along all rows: int32 `[N]`."""
    blocks = jnp.arange(rows * queries // BLOCK) if striped is None else striped.blocks(rows, queries // BLOCK)
    return (blocks[:, None] * BLOCK + jnp.arange(BLOCK, dtype=jnp.int32)).reshape(-1)


def _with_ahead(ranges: KeyRanges, inputs: AttentionInputs, length: int) -> KeyRanges:
    """Extend key ranges to the tokens that `inputs.ahead` adds. In a completion stored in reverse order, later tokens
    are to the left."""
    packed, ahead = inputs.packed, inputs.ahead
    left = 0
    if packed.prompt is not None:
        rows, queries = packed.first.shape
        prompt = packed.prompt + jnp.arange(rows, dtype=jnp.int32)[:, None] * length
        backwards = _places(rows, queries, inputs.striped).reshape(rows, queries) < prompt
        left, ahead = jnp.where(backwards, ahead, 0).reshape(-1), jnp.where(backwards, 0, ahead)
    if packed.context is None:
        return ranges._replace(first=ranges.first - left, end=ranges.end + ahead.reshape(-1))
    return ranges._replace(second_end=ranges.second_end + ahead.reshape(-1))


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
            blocks = as_summed(local).reshape(rows, -1, self.block, *local.shape[2:])  # the gradient is a sum
            return jax.lax.all_gather(blocks, SEQUENCE, axis=2).astype(local.dtype)

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
