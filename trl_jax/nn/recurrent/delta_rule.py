"""The gated delta rule in chunks (Yang, Kautz and Hatamizadeh 2024, arXiv:2412.06464).

Each head has a state `S` of `[C, V]`, key channels by value channels. A token with key `k`, value `v`, decay
`exp(g)` and strength `beta` makes of it

    S = exp(g) S + k u^T    with    u = beta (v - exp(g) S^T k),

and its output is `S^T q` (equation 10 there). Within a chunk all `u` are the solution of one triangular system; the
rest, and the letters of einsums, are those of `nn.recurrent.chunks`.
"""

from __future__ import annotations

import jax
import jax.numpy as jnp

from trl_jax.nn.recurrent.chunks import Decays, decays, einsum, from_states, in_chunks, scanned
from trl_jax.nn.recurrent.text_order import TextOrder


def delta_rule(
    q_RTKC: jax.Array,
    k_RTKC: jax.Array,
    v_RTKGV: jax.Array,
    g_RTKG: jax.Array,
    beta_RTKG: jax.Array,
    order: TextOrder | None = None,
) -> tuple[jax.Array, jax.Array]:
    """Outputs `[R, T, K, G, V]`, and the states after each row's last token `[R, K, G, C, V]`.

    Args:
        q_RTKC, k_RTKC: queries and keys of each of K heads, as they are multiplied.
        v_RTKGV: values, of G heads for each key head.
        g_RTKG: logarithms of decays.
        order: the texts that lie in each row; None where each row is one.
    """
    between = decays(g_RTKG, order)
    q, k, v, beta = (in_chunks(x, between.size) for x in (q_RTKC, k_RTKC, v_RTKGV, beta_RTKG))
    u, read = _corrections(k, v, beta, between)
    out, states = scanned(q, k, u, between, read)
    return out[:, : q_RTKC.shape[1]], states


def _corrections(k, v, beta, decays: Decays) -> tuple[jax.Array, jax.Array]:
    """`u` of all tokens where states are zero, and what each state's part of it is read with: both of one system."""
    strength = jnp.moveaxis(beta, 2, -1)
    system = einsum("rnikc,rnjkc->rnkij", k, k)[:, :, :, None] * decays.between * strength[..., None]
    given = jnp.moveaxis(v * beta[..., None], 2, 4)
    read = einsum("rnikc,rnskgi->rnskgic", k, from_states(decays) * strength[:, :, None])
    count, width = read.shape[2], k.shape[-1]
    parts = [given, *(read[:, :, state] for state in range(count))]
    solved = einsum("rnkgij,rnkgjv->rnkgiv", _inverse(system), jnp.concatenate(parts, axis=-1))
    u, read = solved[..., : v.shape[-1]], solved[..., v.shape[-1] :]
    return u, jnp.moveaxis(read.reshape(*read.shape[:-1], count, width), -2, 2)


@jax.custom_vjp
def _inverse(system: jax.Array) -> jax.Array:
    """The inverse of unit lower triangles `[..., I, I]`, whatever stands on and above the diagonal; from blocks of one
    token to blocks of two, and so on, in products alone. I is a power of two."""
    size, width = system.shape[-1], 1
    found = jnp.ones((*system.shape[:-2], size, 1, 1), system.dtype)
    while width < size:
        at = jnp.arange(size // (2 * width))
        halves = system.reshape(*system.shape[:-2], len(at), 2, width, len(at), 2, width)
        below = jnp.moveaxis(jnp.diagonal(halves[..., 1, :, :, 0, :], axis1=-4, axis2=-2), -1, -3)
        first, second = found[..., 0::2, :, :], found[..., 1::2, :, :]
        corner = -einsum("...ij,...jk,...kl->...il", second, below, first)
        upper = jnp.concatenate([first, jnp.zeros_like(first)], axis=-1)
        found, width = jnp.concatenate([upper, jnp.concatenate([corner, second], axis=-1)], axis=-2), 2 * width
    return found[..., 0, :, :]


def _inverse_forward(system):
    inverse = _inverse(system)
    return inverse, inverse


def _inverse_backward(inverse, gradient):
    """Of the inverse X the change is -X dA X, whatever way it was found."""
    product = -einsum("...ji,...jk,...lk->...il", inverse, gradient, inverse)
    return (jnp.tril(product, -1),)


_inverse.defvjp(_inverse_forward, _inverse_backward)


def delta_step(q_RKC, k_RKC, v_RKGV, g_RKG, beta_RKG, state_RKGCV) -> tuple[jax.Array, jax.Array]:
    """Outputs `[R, K, G, V]` of one more token, and the states after it."""
    state = state_RKGCV * jnp.exp(g_RKG)[..., None, None]
    u = beta_RKG[..., None] * (v_RKGV - einsum("rkc,rkgcv->rkgv", k_RKC, state))
    state = state + k_RKC[:, :, None, :, None] * u[..., None, :]
    return einsum("rkc,rkgcv->rkgv", q_RKC, state), state
