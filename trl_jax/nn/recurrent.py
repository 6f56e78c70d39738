"""Recurrent mixers in place of attention: gated delta nets, Mamba-2 and short convolutions."""

from __future__ import annotations

from abc import abstractmethod
from collections.abc import Callable, Mapping
from functools import partial
from typing import NamedTuple

import jax
import jax.numpy as jnp
from flax import nnx

from trl_jax.nn.attention.attention import Attention
from trl_jax.nn.attention.inputs import AttentionInputs
from trl_jax.nn.cache import NewEntries, NewState
from trl_jax.nn.layers import Norm
from trl_jax.nn.linear import Dropout, Linear
from trl_jax.nn.text_order import PreviousTokens, TextOrder

# Chunked scans over states (Dao and Gu 2024, arXiv:2405.21060, section 6)

CHUNK = 64  # tokens
einsum_highest = partial(jnp.einsum, precision=jax.lax.Precision.HIGHEST)


class ChunkMasks(NamedTuple):
    """Which tokens and states precede the tokens of each chunk; `[R, N, ...]`, or `[1, N, ...]` if it is the same for
    all rows.

    The scan carries the state after the last token so far and, if texts have contexts, the state at the end of that
    token's context.

    mask: bool `[I, J]`, the tokens of the chunk up to and including itself that belong to its text.
    after_last, after_context: bool `[I]`, whether the token continues from the first or from the second state.
    context_row: int32 `[]`, the row of this chunk in which the context of its last token ends; -1 if it ends earlier.
        In that case, `context_kept` is True if it ended before the previous chunk's last token, so that its state is
        carried on, and `context_begins` is True if it ended exactly there. None if no row has contexts.
    """

    mask: jax.Array
    after_last: jax.Array
    after_context: jax.Array | None = None
    context_row: jax.Array | None = None
    context_kept: jax.Array | None = None
    context_begins: jax.Array | None = None


class Decays(NamedTuple):
    """The decays within each chunk, `[R, N, ...]`.

    before: `[I, K, G]`, from the preceding state to each token.
    between: `[K, G, I, J]`, from token j to token i; 0 if j does not precede i in its text.
    """

    seen: ChunkMasks
    before: jax.Array
    between: jax.Array

    @property
    def size(self) -> int:
        """Tokens per chunk."""
        return self.before.shape[2]


def chunk_decays(g_RTKG: jax.Array, order: TextOrder | None, *, continued: bool = False) -> Decays:
    """Decays from the log decays `g_RTKG` of single tokens.

    Args:
        order: the texts in each row; None if each row is one text.
        continued: whether rows continue from a state; only without `order`.
    """
    size = min(CHUNK, 1 << (g_RTKG.shape[1] - 1).bit_length())  # a power of two
    g = in_chunks(g_RTKG, size)
    seen = _masks_of_rows(g.shape[1], size, continued) if order is None else _masks_of_texts(order, size)
    before = einsum_highest("rnij,rnjkg->rnikg", seen.mask.astype(g.dtype), g)
    between = jnp.moveaxis(before[:, :, :, None] - before[:, :, None], (2, 3), (4, 5))
    between = jnp.exp(jnp.where(seen.mask[:, :, None, None], between, -jnp.inf))
    return Decays(seen, jnp.exp(before), between)


def in_chunks(x: jax.Array, size: int) -> jax.Array:
    """`[R, T, ...]` as zero-padded chunks `[R, N, I, ...]`."""
    more = -x.shape[1] % size
    x = jnp.pad(x, [(0, 0), (0, more)] + [(0, 0)] * (x.ndim - 2))
    return x.reshape(len(x), -1, size, *x.shape[2:])


def _masks_of_rows(count: int, size: int, continued: bool) -> ChunkMasks:
    mask = jnp.broadcast_to(jnp.tril(jnp.ones((size, size), bool)), (1, count, size, size))
    after_last = (jnp.arange(count)[:, None] > 0) | continued
    return ChunkMasks(mask, jnp.broadcast_to(after_last, (1, count, size)))


def _masks_of_texts(order: TextOrder, size: int) -> ChunkMasks:
    first = order.first.reshape(len(order.first), -1, size)
    place = jnp.arange(order.first.shape[1], dtype=jnp.int32).reshape(-1, size)
    begin = place[:, :1]
    of_text = place[:, None] >= first[..., None]
    before = place[:, None] <= place[..., None]
    if order.context is None:
        return ChunkMasks(of_text & before, first < begin)
    context, end = (x.reshape(first.shape) for x in (order.context, order.context_end))
    of_text |= (place[:, None] >= context[..., None]) & (place[:, None] < end[..., None])
    has = context < end
    after_last = (first < begin) | (has & (context < begin) & (end >= begin))
    after_context = has & (end < begin) & ~(first < begin)
    has, end, begin = has[..., -1], end[..., -1], begin[:, 0]  # for the chunk's last token
    row = jnp.where(has & (end > begin), end - 1 - begin, -1)
    return ChunkMasks(of_text & before, after_last, after_context, row, has & (end < begin), has & (end == begin))


class _ChunkInputs(NamedTuple):
    """What the scan over chunks consumes, `[R, N, ...]`, for S states.

    u: values to write, before the contribution of the states is subtracted.
    read: `[S, K, G, I, C]`, keys that read this contribution from the states, or None.
    queries: `[I, K, C]`. decay: `[S, K, G, I]`, decay of what they read from each state.
    attended: weights of the chunk's own tokens.
    keys, written: keys, and weights with which each `u` enters the S new states.
    kept: weight of each old state in each new state.
    """

    u: jax.Array
    read: jax.Array | None
    queries: jax.Array
    decay: jax.Array
    attended: jax.Array
    keys: jax.Array
    written: jax.Array
    kept: jax.Array


def scanned(
    q: jax.Array,
    k: jax.Array,
    u: jax.Array,
    decays: Decays,
    read: jax.Array | None = None,
    state: jax.Array | None = None,
) -> tuple[jax.Array, jax.Array]:
    """Outputs `[R, N x I, K, G, V]` of all chunks, and the state after each row's last token `[R, K, G, C, V]`.

    Args:
        q, k: queries and keys `[R, N, I, K, C]`.
        u: values to write `[R, N, K, G, I, V]`; with `read`, the contribution of the states is subtracted.
        read: `[R, N, S, K, G, I, C]`, the keys that read this contribution.
        state: `[R, K, G, C, V]`, the state before the first token if rows are `continued`; None for zeros.
    """
    attended = einsum_highest("rnikc,rnjkc->rnkij", q, k)[:, :, :, None] * decays.between
    steps = _ChunkInputs(u, read, q, from_states(decays), attended, k, *_state_weights(decays))

    def chunk(states, step):
        u = step.u if step.read is None else step.u - einsum_highest("rskgic,rskgcv->rkgiv", step.read, states)
        seen = jnp.sum(step.decay[..., None] * einsum_highest("rikc,rskgcv->rskgiv", step.queries, states), axis=1)
        new_states = einsum_highest("rzskg,rskgcv->rzkgcv", step.kept, states)
        new_states += einsum_highest("rzkgj,rjkc,rkgjv->rzkgcv", step.written, step.keys, u)
        return new_states, seen + einsum_highest("rkgij,rkgjv->rkgiv", step.attended, u)

    rows, _, count, heads, group, _ = steps.decay.shape
    states = jnp.zeros((rows, count, heads, group, k.shape[-1], u.shape[-1]), u.dtype)
    states = states if state is None else state[:, None].astype(u.dtype)
    states, out = jax.lax.scan(chunk, states, jax.tree.map(lambda x: jnp.moveaxis(x, 1, 0), steps))
    out = jnp.moveaxis(out, (0, 4), (1, 2))  # [N, R, K, G, I, V] -> [R, N, I, K, G, V]
    return out.reshape(rows, -1, *out.shape[3:]), states[:, 0]


def from_states(decays: Decays) -> jax.Array:
    """Decays `[R, N, S, K, G, I]` from each of S states to the tokens that follow it; 0 for other tokens."""
    seen, before = decays.seen, jnp.moveaxis(decays.before, 2, -1)
    states = [seen.after_last] if seen.after_context is None else [seen.after_last, seen.after_context]
    return jnp.stack([jnp.where(state[:, :, None, None], before, 0) for state in states], axis=2)


def _state_weights(decays: Decays) -> tuple[jax.Array, jax.Array]:
    """`written` and `kept` of `_ChunkInputs`, for the state after the last token and the state at the end of its
    context."""
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


# The gated delta rule, chunked (Yang, Kautz and Hatamizadeh 2024, arXiv:2412.06464)


def delta_rule(
    q_RTKC: jax.Array,
    k_RTKC: jax.Array,
    v_RTKGV: jax.Array,
    g_RTKG: jax.Array,
    beta_RTKG: jax.Array,
    order: TextOrder | None = None,
    state_RKGCV: jax.Array | None = None,
) -> tuple[jax.Array, jax.Array]:
    """Outputs `[R, T, K, G, V]`, and the state after each row's last token `[R, K, G, C, V]`.

    Args:
        q_RTKC, k_RTKC: queries and keys of each of K heads, already scaled.
        v_RTKGV: values of G heads per key head.
        g_RTKG: log decays.
        order: the texts in each row; None if each row is one text.
        state_RKGCV: the state before each row, which then continues a text; only without `order`.
    """
    decays = chunk_decays(g_RTKG, order, continued=state_RKGCV is not None)
    q, k, v, beta = (in_chunks(x, decays.size) for x in (q_RTKC, k_RTKC, v_RTKGV, beta_RTKG))
    u, read = _corrections(k, v, beta, decays)
    out, states = scanned(q, k, u, decays, read, state_RKGCV)
    return out[:, : q_RTKC.shape[1]], states


def _corrections(k, v, beta, decays: Decays) -> tuple[jax.Array, jax.Array]:
    """`u` of all tokens for zero states, and the keys that read each state's contribution to it; both in one solve."""
    strength = jnp.moveaxis(beta, 2, -1)
    system = einsum_highest("rnikc,rnjkc->rnkij", k, k)[:, :, :, None] * decays.between * strength[..., None]
    values = jnp.moveaxis(v * beta[..., None], 2, 4)
    read = einsum_highest("rnikc,rnskgi->rnskgic", k, from_states(decays) * strength[:, :, None])
    count, width = read.shape[2], k.shape[-1]
    parts = [values, *(read[:, :, state] for state in range(count))]
    solved = einsum_highest("rnkgij,rnkgjv->rnkgiv", _inverse(system), jnp.concatenate(parts, axis=-1))
    u, read = solved[..., : v.shape[-1]], solved[..., v.shape[-1] :]
    return u, jnp.moveaxis(read.reshape(*read.shape[:-1], count, width), -2, 2)


@jax.custom_vjp
def _inverse(system: jax.Array) -> jax.Array:
    """Invert unit lower triangular matrices `[..., I, I]`, I a power of two, ignoring the diagonal and above. Blocks of
    size 1 are merged to size 2, 4, ... using only matrix products."""
    size, width = system.shape[-1], 1
    blocks = jnp.ones((*system.shape[:-2], size, 1, 1), system.dtype)
    while width < size:
        at = jnp.arange(size // (2 * width))
        halves = system.reshape(*system.shape[:-2], len(at), 2, width, len(at), 2, width)
        below = jnp.moveaxis(jnp.diagonal(halves[..., 1, :, :, 0, :], axis1=-4, axis2=-2), -1, -3)
        first, second = blocks[..., 0::2, :, :], blocks[..., 1::2, :, :]
        corner = -einsum_highest("...ij,...jk,...kl->...il", second, below, first)
        upper = jnp.concatenate([first, jnp.zeros_like(first)], axis=-1)
        blocks, width = jnp.concatenate([upper, jnp.concatenate([corner, second], axis=-1)], axis=-2), 2 * width
    return blocks[..., 0, :, :]


def _inverse_forward(system):
    inverse = _inverse(system)
    return inverse, inverse


def _inverse_backward(inverse, gradient):
    """d(X^-1) = -X^-1 dX X^-1, however the inverse was computed."""
    product = -einsum_highest("...ji,...jk,...lk->...il", inverse, gradient, inverse)
    return (jnp.tril(product, -1),)


_inverse.defvjp(_inverse_forward, _inverse_backward)


def delta_step(q_RKC, k_RKC, v_RKGV, g_RKG, beta_RKG, state_RKGCV) -> tuple[jax.Array, jax.Array]:
    """Outputs `[R, K, G, V]` of one more token, and the state after it."""
    state = state_RKGCV * jnp.exp(g_RKG)[..., None, None]
    u = beta_RKG[..., None] * (v_RKGV - einsum_highest("rkc,rkgcv->rkgv", k_RKC, state))
    state = state + k_RKC[:, :, None, :, None] * u[..., None, :]
    return einsum_highest("rkc,rkgcv->rkgv", q_RKC, state), state


# The state space model of Mamba-2, chunked (Dao and Gu 2024, arXiv:2405.21060)


def state_space(
    C_RTKC: jax.Array,
    B_RTKC: jax.Array,
    x_RTKGV: jax.Array,
    g_RTKG: jax.Array,
    order: TextOrder | None = None,
    state_RKGCV: jax.Array | None = None,
) -> tuple[jax.Array, jax.Array]:
    """Outputs `[R, T, K, G, V]`, and the state after each row's last token `[R, K, G, C, V]`.

    Args:
        C_RTKC, B_RTKC: for each of K groups of heads.
        x_RTKGV: inputs times time steps, for G heads per group.
        g_RTKG: log decays, `dt A`.
        order: the texts in each row; None if each row is one text.
        state_RKGCV: the state before each row, which then continues a text; only without `order`.
    """
    decays = chunk_decays(g_RTKG, order, continued=state_RKGCV is not None)
    C, B, x = (in_chunks(array, decays.size) for array in (C_RTKC, B_RTKC, x_RTKGV))
    out, states = scanned(C, B, jnp.moveaxis(x, 2, 4), decays, state=state_RKGCV)
    return out[:, : C_RTKC.shape[1]], states


def state_space_step(C_RKC, B_RKC, x_RKGV, g_RKG, state_RKGCV) -> tuple[jax.Array, jax.Array]:
    """Outputs `[R, K, G, V]` of one more token, and the state after it."""
    state = state_RKGCV * jnp.exp(g_RKG)[..., None, None] + B_RKC[:, :, None, :, None] * x_RKGV[..., None, :]
    return einsum_highest("rkc,rkgcv->rkgv", C_RKC, state), state


# The gated short convolution of LFM2


class GatedShortConvolution(nnx.Module):
    """`o(out_gate(x) * conv(in_gate(x) * value(x)))`, with a causal depthwise convolution (LFM2: Liquid AI 2025,
    arXiv:2511.23404).

    `arch` is a models.arch.ShortConvolution. The kernel is stored as on disk, (D, 1, width), the current token last.
    """

    def __init__(self, features: int, arch):
        for name in ("in_gate", "out_gate", "value"):
            setattr(self, name, Linear(features, features, bias=arch.bias, axes=("heads", "embed")))
        self.o = Linear(features, features, bias=arch.bias, axes=("embed", "heads"))
        self.weight = nnx.Param(jnp.zeros((features, 1, arch.width), jnp.float32), axes=("heads", "", ""))
        self.bias = nnx.Param(jnp.zeros((features,), jnp.float32), axes=("heads",)) if arch.bias else None
        self.width = arch.width

    def __call__(
        self, x_RTD: jax.Array, inputs: AttentionInputs, dropout: None = None
    ) -> tuple[jax.Array, tuple[NewState]]:
        """`[R, T, D]` to `[R, T, D]`, and the window for the cache. Reads valid, previous, lengths and cache of
        `inputs`."""
        del dropout  # no family has dropout here
        if inputs.valid is not None:
            x_RTD = x_RTD * inputs.valid[..., None].astype(x_RTD.dtype)
        gated = self.in_gate(x_RTD) * self.value(x_RTD)
        convolved, window = _convolved(gated, self.weight[:, 0], inputs.previous, inputs)
        convolved = convolved.astype(gated.dtype)
        if self.bias is not None:
            convolved = convolved + self.bias[...].astype(gated.dtype)
        return self.o(self.out_gate(x_RTD) * convolved), (window,)


def silu_convolved(
    x_RTD: jax.Array, weight_DW: jax.Array, bias_D: jax.Array | None, inputs: AttentionInputs
) -> tuple[jax.Array, NewState]:
    """SiLU of a causal depthwise convolution, float32 `[R, T, D]`, and the window for the cache; used by recurrent
    layers."""
    previous = None if inputs.order is None else inputs.order.previous
    convolved, window = _convolved(x_RTD, weight_DW, previous, inputs)
    if bias_D is not None:
        convolved = convolved + bias_D.astype(x_RTD.dtype).astype(jnp.float32)
    return jax.nn.silu(convolved.astype(x_RTD.dtype)).astype(jnp.float32), window


def _convolved(
    x_RTD: jax.Array, weight_DW: jax.Array, previous: PreviousTokens | None, inputs: AttentionInputs
) -> tuple[jax.Array, NewState]:
    """The convolution, float32 `[R, T, D]`, and the window: the last W inputs `[R, W, D]` of each row's text, which the
    convolution over W + 1 tokens needs for the next token. `previous` as in `AttentionInputs`; reads lengths and cache
    of `inputs`."""
    count = weight_DW.shape[1] - 1
    if inputs.cache is None:
        padded = jnp.pad(x_RTD, [(0, 0), (count, 0), (0, 0)])
    else:
        window = inputs.cache[0].array.astype(x_RTD.dtype).reshape(len(x_RTD), count, -1)
        padded = jnp.concatenate([window, x_RTD], axis=1)
    terms = [*_previous(x_RTD, padded, count, previous), x_RTD]
    weight = weight_DW.astype(x_RTD.dtype).astype(jnp.float32)
    convolved = sum(x.astype(jnp.float32) * weight[:, at] for at, x in enumerate(terms))
    if inputs.lengths is None:  # a single token, or no cache to fill
        return convolved, NewState(padded[:, x_RTD.shape[1] :], axes=2)
    last = inputs.lengths[:, None] + jnp.arange(count)
    return convolved, NewState(jnp.take_along_axis(padded, last[..., None], axis=1, mode="clip"), axes=2)


def _previous(x_RTD: jax.Array, padded: jax.Array, count: int, previous: PreviousTokens | None) -> list[jax.Array]:
    """`x_RTD` at the `count` preceding tokens, nearest last, `[R, T, D]` each; zeros before the start of a text.
    `padded` is `x_RTD` after the `count` tokens before it."""
    if previous is not None and previous.places is not None:
        gathered = jax.vmap(lambda row, places: row.at[places].get(mode="fill", fill_value=0))
        return [gathered(x_RTD, previous.places[..., at]) for at in range(count)]
    earlier = [padded[:, at : at + x_RTD.shape[1]] for at in range(count)]
    if previous is None:
        return earlier
    return [jnp.where(previous.within[..., at, None], x, 0) for at, x in enumerate(earlier)]


# Common base of recurrent layers


class Recurrent(nnx.Module):
    """Linear maps and short convolutions, followed by a scan along each text: `_scan`, also from a cached state, or
    `_step` for one token after it. `_hides_convolved`: whether invisible tokens are zeroed after the convolution, too,
    and not just before.

    The kernels of the convolutions are stored as on disk, (channels, 1, width), the current token last.

    Args:
        parts: the channels of each convolved part. The one named `values` has value heads, the others key heads.
        bias, convolution_bias: whether the maps, and the convolutions, have biases.
    """

    _hides_convolved: bool
    _scan: Callable[..., tuple[jax.Array, jax.Array]]
    _step: Callable[..., tuple[jax.Array, jax.Array]]

    def __init__(
        self,
        features: int,
        parts: Mapping[str, int],
        *,
        values: str,
        width: int,
        bias: bool = False,
        convolution_bias: bool = False,
    ):
        for name, size in parts.items():
            axis = "heads" if name == values else "kv"
            setattr(self, name, Linear(features, size, bias=bias, axes=(axis, "embed")))
            weight = jnp.zeros((size, 1, width), jnp.float32)
            setattr(self, f"{name}_convolution", nnx.Param(weight, axes=(axis, "", "")))
            if convolution_bias:
                setattr(self, f"{name}_convolution_bias", nnx.Param(jnp.zeros(size, jnp.float32), axes=(axis,)))
        self.parts, self.convolution_bias = tuple(parts.items()), convolution_bias

    def __call__(
        self, x_RTD: jax.Array, inputs: AttentionInputs, dropout: None = None
    ) -> tuple[jax.Array, tuple[NewState, NewState]]:
        """`[R, T, D]` to `[R, T, D]`, and the state for the cache. Reads valid, order, lengths and cache of
        `inputs`."""
        del dropout  # no family has dropout here
        if inputs.striped is not None:
            raise ValueError("A recurrent layer needs the whole text on one device: leave sequence at 1.")
        x_RTD, order = _hide_invisible(x_RTD, inputs.valid), inputs.order
        x_RTD = x_RTD if order is None else order.to_order(x_RTD)
        parts, window = self._convolved(x_RTD, inputs)
        scan_inputs = self._scan_inputs(x_RTD, parts, inputs.lengths)
        if inputs.cache is None:
            out, state = self._scan(*scan_inputs, order)
        else:
            before = inputs.cache[1].array
            before = before.reshape(len(x_RTD), *before.shape[2:])
            if x_RTD.shape[1] == 1:
                out, state = self._step(*(y[:, 0] for y in scan_inputs), before)
            else:
                out, state = self._scan(*scan_inputs, None, before)
        out = self._output(out.reshape(*x_RTD.shape[:2], -1), x_RTD, parts)
        return out if order is None else order.from_order(out), (window, NewState(state, axes=4))

    @abstractmethod
    def _projected(self, name: str, x_RTD: jax.Array) -> jax.Array:
        """Apply one of the input maps: `[R, T, channels]`."""

    @abstractmethod
    def _scan_inputs(
        self, x_RTD: jax.Array, parts: list[jax.Array], lengths: jax.Array | None
    ) -> tuple[jax.Array, ...]:
        """The arguments of `_scan`, `[R, T, ...]` each; `_step` gets their values for one token. `parts` are
        convolved."""

    @abstractmethod
    def _output(self, out: jax.Array, x_RTD: jax.Array, parts: list[jax.Array]) -> jax.Array:
        """The layer's output `[R, T, D]`, from the outputs of the scan `[R, T, channels]`."""

    def _convolved(self, x_RTD: jax.Array, inputs: AttentionInputs) -> tuple[list[jax.Array], NewState]:
        """The convolved parts, float32 `[R, T, channels]` each, and the window for the cache."""

        def of_all(ending: str) -> jax.Array:
            return jnp.concatenate([vars(self)[f"{name}_convolution{ending}"][...] for name, _ in self.parts])

        projected = jnp.concatenate([self._projected(name, x_RTD) for name, _ in self.parts], axis=-1)
        bias = of_all("_bias") if self.convolution_bias else None
        convolved, window = silu_convolved(projected, of_all("")[:, 0], bias, inputs)
        ends = [sum(size for _, size in self.parts[:number]) for number in range(1, len(self.parts))]
        convolved = _hide_invisible(convolved, inputs.valid) if self._hides_convolved else convolved
        return jnp.split(convolved, ends, axis=-1), window


def inside(x: jax.Array, lengths: jax.Array | None) -> jax.Array:
    """Zero `[R, T, ...]` past the end of each text: zeros leave the recurrent state unchanged."""
    if lengths is None:
        return x
    within = jnp.arange(x.shape[1]) < lengths[:, None]
    return jnp.where(within.reshape(*within.shape, *(1,) * (x.ndim - 2)), x, 0)


def _hide_invisible(x: jax.Array, valid: jax.Array | None) -> jax.Array:
    return x if valid is None else x * valid[..., None].astype(x.dtype)


# Gated delta net

_EPSILON = 1e-6  # added to the squared norm of queries and keys


class GatedDeltaNet(Recurrent):
    """Gated delta net (Yang, Kautz and Hatamizadeh 2024, arXiv:2412.06464): convolved queries, keys and values, the
    gated delta rule, a norm and a gate.

    `arch` is a models.arch.GatedDelta. The log decay of a token is `-exp(A_log) * softplus(decay(x) + dt_bias)`, its
    strength `sigmoid(beta(x))`.
    """

    _hides_convolved = False
    _scan, _step = staticmethod(delta_rule), staticmethod(delta_step)

    def __init__(self, features: int, arch, *, eps: float):
        keys, values = arch.key_heads * arch.key_dim, arch.value_heads * arch.value_dim
        super().__init__(features, {"q": keys, "k": keys, "v": values}, values="v", width=arch.width)
        self.gate = Linear(features, values, axes=("heads", "embed"))
        self.beta = Linear(features, arch.value_heads, axes=("heads", "embed"))
        self.decay = Linear(features, arch.value_heads, axes=("heads", "embed"))
        self.dt_bias = nnx.Param(jnp.zeros(arch.value_heads, jnp.float32), axes=("heads",))
        self.A_log = nnx.Param(jnp.zeros(arch.value_heads, jnp.float32), axes=("heads",))
        self.out_norm = Norm(arch.value_dim, kind="rms", eps=eps)
        self.o = Linear(values, features, axes=("embed", "heads"))
        self.arch = arch

    def _projected(self, name: str, x_RTD: jax.Array) -> jax.Array:
        return vars(self)[name](x_RTD)

    def _scan_inputs(
        self, x_RTD: jax.Array, parts: list[jax.Array], lengths: jax.Array | None
    ) -> tuple[jax.Array, ...]:
        spec, (q, k, v) = self.arch, parts
        q, k = (_normalized(y.reshape(*y.shape[:2], spec.key_heads, spec.key_dim)) for y in (q, k))
        v = v.reshape(*v.shape[:2], spec.key_heads, -1, spec.value_dim)
        return q * spec.key_dim**-0.5, k, v, *(inside(y, lengths) for y in self._gates(x_RTD))

    def _output(self, out: jax.Array, x_RTD: jax.Array, parts: list[jax.Array]) -> jax.Array:
        gate = self.gate(x_RTD).astype(jnp.float32)
        out = self.out_norm(out.astype(x_RTD.dtype).reshape(*out.shape[:2], -1, self.arch.value_dim))
        return self.o((out.reshape(gate.shape) * jax.nn.silu(gate)).astype(x_RTD.dtype))

    def _gates(self, x_RTD: jax.Array) -> tuple[jax.Array, jax.Array]:
        """Log decays and strengths, float32 `[R, T, K, G]`."""
        shape = (*x_RTD.shape[:2], self.arch.key_heads, -1)
        decay = jax.nn.softplus(self.decay(x_RTD).astype(jnp.float32) + self.dt_bias[...])
        g = (-jnp.exp(self.A_log[...]) * decay).reshape(shape)
        return g, jax.nn.sigmoid(self.beta(x_RTD)).astype(jnp.float32).reshape(shape)


def _normalized(x: jax.Array) -> jax.Array:
    return x * jax.lax.rsqrt(jnp.sum(jnp.square(x), axis=-1, keepdims=True) + _EPSILON)


# Mamba-2

_PROJECTED = ("gate", "x", "B", "C", "dt")  # input projections, in the order of `StateSpace.scales`


class Mamba2(Recurrent):
    """Mamba-2 mixer (Dao and Gu 2024, arXiv:2405.21060): convolved x, B and C, the state space model, a gate and a
    norm.

    `arch` is a models.arch.StateSpace. The time step of a token is `softplus(dt(x) + dt_bias)`, clipped to
    `arch.dt_limits`; its log decay is `-exp(A_log)` times that.
    """

    _hides_convolved = True
    _scan, _step = staticmethod(state_space), staticmethod(state_space_step)

    def __init__(self, features: int, arch, *, eps: float):
        inner, states = arch.heads * arch.head_dim, arch.groups * arch.state_dim
        parts = {"x": inner, "B": states, "C": states}
        biases = {"bias": arch.bias, "convolution_bias": arch.convolution_bias}
        super().__init__(features, parts, values="x", width=arch.width, **biases)
        self.gate = Linear(features, inner, bias=arch.bias, axes=("heads", "embed"))
        self.dt = Linear(features, arch.heads, bias=arch.bias, axes=("heads", "embed"))
        for name in ("dt_bias", "A_log", "D"):
            setattr(self, name, nnx.Param(jnp.zeros(arch.heads, jnp.float32), axes=("heads",)))
        self.out_norm = None if arch.norm is None else Norm(inner, kind="rms", eps=eps, groups=arch.groups)
        self.o = Linear(inner, features, bias=arch.out_bias, axes=("embed", "heads"))
        self.arch = arch

    def _projected(self, name: str, x_RTD: jax.Array) -> jax.Array:
        scale = self.arch.scales[_PROJECTED.index(name)]
        projected = vars(self)[name](x_RTD)
        return projected if scale == 1.0 else projected * scale

    def _scan_inputs(
        self, x_RTD: jax.Array, parts: list[jax.Array], lengths: jax.Array | None
    ) -> tuple[jax.Array, ...]:
        spec, (x, B, C) = self.arch, parts
        B, C = (y.reshape(*y.shape[:2], spec.groups, spec.state_dim) for y in (B, C))
        dt = inside(self._steps(x_RTD), lengths)
        x = x.reshape(*dt.shape, spec.head_dim)
        return C, B, x * dt[..., None], -jnp.exp(self.A_log[...]).reshape(dt.shape[2:]) * dt

    def _output(self, out: jax.Array, x_RTD: jax.Array, parts: list[jax.Array]) -> jax.Array:
        out = out + jnp.repeat(self.D[...], self.arch.head_dim) * parts[0]
        gate = jax.nn.silu(self._projected("gate", x_RTD).astype(jnp.float32))
        return self.o(self._gated(out, gate).astype(x_RTD.dtype))

    def _steps(self, x_RTD: jax.Array) -> jax.Array:
        """Time steps, float32 `[R, T, K, G]`."""
        dt = jax.nn.softplus(self._projected("dt", x_RTD).astype(jnp.float32) + self.dt_bias[...])
        return jnp.clip(dt, *self.arch.dt_limits).reshape(*x_RTD.shape[:2], self.arch.groups, -1)

    def _gated(self, out: jax.Array, gate: jax.Array) -> jax.Array:
        if self.arch.norm == "before_gate":
            return self.out_norm(out) * gate
        return out * gate if self.out_norm is None else self.out_norm(out * gate)


# Attention and Mamba-2 in parallel


class ParallelMixers(nnx.Module):
    """The scaled sum of attention and Mamba-2 (Falcon-H1: Zuo et al. 2025, arXiv:2507.22448); `scales` is a
    models.arch.MixerScales."""

    def __init__(self, attention: Attention, mamba: Mamba2, scales):
        self.attention, self.mamba, self.scales = attention, mamba, scales

    def __call__(
        self, x_RTD: jax.Array, inputs: AttentionInputs, dropout: Dropout | None = None
    ) -> tuple[jax.Array, NewEntries]:
        """`[R, T, D]` to `[R, T, D]`, and the new entries of both mixers for the cache; `dropout` is for attention."""
        scales, cache = self.scales, inputs.cache
        of_attention, of_mamba = (None, None) if cache is None else (cache[:2], cache[2:])
        attended, keys_values = self.attention(
            x_RTD * scales.attention_in, inputs._replace(cache=of_attention), dropout
        )
        mixed, states = self.mamba(x_RTD * scales.mamba_in, inputs._replace(cache=of_mamba))
        return attended * scales.attention_out + mixed * scales.mamba_out, (*keys_values, *states)
