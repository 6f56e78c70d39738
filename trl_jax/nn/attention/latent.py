"""Multi-head latent attention (DeepSeek-V2, arXiv:2405.04434, section 2.1)."""

from __future__ import annotations

import jax
import jax.numpy as jnp
from flax import nnx

from trl_jax.nn.attention.attend import attend
from trl_jax.nn.attention.inputs import AttentionInputs
from trl_jax.nn.cache.keys_values import KeysValues
from trl_jax.nn.dropout import Dropout
from trl_jax.nn.linear import Linear
from trl_jax.nn.norm import Norm
from trl_jax.nn.rope import rotate


class LatentAttention(nnx.Module):
    """Self-attention whose queries, keys and values come from a few channels; `arch` is a models.arch.Arch.

    Of the `head_dim` channels of a query or key the last `rotary_dim` know positions; those of keys are one for all
    heads.
    """

    def __init__(self, arch):
        latent, heads, hidden = arch.latent, arch.num_heads, arch.hidden_size
        size_q, bias, axes = heads * arch.head_dim, arch.qkv_bias, ("heads", "embed")
        if latent.query_rank is None:
            self.q = Linear(hidden, size_q, axes=axes)
        else:
            self.q_down = Linear(hidden, latent.query_rank, bias=bias, axes=("", "embed"))
            self.q_norm = Norm(latent.query_rank, kind=arch.norm, eps=latent.norm_eps)
            self.q = Linear(latent.query_rank, size_q, axes=("heads", ""))
        self.kv_down = Linear(hidden, latent.key_rank + arch.rotary_dim, bias=bias, axes=("", "embed"))
        self.kv_norm = Norm(latent.key_rank, kind=arch.norm, eps=latent.norm_eps)
        up = heads * (arch.head_dim - arch.rotary_dim + latent.value_dim)
        self.kv = Linear(latent.key_rank, up, axes=("heads", ""))
        self.o = Linear(heads * latent.value_dim, hidden, bias=arch.o_bias, axes=("embed", "heads"))
        self.arch = arch

    def __call__(
        self, x_RTD: jax.Array, inputs: AttentionInputs, dropout: Dropout | None = None
    ) -> tuple[jax.Array, KeysValues]:
        """`[R, T, D]` to the same, and the keys and values that it has made; `dropout` is for padded rows alone."""
        q_RTHC, (k_RTHC, v_RTHC) = self._queries(x_RTD, inputs), self._keys_values(x_RTD, inputs)
        if inputs.striped is not None:
            k_RTHC, v_RTHC = inputs.striped.gathered(k_RTHC), inputs.striped.gathered(v_RTHC)
        out = attend(q_RTHC, k_RTHC, v_RTHC, inputs, dropout=dropout)
        return self.o(out.reshape(*x_RTD.shape[:-1], -1)), KeysValues(k_RTHC, v_RTHC)

    def _queries(self, x_RTD: jax.Array, inputs: AttentionInputs) -> jax.Array:
        arch = self.arch
        q = x_RTD if arch.latent.query_rank is None else self.q_norm(self.q_down(x_RTD))
        q_RTHC = self.q(q).reshape(*x_RTD.shape[:-1], arch.num_heads, arch.head_dim)
        still, turning = jnp.split(q_RTHC, [arch.head_dim - arch.rotary_dim], axis=-1)
        return jnp.concatenate([still, self._turned(turning, inputs)], axis=-1)

    def _keys_values(self, x_RTD: jax.Array, inputs: AttentionInputs) -> tuple[jax.Array, jax.Array]:
        arch = self.arch
        down, turning = jnp.split(self.kv_down(x_RTD), [arch.latent.key_rank], axis=-1)
        kv_RTHC = self.kv(self.kv_norm(down)).reshape(*x_RTD.shape[:-1], arch.num_heads, -1)
        still, v_RTHC = jnp.split(kv_RTHC, [arch.head_dim - arch.rotary_dim], axis=-1)
        turned = jnp.broadcast_to(self._turned(turning[:, :, None], inputs), (*still.shape[:-1], arch.rotary_dim))
        return jnp.concatenate([still, turned], axis=-1), v_RTHC

    def _turned(self, x: jax.Array, inputs: AttentionInputs) -> jax.Array:
        return rotate(x, inputs.cos, inputs.sin, interleaved=self.arch.rope_interleaved)
