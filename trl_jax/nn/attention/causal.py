"""Self-attention of decoders."""

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
from trl_jax.nn.virtual_tokens import Prefix


class Attention(nnx.Module):
    """Grouped-query self-attention with rotary positions; `arch` is a models.arch.Arch, `kind` a LayerKind. `prefix`
    has keys and values of virtual tokens, where an adapter puts some before each text."""

    prefix: Prefix | None

    def __init__(self, arch, kind):
        heads, makes = arch.heads_of(kind), not kind.reuses
        size_q, size_k = arch.num_heads * heads.channels, heads.count * heads.channels
        self.q = Linear(arch.hidden_size, size_q, bias=arch.qkv_bias, axes=("heads", "embed"))
        gate = Linear(arch.hidden_size, size_q, bias=arch.qkv_bias, axes=("heads", "embed"))
        self.gate = gate if arch.gated_attention else None
        k, v = (Linear(arch.hidden_size, size_k, bias=arch.qkv_bias, axes=("kv", "embed")) for _ in range(2))
        self.k, self.v = k if makes else None, v if makes and not heads.values_are_keys else None
        self.o = Linear(size_q, arch.hidden_size, bias=arch.o_bias, axes=("embed", "heads"))
        self.sinks = nnx.Param(jnp.zeros(arch.num_heads, jnp.float32), axes=("heads",)) if arch.sinks else None
        self.q_norm = _norm_of_heads(arch, arch.num_heads, heads.channels)
        self.k_norm = _norm_of_heads(arch, heads.count, heads.channels) if makes else None
        self.v_norm = Norm(heads.channels, kind="rms_plain", eps=arch.norm_eps) if arch.v_norm and makes else None
        self.prefix = nnx.data(None)
        self.arch, self.channels, self.unplaced = arch, heads.channels, kind.unplaced

    def __call__(
        self, x_RTD: jax.Array, inputs: AttentionInputs, dropout: Dropout | None = None
    ) -> tuple[jax.Array, KeysValues]:
        """`[R, T, D]` to the same, and the keys and values that it has made; `dropout` is for padded rows alone."""
        q_RTHC, (k_RTKC, v_RTKC) = self._queries(x_RTD, inputs), inputs.reused or self._keys_values(x_RTD, inputs)
        if inputs.query_scale is not None and (self.unplaced or not self.arch.query_growth.unplaced):
            q_RTHC = q_RTHC * inputs.query_scale.astype(q_RTHC.dtype)
        scores = {"softcap": self.arch.softcap, "sinks": None if self.sinks is None else self.sinks[...]}
        out = attend(q_RTHC, k_RTKC, v_RTKC, inputs, **scores, dropout=dropout)
        out = out.reshape(*x_RTD.shape[:-1], -1)
        if self.gate is not None:
            out = out * jax.nn.sigmoid(self.gate(x_RTD))
        return self.o(out), KeysValues(k_RTKC, v_RTKC)

    def _queries(self, x_RTD: jax.Array, inputs: AttentionInputs) -> jax.Array:
        """Normed and turned as the arch says."""
        return self._turned(self._projected(self.q(x_RTD), self.q_norm), self.q_norm, inputs)

    def _keys_values(self, x_RTD: jax.Array, inputs: AttentionInputs) -> KeysValues:
        """Of all devices' tokens."""
        k = self.k(x_RTD)
        v_RTKC = self._projected(k if self.v is None else self.v(x_RTD))
        k_RTKC = self._turned(self._projected(k, self.k_norm), self.k_norm, inputs)
        v_RTKC = v_RTKC if self.v_norm is None else self.v_norm(v_RTKC)
        if self.prefix is not None and inputs.cache is None:  # what follows a cache is no virtual token
            k_RTKC, v_RTKC = self.prefix(k_RTKC, v_RTKC, inputs.virtual)
        if inputs.striped is not None:
            return KeysValues(inputs.striped.gathered(k_RTKC), inputs.striped.gathered(v_RTKC))
        return KeysValues(k_RTKC, v_RTKC)

    def _projected(self, y: jax.Array, norm: Norm | None = None) -> jax.Array:
        """As heads, normed where the norm is over all of them, and clipped."""
        if self.arch.qk_norm == "full" and norm is not None:
            y = norm(y)
        if self.arch.clip_qkv is not None:
            y = jnp.clip(y, -self.arch.clip_qkv, self.arch.clip_qkv)
        return y.reshape(*y.shape[:-1], -1, self.channels)

    def _turned(self, y: jax.Array, norm: Norm | None, inputs: AttentionInputs) -> jax.Array:
        """Queries or keys, normed head by head and turned."""
        arch, per_head = self.arch, self.arch.qk_norm in ("head", "each_head") and not self.unplaced
        if per_head and not arch.qk_norm_after_rope:
            y = norm(y)
        if inputs.cos is not None:
            cos, sin = (angle[..., : self.channels // 2] for angle in (inputs.cos, inputs.sin))
            y = rotate(y, cos, sin, interleaved=arch.rope_interleaved)
        return norm(y) if per_head and arch.qk_norm_after_rope else y


def _norm_of_heads(arch, heads: int, channels: int) -> Norm | None:
    shapes = {"head": (channels,), "each_head": (heads, channels), "full": (heads * channels,)}
    return Norm(*shapes[arch.qk_norm], kind=arch.qk_norm_kind, eps=arch.norm_eps) if arch.qk_norm else None
