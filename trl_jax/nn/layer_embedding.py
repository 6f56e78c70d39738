"""Embeddings that each layer has of its own (Gemma 3n, Google 2025): every token's, and the way into a layer."""

from __future__ import annotations

import jax
import jax.numpy as jnp
from flax import nnx

from trl_jax.nn.linear import Embedding, Linear
from trl_jax.nn.mlp import EXACT_ACTIVATIONS
from trl_jax.nn.norm import Norm


class LayerEmbeddings(nnx.Module):
    """The embeddings of all layers: rows of a table that holds them side by side, and a projection of the model's own
    embedding, normed layer by layer; `arch` is a models.arch.Arch."""

    def __init__(self, arch):
        facts = arch.layer_embedding
        width = arch.num_layers * facts.channels
        self.table = Embedding(facts.rows, width, padding_idx=arch.padding_idx, axes=("vocab", "embed"))
        self.projection = Linear(arch.hidden_size, width, axes=("", "embed"))
        self.norm = Norm(facts.channels, kind=arch.norm, eps=arch.norm_eps)
        self.layers, self.channels = arch.num_layers, facts.channels

    def __call__(self, tokens: jax.Array, h: jax.Array, dtype: jnp.dtype) -> jax.Array:
        """Of tokens `[R, T]` with the embeddings `h` `[R, T, D]`: `[L, R, T, P]`, in `dtype`."""
        by_layer = (*tokens.shape, self.layers, self.channels)
        projected = self.projection(h.astype(dtype)) * h.shape[-1] ** -0.5
        looked_up = self.table(tokens, jnp.float32) * self.channels**0.5
        embedded = (self.norm(projected.reshape(by_layer)) + looked_up.reshape(by_layer)) * 2**-0.5
        return jnp.moveaxis(embedded.astype(dtype), 2, 0)


class LayerInput(nnx.Module):
    """A layer's own embedding of each token, gated by the residual stream and projected to its width; `arch` is a
    models.arch.Arch."""

    def __init__(self, arch):
        channels = arch.layer_embedding.channels
        self.gate = Linear(arch.hidden_size, channels, axes=("", "embed"))
        self.projection = Linear(channels, arch.hidden_size, axes=("embed", ""))
        self.norm = Norm(arch.hidden_size, kind=arch.norm, eps=arch.norm_eps)
        self.activation = EXACT_ACTIVATIONS[arch.activation]

    def __call__(self, h: jax.Array, embedded: jax.Array) -> jax.Array:
        """From `h` `[R, T, D]` and embeddings `[R, T, P]`: `[R, T, D]`, to be added to `h`."""
        return self.norm(self.projection(self.activation(self.gate(h)) * embedded))
