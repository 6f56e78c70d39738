"""The one configurable decoder."""

from __future__ import annotations

from collections.abc import Callable

import jax
import jax.numpy as jnp
import numpy as np
from flax import nnx

from trl_jax.models.arch import Arch
from trl_jax.nn.attention import Attention, Dropout
from trl_jax.nn.linear import Embedding
from trl_jax.nn.mlp import GatedMLP
from trl_jax.nn.norm import RMSNorm
from trl_jax.nn.rope import rope_angles

_NO_WINDOW = np.iinfo(np.int32).max
_PRODUCTS = jax.checkpoint_policies.dots_with_no_batch_dims_saveable


class Block(nnx.Module):
    """One layer: norm, attention, add; norm, MLP, add."""

    def __init__(self, arch: Arch):
        self.attention_norm = RMSNorm(arch.hidden_size, eps=arch.norm_eps)
        self.attention = Attention(arch)
        self.mlp_norm = RMSNorm(arch.hidden_size, eps=arch.norm_eps)
        self.mlp = GatedMLP(arch)

    def __call__(self, h: jax.Array, **seen) -> jax.Array:
        h = h + self.attention(self.attention_norm(h), **seen)
        return h + self.mlp(self.mlp_norm(h))


def stacked(make: Callable[[], nnx.Module], count: int) -> nnx.Module:
    """`count` modules in one: each parameter gets a leading axis L, for `jax.lax.scan` to walk along."""
    graph, state = nnx.split(make())
    return nnx.merge(graph, jax.tree.map(lambda leaf: jnp.broadcast_to(leaf, (count, *leaf.shape)), state))


class Decoder(nnx.Module):
    """Token ids to hidden states: embedding, a scanned stack of blocks, a last norm."""

    def __init__(self, arch: Arch):
        self.arch = arch
        self.embed = Embedding(arch.vocab_size, arch.hidden_size, padding_idx=arch.padding_idx)
        self.layers = stacked(lambda: Block(arch), arch.num_layers)
        self.norm = RMSNorm(arch.hidden_size, eps=arch.norm_eps)

    def __call__(
        self,
        tokens: jax.Array,
        positions: jax.Array,
        *,
        valid: jax.Array | None = None,
        at: jax.Array | None = None,
        dtype: jnp.dtype = jnp.float32,
        remat: bool = False,
        dropout_key: jax.Array | None = None,
    ) -> jax.Array:
        """Hidden states `[R, T, D]`, or `[R, D]` at one token of each row.

        Args:
            tokens, positions: int32 `[R, T]`.
            valid: bool `[R, T]`, tokens that others may see; None where pads only stand to the right.
            at: int32 `[R]`, the token of each row that is wanted; the last norm then runs on those alone.
            dtype: what activations are computed in; norms and softmax keep float32 inside.
            remat: the backward pass recomputes each layer from its input. Otherwise it keeps what the linear maps gave
                and recomputes the rest: to store every activation costs more than it saves.
            dropout_key: turns attention dropout on, at the rate in the config.
        """
        cos, sin = rope_angles(positions, self.arch.rope, self.arch.head_dim)
        graph, state = nnx.split(self.layers)

        def layer(h, slices):
            state, window, key = slices
            dropout = None if key is None else Dropout(self.arch.attention_dropout, key)
            return nnx.merge(graph, state)(h, cos=cos, sin=sin, valid=valid, window=window, dropout=dropout), None

        h = self.embed(tokens, dtype)
        kept = jax.checkpoint_policies.nothing_saveable if remat else _PRODUCTS
        body = jax.checkpoint(layer, prevent_cse=False, policy=kept)
        h, _ = jax.lax.scan(body, h, (state, self._windows(), self._dropout_keys(dropout_key)))
        if at is not None:
            h = jnp.take_along_axis(h, at[:, None, None], axis=1)[:, 0]
        return self.norm(h)

    def _windows(self) -> jax.Array | None:
        if all(window is None for window in self.arch.windows):
            return None
        return jnp.asarray([window or _NO_WINDOW for window in self.arch.windows], jnp.int32)

    def _dropout_keys(self, key: jax.Array | None) -> jax.Array | None:
        if key is None or self.arch.attention_dropout == 0.0:
            return None
        return jax.random.split(key, self.arch.num_layers)
