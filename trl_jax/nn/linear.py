"""Linear maps and embeddings."""

from __future__ import annotations

import jax
import jax.numpy as jnp
from flax import nnx

from trl_jax.nn.lora import Lora
from trl_jax.nn.quantized import Quantized


class Linear(nnx.Module):
    """`[..., in] -> [..., out]`, weight (out, in) as on disk; `lora` is an adapter beside it."""

    lora: Lora | None

    def __init__(self, in_features: int, out_features: int, *, bias: bool = False):
        self.weight = nnx.Param(jnp.zeros((out_features, in_features), jnp.float32))
        self.bias = nnx.Param(jnp.zeros((out_features,), jnp.float32)) if bias else None
        self.lora = nnx.data(None)

    def __call__(self, x: jax.Array) -> jax.Array:
        # One plain matrix product: with more axes than two, the gradients take XLA twice as long on a CPU.
        flat = x.reshape(-1, x.shape[-1])
        y = jnp.einsum("ni,oi->no", flat, self.weight[...].astype(x.dtype))
        if self.lora is not None:
            y = self.lora.added(flat, y, self.weight[...])
        if self.bias is not None:
            y += self.bias[...].astype(x.dtype)
        return y.reshape(*x.shape[:-1], -1)


class Embedding(nnx.Module):
    """Token ids `[...]` to `[..., D]` in `dtype`. The row `padding_idx` gets no gradient, as in torch. `lora` is an
    adapter beside it."""

    lora: Lora | None

    def __init__(self, num_embeddings: int, features: int, *, padding_idx: int | None = None):
        self.weight = nnx.Param(jnp.zeros((num_embeddings, features), jnp.float32))
        self.padding_idx = padding_idx
        self.lora = nnx.data(None)

    def __call__(self, ids: jax.Array, dtype: jnp.dtype) -> jax.Array:
        if isinstance(self.weight, Quantized):
            embedded = self.weight.taken(ids)
        else:
            embedded = jnp.take(self.weight[...], ids, axis=0, mode="clip")  # a pad beyond the last position
        if self.padding_idx is not None:
            embedded = jnp.where((ids == self.padding_idx)[..., None], jax.lax.stop_gradient(embedded), embedded)
        if self.lora is not None:
            embedded = embedded + self.lora.looked_up(ids, self.padding_idx)
        return embedded.astype(dtype)
