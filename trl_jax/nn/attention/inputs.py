"""The inputs of attention beside the hidden states, as one value."""

from __future__ import annotations

from typing import NamedTuple

import jax

from trl_jax.core.packed import Packed
from trl_jax.nn.attention.striped import Striped
from trl_jax.nn.cache.cache import LayersCache
from trl_jax.nn.cache.keys_values import KeysValues
from trl_jax.nn.cache.places import CachePlaces
from trl_jax.nn.recurrent.text_order import PreviousTokens, TextOrder


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
