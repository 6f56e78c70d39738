"""Convolution along the tokens of a row."""

from __future__ import annotations

import jax
import jax.numpy as jnp
from flax import nnx


class Convolution(nnx.Module):
    """`[R, T, D]` to the same: a token and its neighbours, `width` of them (odd), zeros beyond the row.

    The weight lies as on disk, (out, in / groups, width).
    """

    def __init__(self, features: int, width: int, groups: int):
        self.weight = nnx.Param(jnp.zeros((features, features // groups, width), jnp.float32), axes=("", "", ""))
        self.bias = nnx.Param(jnp.zeros((features,), jnp.float32), axes=("",))
        self.groups = groups

    def __call__(self, x: jax.Array) -> jax.Array:
        y = jax.lax.conv_general_dilated(
            x,
            self.weight[...].astype(x.dtype),
            window_strides=(1,),
            padding="SAME",
            dimension_numbers=("NWC", "OIW", "NWC"),
            feature_group_count=self.groups,
        )
        return y + self.bias[...].astype(x.dtype)
