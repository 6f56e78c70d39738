"""Self-attention to both sides."""

from __future__ import annotations

import jax
from flax import nnx

from trl_jax.nn.attention.attend import attend
from trl_jax.nn.attention.inputs import AttentionInputs
from trl_jax.nn.dropout import Dropout
from trl_jax.nn.linear import Linear
from trl_jax.nn.rope import rotate


class BidirectionalAttention(nnx.Module):
    """Every token sees every other; `bias` is that of all four linear maps."""

    def __init__(self, features: int, heads: int, *, bias: bool):
        self.q = Linear(features, features, bias=bias, axes=("heads", "embed"))
        self.k, self.v = (Linear(features, features, bias=bias, axes=("kv", "embed")) for _ in range(2))
        self.o = Linear(features, features, bias=bias, axes=("embed", "heads"))
        self.head_dim = features // heads

    def __call__(self, x_RTD: jax.Array, inputs: AttentionInputs, dropout: Dropout | None = None) -> jax.Array:
        """`[R, T, D]` to the same; `dropout` is for padded rows alone."""
        heads = (*x_RTD.shape[:-1], -1, self.head_dim)
        q_RTHC, k_RTHC, v_RTHC = (linear(x_RTD).reshape(heads) for linear in (self.q, self.k, self.v))
        if inputs.cos is not None:
            q_RTHC, k_RTHC = (rotate(y, inputs.cos, inputs.sin) for y in (q_RTHC, k_RTHC))
        out = attend(q_RTHC, k_RTHC, v_RTHC, inputs, causal=False, dropout=dropout)
        return self.o(out.reshape(x_RTD.shape))
