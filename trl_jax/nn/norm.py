"""Normalisation over the last axis, statistics in float32."""

from __future__ import annotations

from dataclasses import dataclass

import jax
import jax.numpy as jnp
from flax import nnx


@dataclass(frozen=True)
class NormKind:
    """The facts of a norm.

    `centred`: the mean is taken off first. `weighted`, `biased`: it has these parameters. `one_plus`: it scales by
    1 + weight. `scales_rounded`: the normed value is rounded to the dtype of the input before it is scaled.
    """

    centred: bool
    weighted: bool = True
    biased: bool = False
    one_plus: bool = False
    scales_rounded: bool = False


# RMS norm: Zhang and Sennrich 2019, arXiv:1910.07467. Layer norm: Ba, Kiros and Hinton 2016, arXiv:1607.06450.
NORMS = {
    "rms": NormKind(centred=False, scales_rounded=True),
    "rms_float32": NormKind(centred=False),
    "rms_plain": NormKind(centred=False, weighted=False),
    "rms_one_plus": NormKind(centred=False, one_plus=True),
    "layer": NormKind(centred=True, biased=True),
    "layer_one_plus": NormKind(centred=True, biased=True, one_plus=True),
    "layer_unbiased": NormKind(centred=True),
    "layer_plain": NormKind(centred=True, weighted=False),
}


class Norm(nnx.Module):
    """A norm of one of `NORMS`; parameters of `shape`, whose last axis is the one normed, each of `groups` equal parts
    of it by itself."""

    def __init__(self, *shape: int, kind: str, eps: float, groups: int = 1):
        self.kind, self.eps, self.groups = NORMS[kind], eps, groups
        axes = ("norm",) * len(shape)
        self.weight = nnx.Param(jnp.ones(shape, jnp.float32), axes=axes) if self.kind.weighted else None
        self.bias = nnx.Param(jnp.zeros(shape, jnp.float32), axes=axes) if self.kind.biased else None

    def __call__(self, x: jax.Array) -> jax.Array:
        y = x.astype(jnp.float32)
        if self.groups > 1:
            y = y.reshape(*x.shape[:-1], self.groups, -1)
        if self.kind.centred:
            y = y - jnp.mean(y, axis=-1, keepdims=True)
        y = y * jax.lax.rsqrt(jnp.mean(jnp.square(y), axis=-1, keepdims=True) + self.eps)
        y = y.reshape(x.shape)
        if self.kind.scales_rounded:
            y = y.astype(x.dtype)
        if self.weight is not None:
            weight = self.weight[...].astype(y.dtype)
            y = y * (1 + weight if self.kind.one_plus else weight)
        if self.bias is not None:
            y = y + self.bias[...].astype(y.dtype)
        return y.astype(x.dtype)
