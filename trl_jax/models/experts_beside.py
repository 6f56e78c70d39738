"""Experts beside an MLP."""

from __future__ import annotations

import jax
import jax.numpy as jnp
from flax import nnx

from trl_jax.core.router_sums import RouterSums
from trl_jax.models.arch import Arch
from trl_jax.nn.experts.moe import MoE
from trl_jax.nn.norm import Norm


class ExpertsBeside(nnx.Module):
    """Adds the result of experts to that of an MLP, each normed; the experts see the residual stream."""

    def __init__(self, arch: Arch):
        size, norm = arch.hidden_size, {"kind": arch.norm, "eps": arch.norm_eps}
        self.mlp_norm, self.norm, self.out_norm = Norm(size, **norm), Norm(size, **norm), Norm(size, **norm)
        self.moe = MoE(size, arch.experts, activation=arch.activation, eps=arch.norm_eps)

    def __call__(self, of_mlp: jax.Array, h: jax.Array) -> jax.Array:
        """From the MLP's result and the residual stream, `[R, T, D]` each; in the dtype of the first."""
        seen, dtype = self.norm(h).astype(of_mlp.dtype), of_mlp.dtype
        return self.mlp_norm(of_mlp) + self.out_norm(self.moe(seen, h.astype(dtype)))

    def router_sums(self, h: jax.Array, router_token_count: jax.Array, dtype: jnp.dtype) -> RouterSums:
        """As of `MoE`, from the residual stream."""
        return self.moe.router_sums(h.astype(dtype), router_token_count)
