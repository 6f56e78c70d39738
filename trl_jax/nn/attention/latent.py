"""Multi-head latent attention (DeepSeek-V2, arXiv:2405.04434, section 2.1)."""

from __future__ import annotations

import jax
import jax.numpy as jnp
from flax import nnx

from trl_jax.nn.attention.attention import attend
from trl_jax.nn.attention.inputs import AttentionInputs
from trl_jax.nn.cache import NewTokens, TokenCache
from trl_jax.nn.layers import Norm
from trl_jax.nn.linear import Dropout, Linear
from trl_jax.nn.rope import rotate


class LatentAttention(nnx.Module):
    """Self-attention with low-rank queries, keys and values; `arch` is a models.arch.Arch.

    The last `rotary_dim` of the `head_dim` channels of queries and keys are rotated; all heads share these channels of
    the keys. The cache stores the latents from which keys and values are computed. When decoding, the key map is
    absorbed into the query, so that all heads attend to the same latents as keys and values.
    """

    def __init__(self, arch):
        latent, heads, hidden = arch.latent, arch.num_heads, arch.hidden_size
        size_q, bias, axes = heads * arch.head_dim, arch.qkv_bias, ("heads", "embed")
        if latent.query_rank is None:
            self.q = Linear(hidden, size_q, axes=axes)
        else:
            self.q_down = Linear(hidden, latent.query_rank, bias=bias, axes=("", "embed"))
            self.q_norm = Norm(latent.query_rank, kind=arch.norm, eps=latent.norm_eps)
            self.q = Linear(latent.query_rank, size_q, axes=("heads", ""))
        self.kv_down = Linear(hidden, latent.key_rank + arch.rotary_dim, bias=bias, axes=("", "embed"))
        self.kv_norm = Norm(latent.key_rank, kind=arch.norm, eps=latent.norm_eps)
        up = heads * (arch.head_dim - arch.rotary_dim + latent.value_dim)
        self.kv = Linear(latent.key_rank, up, axes=("heads", ""))
        self.o = Linear(heads * latent.value_dim, hidden, bias=arch.o_bias, axes=("embed", "heads"))
        self.arch = arch

    def __call__(
        self, x_RTD: jax.Array, inputs: AttentionInputs, dropout: Dropout | None = None
    ) -> tuple[jax.Array, tuple[NewTokens]]:
        """`[R, T, D]` to `[R, T, D]`, and the latents for the cache; dropout is only supported for padded rows."""
        nope_RTHC, rope_RTHC = self._queries(x_RTD, inputs)
        latent_RTC, rope_RTC = self._latents(x_RTD, inputs)
        latents_RT1C = jnp.concatenate([latent_RTC, rope_RTC], axis=-1)[:, :, None]
        if inputs.cache is not None:
            out = self._attend_latents(nope_RTHC, rope_RTHC, latents_RT1C, inputs)
        else:
            k_RTHC, v_RTHC = self._keys_values(latent_RTC, rope_RTC)
            if inputs.striped is not None:
                k_RTHC, v_RTHC = inputs.striped.gathered(k_RTHC), inputs.striped.gathered(v_RTHC)
            q_RTHC = jnp.concatenate([nope_RTHC, rope_RTHC], axis=-1)
            out = attend(q_RTHC, k_RTHC, v_RTHC, inputs, dropout=dropout)
        return self.o(out.reshape(*x_RTD.shape[:-1], -1)), (NewTokens(latents_RT1C),)

    def _queries(self, x_RTD: jax.Array, inputs: AttentionInputs) -> tuple[jax.Array, jax.Array]:
        """Query channels without and with rotary positions."""
        arch = self.arch
        q = x_RTD if arch.latent.query_rank is None else self.q_norm(self.q_down(x_RTD))
        q_RTHC = self.q(q).reshape(*x_RTD.shape[:-1], arch.num_heads, arch.head_dim)
        nope, rope = jnp.split(q_RTHC, [arch.head_dim - arch.rotary_dim], axis=-1)
        return nope, self._rotated(rope, inputs)

    def _latents(self, x_RTD: jax.Array, inputs: AttentionInputs) -> tuple[jax.Array, jax.Array]:
        """The latents of keys and values, and the rotated key channels, which all heads share."""
        down, rope = jnp.split(self.kv_down(x_RTD), [self.arch.latent.key_rank], axis=-1)
        return self.kv_norm(down), self._rotated(rope[:, :, None], inputs)[:, :, 0]

    def _keys_values(self, latent_RTC: jax.Array, rope_RTC: jax.Array) -> tuple[jax.Array, jax.Array]:
        arch = self.arch
        kv_RTHC = self.kv(latent_RTC).reshape(*latent_RTC.shape[:-1], arch.num_heads, -1)
        nope, v_RTHC = jnp.split(kv_RTHC, [arch.head_dim - arch.rotary_dim], axis=-1)
        shared_RTHC = jnp.broadcast_to(rope_RTC[:, :, None], (*nope.shape[:-1], arch.rotary_dim))
        return jnp.concatenate([nope, shared_RTHC], axis=-1), v_RTHC

    def _attend_latents(
        self, nope_RTHC: jax.Array, rope_RTHC: jax.Array, latents_RT1C: jax.Array, inputs: AttentionInputs
    ) -> jax.Array:
        """Attention `[R, T, H, C]` over the latents of the cache and of the rows (section 2.1.2: the key map is
        absorbed into the query, the value map into the output). A bias on the keys cancels in the softmax.
        """
        arch, dtype = self.arch, nope_RTHC.dtype
        weight, bias = self.kv.folded()
        weight_HCI = weight.astype(dtype).reshape(arch.num_heads, -1, arch.latent.key_rank)
        of_keys, of_values = jnp.split(weight_HCI, [arch.head_dim - arch.rotary_dim], axis=1)
        options = {"preferred_element_type": jnp.float32}
        back_RTHI = jnp.einsum("rthc,hci->rthi", nope_RTHC, of_keys, **options).astype(dtype)
        cache = _keys_and_values(inputs.cache[0], arch.latent.key_rank)
        q_RTHC = jnp.concatenate([back_RTHI, rope_RTHC], axis=-1)
        seen_RTHI = attend(
            q_RTHC, latents_RT1C, latents_RT1C[..., : arch.latent.key_rank], inputs._replace(cache=cache)
        )
        out_RTHC = jnp.einsum("rthi,hci->rthc", seen_RTHI, of_values, **options).astype(dtype)
        if bias is None:
            return out_RTHC
        return out_RTHC + bias.reshape(arch.num_heads, -1)[:, -arch.latent.value_dim :].astype(dtype)

    def _rotated(self, x: jax.Array, inputs: AttentionInputs) -> jax.Array:
        return rotate(x, inputs.cos, inputs.sin, interleaved=self.arch.rope_interleaved)


def _keys_and_values(latents: TokenCache, value_channels: int) -> tuple[TokenCache, TokenCache]:
    """Cached latents as the cache of a single key head, whose values are the first channels of its keys."""
    keys = TokenCache(latents.prompts, latents.completions.swapaxes(-1, -2), token_axis=-1)
    return keys, TokenCache(latents.prompts[..., :value_channels], latents.completions[..., :value_channels])
