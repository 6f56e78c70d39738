"""The selective state space of Mamba-2 in chunks (Dao and Gu 2024, arXiv:2405.21060).

With `B` as keys, `C` as queries and steps `dt` of time, a token makes of each head's state

    S = exp(dt A) S + dt B x^T

and its output is `S^T C` (equations 1 and 2 there): the scan of `nn.recurrent.chunks`
with nothing taken off what is written.
"""

from __future__ import annotations

import jax
import jax.numpy as jnp

from trl_jax.nn.recurrent.chunks import decays, einsum, in_chunks, scanned
from trl_jax.nn.recurrent.text_order import TextOrder


def state_space(
    C_RTKC: jax.Array, B_RTKC: jax.Array, x_RTKGV: jax.Array, g_RTKG: jax.Array, order: TextOrder | None = None
) -> tuple[jax.Array, jax.Array]:
    """Outputs `[R, T, K, G, V]`, and the states after each row's last token `[R, K, G, C, V]`.

    Args:
        C_RTKC, B_RTKC: of each of K groups of heads.
        x_RTKGV: inputs times their steps of time, of G heads a group.
        g_RTKG: logarithms of decays, `dt A`.
        order: the texts that lie in each row; None where each row is one.
    """
    between = decays(g_RTKG, order)
    C, B, x = (in_chunks(each, between.size) for each in (C_RTKC, B_RTKC, x_RTKGV))
    out, states = scanned(C, B, jnp.moveaxis(x, 2, 4), between)
    return out[:, : C_RTKC.shape[1]], states


def state_space_step(C_RKC, B_RKC, x_RKGV, g_RKG, state_RKGCV) -> tuple[jax.Array, jax.Array]:
    """Outputs `[R, K, G, V]` of one more token, and the states after it."""
    state = state_RKGCV * jnp.exp(g_RKG)[..., None, None] + B_RKC[:, :, None, :, None] * x_RKGV[..., None, :]
    return einsum("rkc,rkgcv->rkgv", C_RKC, state), state
