"""Linear maps and embeddings."""

from __future__ import annotations

import jax
import jax.numpy as jnp
from flax import nnx

from trl_jax.nn.lora import Lora
from trl_jax.nn.platform import platform
from trl_jax.nn.quantized import Quantized


class Linear(nnx.Module):
    """`[..., in] -> [..., out]`, weight (out, in) as on disk; `lora` is an adapter beside it.

    `axes` are the logical ones of the weight: see `trl_jax.nn`.
    """

    lora: Lora | None

    def __init__(
        self, in_features: int, out_features: int, *, bias: bool = False, axes: tuple[str, str] = ("", "")
    ):
        self.weight = nnx.Param(jnp.zeros((out_features, in_features), jnp.float32), axes=axes)
        self.bias = nnx.Param(jnp.zeros((out_features,), jnp.float32), axes=axes[:1]) if bias else None
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

    def folded(self) -> tuple[jax.Array, jax.Array | None]:
        """Matrix (out, in) and bias of the map with its adapter, in the dtypes they are held in; no dropout."""
        weight, bias = stored(self.weight), None if self.bias is None else self.bias[...]
        return (weight, bias) if self.lora is None else self.lora.folded(weight, bias)


class Embedding(nnx.Module):
    """Token ids `[...]` to `[..., D]` in `dtype`. The row `padding_idx` gets no gradient, as in torch. `lora` is an
    adapter beside it, `axes` are the logical ones of the table."""

    lora: Lora | None

    def __init__(
        self,
        num_embeddings: int,
        features: int,
        *,
        padding_idx: int | None = None,
        axes: tuple[str, str] = ("", "embed"),
    ):
        self.weight = nnx.Param(jnp.zeros((num_embeddings, features), jnp.float32), axes=axes)
        self.padding_idx = padding_idx
        self.lora = nnx.data(None)

    def __call__(self, ids: jax.Array, dtype: jnp.dtype) -> jax.Array:
        embedded = self.weight.rows(ids) if isinstance(self.weight, Quantized) else rows(self.weight[...], ids)
        if self.padding_idx is not None:
            embedded = jnp.where((ids == self.padding_idx)[..., None], jax.lax.stop_gradient(embedded), embedded)
        if self.lora is not None:
            embedded = embedded + self.lora.looked_up(ids, self.padding_idx)
        return embedded.astype(dtype)


def stored(weight: nnx.Param | Quantized) -> jax.Array:
    """A whole weight in the dtype it is held in; quantised ones float32."""
    return weight.whole() if isinstance(weight, Quantized) else weight[...]


def rows(table: jax.Array, ids: jax.Array) -> jax.Array:
    """Rows `[..., D]` of a table `[V, D]`, the last one for ids beyond it, as of a pad after the last position."""
    alone = jax.sharding.get_abstract_mesh().empty
    return _rows_late(table, ids) if alone and platform() == "cpu" else _rows(table, ids)


def _rows(table, ids):
    return jnp.take(table, ids, axis=0, mode="clip")


def _rows_backward(saved, gradient):
    """Adds to zeros that are made of the gradient. XLA for CPUs lays out what depends on nothing when a step begins, so
    the table's zeros would lie beside everything that the layers keep. Where the gradient is a number these are +0."""
    table, ids = saved
    zeros = jnp.minimum(jnp.abs(gradient.reshape(-1, gradient.shape[-1])[0]), 0)
    return jnp.broadcast_to(zeros, table.shape).at[jnp.clip(ids, 0, len(table) - 1)].add(gradient), None


_rows_late = jax.custom_vjp(_rows)
_rows_late.defvjp(lambda table, ids: (_rows(table, ids), (table, ids)), _rows_backward)
