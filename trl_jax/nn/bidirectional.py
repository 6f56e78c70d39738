"""Self-attention to both sides."""

from __future__ import annotations

import jax
from flax import nnx

from trl_jax.core.packed import Packed
from trl_jax.nn.attention import attend, attend_texts
from trl_jax.nn.dropout import Dropout
from trl_jax.nn.linear import Linear
from trl_jax.nn.rope import rotate


class BidirectionalAttention(nnx.Module):
    """Every token sees every other; `bias` is that of all four linear maps."""

    def __init__(self, features: int, heads: int, *, bias: bool):
        self.q, self.k, self.v, self.o = (Linear(features, features, bias=bias) for _ in range(4))
        self.head_dim = features // heads

    def __call__(
        self,
        x: jax.Array,
        *,
        valid: jax.Array | None,
        cos: jax.Array | None = None,
        sin: jax.Array | None = None,
        window: jax.Array | None = None,
        dropout: Dropout | None = None,
        packed: Packed | None = None,
    ) -> jax.Array:
        """`[R, T, D]` to the same.

        Args:
            cos, sin: as `rotate` takes them; None leaves positions out.
            valid, window, dropout: as `attend` takes them.
            stream: as `attend_texts` takes it, where the rows are streams; without dropout.
        """
        q, k, v = (part(x).reshape(*x.shape[:-1], -1, self.head_dim) for part in (self.q, self.k, self.v))
        if cos is not None:
            q, k = rotate(q, cos, sin), rotate(k, cos, sin)
        how = {"scale": self.head_dim**-0.5, "window": window}
        if packed is None:
            out = attend(q, k, v, causal=False, valid=valid, dropout=dropout, **how)
        else:
            out = attend_texts(q, k, v, packed, causal=False, **how)
        return self.o(out.reshape(x.shape))
