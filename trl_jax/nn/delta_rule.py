"""The gated delta rule in chunks (Yang, Kautz and Hatamizadeh 2024, arXiv:2412.06464).

Each head has a state `S` of `[C, V]`, key channels by value channels. A token with key `k`, value `v`, decay
`exp(g)` and strength `beta` makes of it

    S = exp(g) S + k u^T    with    u = beta (v - exp(g) S^T k),

and its output is `S^T q` (equation 10 there). Within a chunk all `u` are the solution of one triangular system; between
chunks the state is handed on. In einsums below r counts rows, n chunks, k key heads, g value heads of each, i and j the
tokens of a chunk, c the channels of keys and v those of values.
"""

from __future__ import annotations

from functools import partial
from typing import NamedTuple

import jax
import jax.numpy as jnp

from trl_jax.nn.text_order import TextOrder

CHUNK = 64  # tokens
_einsum = partial(jnp.einsum, precision=jax.lax.Precision.HIGHEST)


class _Seen(NamedTuple):
    """The tokens that those of each chunk follow, all of `[R, N, ...]`, or `[1, N, ...]` where rows are alike.

    mask: bool `[I, J]`, the tokens of the chunk up to itself that are of its text. after_last, after_context: bool
    `[I]`, whether what it follows ends with the last token before the chunk, or with the end of that token's context.
    context_row: int32 `[]`, where in this chunk the context ends of its last token; -1 where it ended before, and then
    `context_kept`, or `context_begins`, for with the last token before the chunk; None where no row has contexts.
    """

    mask: jax.Array
    after_last: jax.Array
    after_context: jax.Array | None = None
    context_row: jax.Array | None = None
    context_kept: jax.Array | None = None
    context_begins: jax.Array | None = None


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
    length = q_RTKC.shape[1]
    size = min(CHUNK, 1 << (length - 1).bit_length())  # halves are inverted alone: see `_inverse`
    q, k, v, g, beta = (_in_chunks(x, size) for x in (q_RTKC, k_RTKC, v_RTKGV, g_RTKG, beta_RTKG))
    seen = _plain(k.shape[1], size) if order is None else _seen(order, size)
    decay = _einsum("rnij,rnjkg->rnikg", seen.mask.astype(g.dtype), g)  # from before the chunk
    between = jnp.moveaxis(decay[:, :, :, None] - decay[:, :, None], (2, 3), (4, 5))  # [R, N, K, G, I, J]
    between = jnp.exp(jnp.where(seen.mask[:, :, None, None], between, -jnp.inf))
    decay = jnp.exp(decay)
    attended = _einsum("rnikc,rnjkc->rnkij", q, k)[:, :, :, None] * between
    u, read = _corrections(k, v, beta, decay, between, seen)
    steps = _Steps(u, read, _from_states(q, decay, seen), attended, k, *_handed_on(decay, between, seen))
    return _scanned(steps, length)


class _Steps(NamedTuple):
    """The arrays that a scan along chunks takes apart, `[R, N, ...]`: `u` before the states' part is taken off, `read`
    the keys and `queried` the queries that the states are read with, `[S, K, G, I, C]` for S states; `attended`
    the weights of the chunk's tokens; `written` those of each `u` in the S new states, and `kept` of each old state in
    each."""

    u: jax.Array
    read: jax.Array
    queried: jax.Array
    attended: jax.Array
    keys: jax.Array
    written: jax.Array
    kept: jax.Array


def _in_chunks(x: jax.Array, size: int) -> jax.Array:
    """`[R, T, ...]` as `[R, N, I, ...]`; zeros fill up the last."""
    more = -x.shape[1] % size
    x = jnp.pad(x, [(0, 0), (0, more)] + [(0, 0)] * (x.ndim - 2))
    return x.reshape(len(x), -1, size, *x.shape[2:])


def _plain(count: int, size: int) -> _Seen:
    mask = jnp.broadcast_to(jnp.tril(jnp.ones((size, size), bool)), (1, count, size, size))
    return _Seen(mask, jnp.broadcast_to(jnp.arange(count)[:, None] > 0, (1, count, size)))


def _seen(order: TextOrder, size: int) -> _Seen:
    first = order.first.reshape(len(order.first), -1, size)
    place = jnp.arange(order.first.shape[1], dtype=jnp.int32).reshape(-1, size)
    begin = place[:, :1]
    of_text = place[:, None] >= first[..., None]
    before = place[:, None] <= place[..., None]
    if order.context is None:
        return _Seen(of_text & before, first < begin)
    context, end = (x.reshape(first.shape) for x in (order.context, order.context_end))
    of_text |= (place[:, None] >= context[..., None]) & (place[:, None] < end[..., None])
    has = context < end
    after_last = (first < begin) | (has & (context < begin) & (end >= begin))
    after_context = has & (end < begin) & ~(first < begin)
    has, end, begin = has[..., -1], end[..., -1], begin[:, 0]  # of the chunk's last token
    row = jnp.where(has & (end > begin), end - 1 - begin, -1)
    return _Seen(of_text & before, after_last, after_context, row, has & (end < begin), has & (end == begin))


def _corrections(k, v, beta, decay, between, seen: _Seen) -> tuple[jax.Array, jax.Array]:
    """`u` of all tokens where states are zero, and what each state's part of it is read with: both of one system."""
    system = _einsum("rnikc,rnjkc->rnkij", k, k)[:, :, :, None] * between
    system = system * jnp.moveaxis(beta, 2, -1)[..., None]
    given = jnp.moveaxis(v * beta[..., None], 2, 4)
    read = _from_states(k, decay * beta, seen)
    count, width = read.shape[2], k.shape[-1]
    parts = [given, *(read[:, :, state] for state in range(count))]
    solved = _einsum("rnkgij,rnkgjv->rnkgiv", _inverse(system), jnp.concatenate(parts, axis=-1))
    u, read = solved[..., : v.shape[-1]], solved[..., v.shape[-1] :]
    return u, jnp.moveaxis(read.reshape(*read.shape[:-1], count, width), -2, 2)


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
        corner = -_einsum("...ij,...jk,...kl->...il", second, below, first)
        upper = jnp.concatenate([first, jnp.zeros_like(first)], axis=-1)
        found, width = jnp.concatenate([upper, jnp.concatenate([corner, second], axis=-1)], axis=-2), 2 * width
    return found[..., 0, :, :]


def _from_states(x, decay, seen: _Seen) -> jax.Array:
    """Keys or queries `[R, N, S, K, G, I, C]` as each of the states is read with them."""
    x = jnp.moveaxis(x[:, :, :, :, None] * decay[..., None], 2, 4)
    states = [seen.after_last] if seen.after_context is None else [seen.after_last, seen.after_context]
    return jnp.stack([jnp.where(state[:, :, None, None, :, None], x, 0) for state in states], axis=2)


def _handed_on(decay, between, seen: _Seen) -> tuple[jax.Array, jax.Array]:
    """`written` and `kept` of `_Steps`: the state after the last token, and that after its context."""
    decay = jnp.moveaxis(decay, 2, -1)  # [R, N, K, G, I]
    written, kept = between[..., -1, :], jnp.where(seen.after_last[:, :, None, None, -1], decay[..., -1], 0)
    if seen.after_context is None:
        return written[:, :, None], kept[:, :, None, None]
    of_context = jnp.where(seen.after_context[:, :, None, None, -1], decay[..., -1], 0)
    row = jnp.maximum(seen.context_row, 0)[:, :, None, None, None]
    here = (seen.context_row >= 0)[:, :, None, None]
    written_context = jnp.where(here[..., None], jnp.take_along_axis(between, row[..., None], axis=-2)[..., 0, :], 0)
    carried = jnp.take_along_axis(jnp.where(seen.after_last[:, :, None, None], decay, 0), row, axis=-1)[..., 0]
    begins, stays = (x[:, :, None, None].astype(decay.dtype) for x in (seen.context_begins, seen.context_kept))
    kept_context = jnp.stack([jnp.where(here, carried, begins), jnp.broadcast_to(stays, carried.shape)], axis=2)
    return jnp.stack([written, written_context], axis=2), jnp.stack(
        [jnp.stack([kept, of_context], axis=2), kept_context], axis=2
    )


def _scanned(steps: _Steps, length: int) -> tuple[jax.Array, jax.Array]:
    def chunk(states, step):
        u = step.u - _einsum("rskgic,rskgcv->rkgiv", step.read, states)
        out = _einsum("rskgic,rskgcv->rkgiv", step.queried, states) + _einsum("rkgij,rkgjv->rkgiv", step.attended, u)
        kept = _einsum("rzskg,rskgcv->rzkgcv", step.kept, states)
        return kept + _einsum("rzkgj,rjkc,rkgjv->rzkgcv", step.written, step.keys, u), out

    rows, _, count, heads, group, _, channels = steps.read.shape
    states = jnp.zeros((rows, count, heads, group, channels, steps.u.shape[-1]), steps.u.dtype)
    states, out = jax.lax.scan(chunk, states, jax.tree.map(lambda x: jnp.moveaxis(x, 1, 0), steps))
    out = jnp.moveaxis(out, (0, 4), (1, 2))  # [N, R, K, G, I, V] -> [R, N, I, K, G, V]
    return out.reshape(rows, -1, *out.shape[3:])[:, :length], states[:, 0]


def delta_step(q_RKC, k_RKC, v_RKGV, g_RKG, beta_RKG, state_RKGCV) -> tuple[jax.Array, jax.Array]:
    """Outputs `[R, K, G, V]` of one more token, and the states after it."""
    state = state_RKGCV * jnp.exp(g_RKG)[..., None, None]
    u = beta_RKG[..., None] * (v_RKGV - _einsum("rkc,rkgcv->rkgv", k_RKC, state))
    state = state + k_RKC[:, :, None, :, None] * u[..., None, :]
    return _einsum("rkc,rkgcv->rkgv", q_RKC, state), state
