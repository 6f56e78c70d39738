"""Scans of layers with a state, in chunks of tokens (Dao and Gu 2024, arXiv:2405.21060, section 6).

Each head has a state `S` of `[C, V]`, key channels by value channels. A token with key `k`, written value `u`, decay
`exp(g)` and query `q` makes of it

    S = exp(g) S + k u^T

and its output is `S^T q`. Within a chunk outputs are products of the tokens' queries, keys and written values; between
chunks the state is handed on. In einsums below r counts rows, n chunks, s and z states, k key heads, g value heads of
each, i and j the tokens of a chunk, c the channels of keys and v those of values.
"""

from __future__ import annotations

from functools import partial
from typing import NamedTuple

import jax
import jax.numpy as jnp

from trl_jax.nn.recurrent.text_order import TextOrder

CHUNK = 64  # tokens
einsum = partial(jnp.einsum, precision=jax.lax.Precision.HIGHEST)


class Seen(NamedTuple):
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


class Decays(NamedTuple):
    """The decays of the tokens of each chunk, `[R, N, ...]`.

    before: `[I, K, G]`, from the state that a token follows up to itself. between: `[K, G, I, J]`, from token j up to
    token i; 0 where i does not see j.
    """

    seen: Seen
    before: jax.Array
    between: jax.Array

    @property
    def size(self) -> int:
        """Tokens of a chunk."""
        return self.before.shape[2]


def decays(g_RTKG: jax.Array, order: TextOrder | None) -> Decays:
    """Those of tokens whose own have the logarithms `g_RTKG`, in the rows' texts; None where each row is one."""
    size = min(CHUNK, 1 << (g_RTKG.shape[1] - 1).bit_length())  # a power of two
    g = in_chunks(g_RTKG, size)
    seen = _plain(g.shape[1], size) if order is None else _seen(order, size)
    before = einsum("rnij,rnjkg->rnikg", seen.mask.astype(g.dtype), g)
    between = jnp.moveaxis(before[:, :, :, None] - before[:, :, None], (2, 3), (4, 5))
    between = jnp.exp(jnp.where(seen.mask[:, :, None, None], between, -jnp.inf))
    return Decays(seen, jnp.exp(before), between)


def in_chunks(x: jax.Array, size: int) -> jax.Array:
    """`[R, T, ...]` as `[R, N, I, ...]`; zeros fill up the last."""
    more = -x.shape[1] % size
    x = jnp.pad(x, [(0, 0), (0, more)] + [(0, 0)] * (x.ndim - 2))
    return x.reshape(len(x), -1, size, *x.shape[2:])


def _plain(count: int, size: int) -> Seen:
    mask = jnp.broadcast_to(jnp.tril(jnp.ones((size, size), bool)), (1, count, size, size))
    return Seen(mask, jnp.broadcast_to(jnp.arange(count)[:, None] > 0, (1, count, size)))


def _seen(order: TextOrder, size: int) -> Seen:
    first = order.first.reshape(len(order.first), -1, size)
    place = jnp.arange(order.first.shape[1], dtype=jnp.int32).reshape(-1, size)
    begin = place[:, :1]
    of_text = place[:, None] >= first[..., None]
    before = place[:, None] <= place[..., None]
    if order.context is None:
        return Seen(of_text & before, first < begin)
    context, end = (x.reshape(first.shape) for x in (order.context, order.context_end))
    of_text |= (place[:, None] >= context[..., None]) & (place[:, None] < end[..., None])
    has = context < end
    after_last = (first < begin) | (has & (context < begin) & (end >= begin))
    after_context = has & (end < begin) & ~(first < begin)
    has, end, begin = has[..., -1], end[..., -1], begin[:, 0]  # of the chunk's last token
    row = jnp.where(has & (end > begin), end - 1 - begin, -1)
    return Seen(of_text & before, after_last, after_context, row, has & (end < begin), has & (end == begin))


class _Steps(NamedTuple):
    """The arrays that a scan along chunks takes apart, `[R, N, ...]`: `u` before the states' part is taken off, and
    `read` the keys that the states are read with for it, `[S, K, G, I, C]` for S states, or None; `queries`
    `[I, K, C]`, and how much of what they read in each state has decayed, `decay` `[S, K, G, I]`; `attended` the
    weights of the chunk's tokens; `written` those of each `u` in the S new states, and `kept` of each old state in
    each."""

    u: jax.Array
    read: jax.Array | None
    queries: jax.Array
    decay: jax.Array
    attended: jax.Array
    keys: jax.Array
    written: jax.Array
    kept: jax.Array


def scanned(
    q: jax.Array, k: jax.Array, u: jax.Array, decays: Decays, read: jax.Array | None = None
) -> tuple[jax.Array, jax.Array]:
    """Outputs `[R, N x I, K, G, V]` of all chunks, and the states after each row's last token `[R, K, G, C, V]`.

    Args:
        q, k: queries and keys `[R, N, I, K, C]`.
        u: the written values `[R, N, K, G, I, V]`; with `read`, what each state gives to these keys is taken off.
        read: `[R, N, S, K, G, I, C]`; see `from_states`.
    """
    attended = einsum("rnikc,rnjkc->rnkij", q, k)[:, :, :, None] * decays.between
    steps = _Steps(u, read, q, from_states(decays), attended, k, *_handed_on(decays))

    def chunk(states, step):
        u = step.u if step.read is None else step.u - einsum("rskgic,rskgcv->rkgiv", step.read, states)
        seen = jnp.sum(step.decay[..., None] * einsum("rikc,rskgcv->rskgiv", step.queries, states), axis=1)
        kept = einsum("rzskg,rskgcv->rzkgcv", step.kept, states)
        kept += einsum("rzkgj,rjkc,rkgjv->rzkgcv", step.written, step.keys, u)
        return kept, seen + einsum("rkgij,rkgjv->rkgiv", step.attended, u)

    rows, _, count, heads, group, _ = steps.decay.shape
    states = jnp.zeros((rows, count, heads, group, k.shape[-1], u.shape[-1]), u.dtype)
    states, out = jax.lax.scan(chunk, states, jax.tree.map(lambda x: jnp.moveaxis(x, 1, 0), steps))
    out = jnp.moveaxis(out, (0, 4), (1, 2))  # [N, R, K, G, I, V] -> [R, N, I, K, G, V]
    return out.reshape(rows, -1, *out.shape[3:]), states[:, 0]


def from_states(decays: Decays) -> jax.Array:
    """The decays `[R, N, S, K, G, I]` from each of the S states to the tokens that follow it; 0 for others."""
    seen, before = decays.seen, jnp.moveaxis(decays.before, 2, -1)
    states = [seen.after_last] if seen.after_context is None else [seen.after_last, seen.after_context]
    return jnp.stack([jnp.where(state[:, :, None, None], before, 0) for state in states], axis=2)


def _handed_on(decays: Decays) -> tuple[jax.Array, jax.Array]:
    """`written` and `kept` of `_Steps`: the state after the last token, and that after its context."""
    seen, between, decay = decays.seen, decays.between, jnp.moveaxis(decays.before, 2, -1)
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
