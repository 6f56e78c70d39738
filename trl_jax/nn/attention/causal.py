"""Self-attention of decoders."""

from __future__ import annotations

import jax
import jax.numpy as jnp
from flax import nnx

from trl_jax.nn.attention.attend import attend
from trl_jax.nn.attention.inputs import AttentionInputs
from trl_jax.nn.dropout import Dropout
from trl_jax.nn.kv_cache import KeysValues
from trl_jax.nn.linear import Linear
from trl_jax.nn.norm import Norm
from trl_jax.nn.rope import rotate


class Attention(nnx.Module):
    """Grouped-query self-attention with rotary positions; `arch` is a models.arch.Arch."""

    def __init__(self, arch):
        size_q, size_k = arch.num_heads * arch.head_dim, arch.num_key_heads * arch.head_dim
        self.q = Linear(arch.hidden_size, size_q, bias=arch.qkv_bias, axes=("heads", "embed"))
        gate = Linear(arch.hidden_size, size_q, bias=arch.qkv_bias, axes=("heads", "embed"))
        self.gate = gate if arch.gated_attention else None
        self.k = Linear(arch.hidden_size, size_k, bias=arch.qkv_bias, axes=("kv", "embed"))
        self.v = Linear(arch.hidden_size, size_k, bias=arch.qkv_bias, axes=("kv", "embed"))
        self.o = Linear(size_q, arch.hidden_size, bias=arch.o_bias, axes=("embed", "heads"))
        self.sinks = nnx.Param(jnp.zeros(arch.num_heads, jnp.float32), axes=("heads",)) if arch.sinks else None
        self.q_norm, self.k_norm = _norm_of_heads(arch, arch.num_heads), _norm_of_heads(arch, arch.num_key_heads)
        self.arch = arch

    def __call__(
        self, x_RTD: jax.Array, inputs: AttentionInputs, dropout: Dropout | None = None
    ) -> tuple[jax.Array, KeysValues]:
        """`[R, T, D]` to the same, and the keys and values that it has made; `dropout` is for padded rows alone."""
        q_RTHC, k_RTKC, v_RTKC = self._projected(x_RTD, inputs)
        if inputs.growth is not None:
            q_RTHC = q_RTHC * inputs.growth.astype(q_RTHC.dtype)
        if inputs.striped is not None:
            k_RTKC, v_RTKC = inputs.striped.gathered(k_RTKC), inputs.striped.gathered(v_RTKC)
        scores = {"softcap": self.arch.softcap, "sinks": None if self.sinks is None else self.sinks[...]}
        out = attend(q_RTHC, k_RTKC, v_RTKC, inputs, **scores, dropout=dropout)
        out = out.reshape(*x_RTD.shape[:-1], -1)
        if self.gate is not None:
            out = out * jax.nn.sigmoid(self.gate(x_RTD))
        return self.o(out), KeysValues(k_RTKC, v_RTKC)

    def _projected(self, x_RTD: jax.Array, inputs: AttentionInputs) -> tuple[jax.Array, jax.Array, jax.Array]:
        """Queries, keys and values, normed and turned as the arch says."""
        arch = self.arch
        q, k, v = self.q(x_RTD), self.k(x_RTD), self.v(x_RTD)
        if arch.qk_norm == "full":
            q, k = self.q_norm(q), self.k_norm(k)
        if arch.clip_qkv is not None:
            q, k, v = (jnp.clip(y, -arch.clip_qkv, arch.clip_qkv) for y in (q, k, v))
        q_RTHC, k_RTKC, v_RTKC = self._heads(q), self._heads(k), self._heads(v)
        per_head = arch.qk_norm in ("head", "each_head")
        if per_head and not arch.qk_norm_after_rope:
            q_RTHC, k_RTKC = self.q_norm(q_RTHC), self.k_norm(k_RTKC)
        if inputs.cos is not None:
            interleaved = arch.rope_interleaved
            q_RTHC, k_RTKC = (rotate(y, inputs.cos, inputs.sin, interleaved=interleaved) for y in (q_RTHC, k_RTKC))
        if per_head and arch.qk_norm_after_rope:
            q_RTHC, k_RTKC = self.q_norm(q_RTHC), self.k_norm(k_RTKC)
        return q_RTHC, k_RTKC, v_RTKC

    def _heads(self, x: jax.Array) -> jax.Array:
        return x.reshape(*x.shape[:-1], -1, self.arch.head_dim)


def _norm_of_heads(arch, heads: int) -> Norm | None:
    shapes = {"head": (arch.head_dim,), "each_head": (heads, arch.head_dim), "full": (heads * arch.head_dim,)}
    return Norm(*shapes[arch.qk_norm], kind=arch.qk_norm_kind, eps=arch.norm_eps) if arch.qk_norm else None
