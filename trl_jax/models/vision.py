"""Vision towers: patches of images to features that replace the embeddings of image tokens."""

from __future__ import annotations

import math
from itertools import pairwise

import jax
import jax.numpy as jnp
from flax import nnx

from trl_jax.core.outputs import Images, Packed
from trl_jax.models.arch import Connector, VisionArch
from trl_jax.models.decoder import Block, Features, apply, checkpointed, rope_inputs, scaled, stacked, whole_layer
from trl_jax.nn.attention.inputs import AttentionInputs, LayerInputs
from trl_jax.nn.layers import ACTIVATIONS, Norm
from trl_jax.nn.linear import Embedding, Linear


class VisionTower(nnx.Module):
    """Patches to hidden states: a linear patch embedding, positions, and a scanned stack of blocks."""

    def __init__(self, arch: VisionArch):
        layers, size = arch.layers, arch.layers.hidden_size
        self.arch = arch
        self.patches = Linear(math.prod(arch.kernel), size, bias=arch.patch_bias, axes=("embed", ""))
        self.class_embed = nnx.Param(jnp.zeros(size, jnp.float32), axes=("embed",)) if arch.class_token else None
        rows = arch.position_rows
        self.position_embed = None if rows is None else Embedding(rows, size)
        norm = {"kind": layers.norm, "eps": layers.norm_eps}
        self.pre_norm = Norm(size, **norm) if arch.pre_norm else None
        [run] = layers.runs
        self.layers = stacked(lambda: Block(layers, run.kind), run.count)
        self.post_norm = Norm(size, **norm) if arch.post_norm else None

    def __call__(
        self, images: Images, *, dtype: jnp.dtype = jnp.float32, remat: bool | str = False
    ) -> tuple[jax.Array, list[jax.Array]]:
        """Hidden states `[S, P, D]`, float32, of all patches after the last layer and, in a list, after each layer in
        `arch.deepstack`. `dtype` and `remat` as in `Decoder.__call__`."""
        arch, layers = self.arch, self.arch.layers
        h = self._embedded(images, dtype)
        scale = layers.head_dim**-0.5 if layers.attention_scales is None else layers.attention_scales[0]
        shared = AttentionInputs(scale, **rope_inputs(layers.ropes, images.places, layers.rotary_dim, 0))
        ranges = [Packed(images.first, images.end, None)]
        numbers = jnp.zeros(layers.num_layers, jnp.int32)
        if arch.full_layers is not None:
            ranges.append(Packed(images.window_first, images.window_end, None))
            numbers = jnp.asarray([not full for full in arch.full_layers], jnp.int32)
        first, end = (jnp.stack(bounds) for bounds in zip(*(packed[:2] for packed in ranges), strict=True))
        graph, state = nnx.split(self.layers)

        def layer(h: jax.Array, slices: tuple) -> tuple[jax.Array, None]:
            state, number = slices
            block = nnx.merge(graph, whole_layer(state, "vision.tower.layers"))
            seen = Packed(first[number], end[number], None)
            inputs = shared.of_layer(LayerInputs())._replace(packed=seen)
            return block(h, inputs, dtype=dtype).h, None

        deep, stops = [], [0, *(number + 1 for number in arch.deepstack), layers.num_layers]
        for begin, stop in pairwise(dict.fromkeys(stops)):
            slices = jax.tree.map(lambda a, begin=begin, stop=stop: a[begin:stop], (state, numbers))
            h, _ = jax.lax.scan(checkpointed(layer, remat=remat, length=stop - begin), h, slices)
            if stop - 1 in arch.deepstack:
                deep.append(h)
        return apply(self.post_norm, h), deep

    def _embedded(self, images: Images, dtype: jnp.dtype) -> jax.Array:
        h = self.patches(images.patches.astype(dtype)).astype(jnp.float32)
        if self.class_embed is not None:
            h = jnp.where(images.table[..., :1] == 0, self.class_embed[...], h)
        if self.position_embed is not None:
            positions = self.position_embed(images.table, jnp.float32)
            if images.table_weights is not None:
                positions = positions * images.table_weights[..., None]
            h = h + positions.sum(axis=-2)
        return apply(self.pre_norm, h)


class Projector(nnx.Module):
    """Hidden states of patches to features, as configured by a `Connector`."""

    def __init__(self, arch: Connector, size: int):
        whole = size if arch.pooled else size * arch.group
        normed = whole if arch.norm_grouped else size
        self.arch = arch
        self.norm = None if arch.norm is None else Norm(normed, kind=arch.norm, eps=arch.norm_eps)
        self.merge = Linear(whole, size, axes=("embed", "")) if arch.merged else None
        inner, hidden = size if arch.merged else whole, arch.hidden_size
        self.up = None if hidden is None else Linear(inner, hidden, bias=arch.bias, axes=("mlp", ""))
        self.down = Linear(hidden or inner, arch.out_size, bias=arch.bias, axes=("embed", "mlp" if hidden else ""))
        shape, axes = (arch.out_size,), ("embed",)
        if arch.separators != 1:  # checkpoints store a single separator as a vector
            shape, axes = (arch.separators, *shape), ("", *axes)
        self.separators = nnx.Param(jnp.zeros(shape, jnp.float32), axes=axes) if arch.separators else None
        self.shift, self.scale = (
            nnx.Param(jnp.full(size, value, jnp.float32), axes=("norm",)) if arch.standardized else None
            for value in (0.0, 1.0)
        )

    def __call__(self, h: jax.Array, groups: jax.Array, dtype: jnp.dtype = jnp.float32) -> jax.Array:
        """Hidden states `[S, P, D]` to features `[S, F, out]`, float32; `groups` `[S, F, K]` as in `Images`."""
        arch = self.arch
        if not arch.norm_grouped:
            h = apply(self.norm, h)
        x = jax.vmap(lambda of_shard, index: of_shard[index])(h, groups)
        x = x.swapaxes(2, 3) if arch.by_channel else x
        x = x.mean(axis=2) if arch.pooled else x.reshape(*groups.shape[:2], -1)
        x = scaled(x, arch.scale)
        if arch.standardized:
            x = (x - jax.lax.stop_gradient(self.shift[...])) * jax.lax.stop_gradient(self.scale[...])
        if arch.norm_grouped:
            x = apply(self.norm, x)
        x = apply(self.merge, x.astype(dtype))
        if self.up is not None:
            x = ACTIVATIONS[arch.activation](self.up(x))
        features = self.down(x).astype(jnp.float32)
        if self.separators is None:
            return features
        separators = self.separators[...].reshape(arch.separators, -1)
        extra = jnp.broadcast_to(separators, (len(features), *separators.shape))
        return jnp.concatenate([features, extra], axis=1)


class Vision(nnx.Module):
    """A vision tower and its connectors."""

    NAME = "vision"

    def __init__(self, arch: VisionArch):
        size = arch.layers.hidden_size
        self.tower, self.connector = VisionTower(arch), Projector(arch.connector, size)
        count, deep = len(arch.deepstack), arch.deepstack_connector
        self.deep_connectors = stacked(lambda: Projector(deep, size), count) if count else None

    def __call__(self, images: Images, *, dtype: jnp.dtype = jnp.float32, remat: bool | str = False) -> Features:
        """The features of all images; arguments as in `VisionTower.__call__`."""
        h, deep = self.tower(images, dtype=dtype, remat=remat)
        values = self.connector(h, images.groups, dtype)
        if not deep:
            return Features(values, images.at)
        graph, state = nnx.split(self.deep_connectors)

        def connect(_: None, slices: tuple) -> tuple[None, jax.Array]:
            state, h = slices
            connector = nnx.merge(graph, whole_layer(state, "vision.deep_connectors"))
            return None, connector(h, images.groups, dtype)

        return Features(values, images.at, jax.lax.scan(connect, None, (state, jnp.stack(deep)))[1])
