"""Low-rank adapters (Hu et al. 2021, arXiv:2106.09685) beside a frozen linear map or table."""

from __future__ import annotations

import jax
import jax.numpy as jnp
from flax import nnx

from trl_jax.nn.dropout import Dropout
from trl_jax.nn.experts.grouped import grouped_dot


class Lora(nnx.Module):
    """An addition to a map of weight W: `scale * B A x`, A `[r, in]`, B `[out, r]`; B A itself is never formed.

    With a `magnitude` `[out]` (DoRA, Liu et al. 2024, arXiv:2402.09353) rows of W + scale B A are scaled to that
    length; `there` is False in a layer that has no adapter, where it counts for nothing. `bias` `[out]` is B's own.
    `key` turns dropout in front of A on.
    """

    def __init__(self, leaves: dict[str, jax.Array], rate: float = 0.0):
        def param(name: str) -> nnx.Param | None:
            return nnx.Param(leaves[name]) if name in leaves else None

        self.a, self.b, self.scale = param("a"), param("b"), param("scale")
        self.bias, self.magnitude, self.there, self.key = map(param, ("bias", "magnitude", "there", "key"))
        self.rate = rate

    def added(self, x: jax.Array, y: jax.Array, weight: jax.Array) -> jax.Array:
        """`y` = W x `[n, out]` with what the adapter makes of `x` `[n, in]`; `weight` is W."""
        dropped = x if self.key is None else Dropout(self.rate, self.key[...])(x)
        a, b = (part[...].astype(x.dtype) for part in (self.a, self.b))
        delta = jnp.einsum("nr,or->no", jnp.einsum("ni,ri->nr", dropped, a), b)
        if self.bias is not None:
            delta += self.bias[...].astype(x.dtype)
        delta *= self.scale[...].astype(x.dtype)
        if self.magnitude is None:
            return y + delta
        length = (self.magnitude[...] / jax.lax.stop_gradient(self._row_norms(weight))).astype(x.dtype)
        base = y if self.key is None else jnp.einsum("ni,oi->no", dropped, weight.astype(x.dtype))
        return y + jnp.where(self.there[...], (length - 1) * base + length * delta, 0)

    def joined(
        self, x: jax.Array, weight: jax.Array, bias: jax.Array | None
    ) -> tuple[jax.Array, jax.Array, jax.Array | None]:
        """Wider x `[n, in + more]`, W `[out, in + more]`, and a bias, whose product is the map with its adapter."""
        dropped = x if self.key is None else Dropout(self.rate, self.key[...])(x)
        scale, b = self.scale[...], self.b[...]
        inner = jnp.einsum("ni,ri->nr", dropped, self.a[...].astype(x.dtype))
        more = scale * self.bias[...] if self.bias is not None else None
        bias = more if bias is None else bias if more is None else bias + more
        if self.magnitude is None:
            return jnp.hstack([x, inner]), jnp.hstack([weight.astype(x.dtype), (scale * b).astype(x.dtype)]), bias
        length = self.magnitude[...] / jax.lax.stop_gradient(self._row_norms(weight))
        parts = [weight, ((length - 1)[:, None] * weight), (length * scale)[:, None] * b]
        return jnp.hstack([x, dropped, inner]), jnp.hstack([part.astype(x.dtype) for part in parts]), bias

    def folded(self, weight: jax.Array, bias: jax.Array | None) -> tuple[jax.Array, jax.Array | None]:
        """W and its bias with what the adapter adds to them; without dropout."""
        moved, more = weight + self.scale[...] * self.b[...] @ self.a[...], None
        if self.bias is not None:
            more = self.scale[...] * self.bias[...]
        if self.magnitude is not None:
            length = self.magnitude[...] / self._row_norms(weight)
            moved = jnp.where(self.there[...], length[:, None] * moved, weight)
            more = None if more is None else jnp.where(self.there[...], length * more, 0)
        return moved, bias if more is None else more if bias is None else bias + more

    def _row_norms(self, weight: jax.Array) -> jax.Array:
        moved = weight.astype(jnp.float32) + self.scale[...] * self.b[...] @ self.a[...]
        return jnp.linalg.norm(moved, axis=1)

    def looked_up(self, ids: jax.Array, padding_idx: int | None) -> jax.Array:
        """The same for a table: what is added to its rows `ids`; A `[r, rows]`. The row of pads gets no gradient."""
        rows = jnp.take(self.a[...].T, ids, axis=0, mode="clip")
        if padding_idx is not None:
            rows = jnp.where((ids == padding_idx)[..., None], jax.lax.stop_gradient(rows), rows)
        return self.scale[...] * jnp.einsum("...r,or->...o", rows, self.b[...])


class ExpertsLora(nnx.Module):
    """Adapters of matrices that experts have: A `[E, r, in]`, B `[E, out, r]`, scaled already."""

    def __init__(self, leaves: dict[str, jax.Array]):
        self.a, self.b = nnx.Param(leaves["a"]), nnx.Param(leaves["b"])


def adapted_dot(x: jax.Array, sizes: jax.Array, weight: jax.Array, *lora: jax.Array) -> jax.Array:
    """Rows `[M, in]`, sorted by expert, `sizes` of each, times their expert's W plus B A, if any: `[M, out]`."""
    y = grouped_dot(x, weight.astype(x.dtype), sizes)
    if not lora:
        return y
    a, b = (part.astype(x.dtype) for part in lora)
    return y + grouped_dot(grouped_dot(x, a, sizes), b, sizes)
