"""Attention along packed rows: the ranges of keys that their tokens see, and the kernel for the platform."""

from __future__ import annotations

import jax
import jax.numpy as jnp

from trl_jax.core.packed import BLOCK, Packed
from trl_jax.nn.attention.block import attend_blocks
from trl_jax.nn.attention.inputs import AttentionInputs
from trl_jax.nn.attention.key_ranges import KeyRanges
from trl_jax.nn.attention.row_view import by_text
from trl_jax.nn.attention.splash import attend_splash, splashes
from trl_jax.nn.attention.striped import Striped
from trl_jax.nn.platform import platform


def attend_packed(
    q_RTHC: jax.Array,
    k_RSKC: jax.Array,
    v_RSKC: jax.Array,
    inputs: AttentionInputs,
    *,
    softcap: float | None = None,
    sinks: jax.Array | None = None,
) -> jax.Array:
    """Results `[R, T, H, C]` of queries on keys and values of as many packed rows; T is a multiple of BLOCK.

    A token that sees nothing gets zeros. Of `inputs` it takes scale, packed, window and striped; where tokens are
    striped, S counts those of all devices. `sinks` as in `attend_padded`.

    Raises:
        ValueError: rows of another length.
    """
    rows, length = q_RTHC.shape[:2]
    if length % BLOCK:
        raise ValueError(f"A packed row of {length} tokens is not a multiple of {BLOCK}: pad it to one.")
    ranges = _key_ranges(inputs.packed, inputs.window, inputs.striped, k_RSKC.shape[1])
    k_SKC, v_SKC = (y.reshape(-1, *y.shape[2:]) for y in (k_RSKC, v_RSKC))
    scores = {"scale": inputs.scale, "softcap": softcap, "sinks": sinks}
    return _along(q_RTHC, k_SKC, v_SKC, ranges, k_RSKC.shape[1], **scores)


def attend_by_text(
    q_RTHC: jax.Array,
    k_RTKC: jax.Array,
    v_RTKC: jax.Array,
    inputs: AttentionInputs,
    *,
    softcap: float | None = None,
    sinks: jax.Array | None = None,
) -> jax.Array:
    """As `attend_packed`, where `inputs.packed` has a view of its texts as rows: keys and values of each text are put
    together, those that texts share into each of them. So a query sees one range, a context or a window or not."""
    texts = inputs.packed.texts
    rows, count, length = texts.places.shape
    slots = texts.rows[:, 0]  # of the first text that a token is in
    missing = -rows * count * length % BLOCK
    k_SKC, v_SKC = (
        jnp.pad(by_text(y, texts).reshape(-1, *y.shape[2:]), ((0, missing), (0, 0), (0, 0))) for y in (k_RTKC, v_RTKC)
    )
    place = slots + jnp.arange(rows, dtype=jnp.int32)[:, None] * (count * length)
    nearest = slots % length  # tokens of the text before the query's
    if inputs.window is not None:
        nearest = jnp.minimum(nearest, inputs.window - 1)
    inside = slots < count * length
    ranges = KeyRanges(*(jnp.where(inside, y, 0).reshape(-1) for y in (place - nearest, place + 1)))
    scores = {"scale": inputs.scale, "softcap": softcap, "sinks": sinks}
    return _along(q_RTHC, k_SKC, v_SKC, ranges, length, **scores)


def attend_rows(
    q_RTHC: jax.Array,
    k_RTKC: jax.Array,
    v_RTKC: jax.Array,
    inputs: AttentionInputs,
    *,
    softcap: float | None = None,
    sinks: jax.Array | None = None,
) -> jax.Array:
    """Causal attention of rows of one text each, as packed rows attend; of any length. `inputs` as in `attend_packed`,
    with `lengths`, behind which results are zeros, in the place of `packed`."""
    rows, length = q_RTHC.shape[:2]
    missing = -length % BLOCK
    places = jnp.broadcast_to(jnp.arange(length + missing, dtype=jnp.int32), (rows, length + missing))
    inside = places < (length if inputs.lengths is None else inputs.lengths[:, None])
    packed = Packed(jnp.where(inside, 0, length + missing), jnp.where(inside, places + 1, length + missing), None)
    if inputs.window is not None and inputs.window.ndim:
        inputs = inputs._replace(window=jnp.pad(inputs.window, ((0, 0), (0, missing)), constant_values=1))
    qkv = (jnp.pad(y, ((0, 0), (0, missing), (0, 0), (0, 0))) for y in (q_RTHC, k_RTKC, v_RTKC))
    return attend_packed(*qkv, inputs._replace(packed=packed), softcap=softcap, sinks=sinks)[:, :length]


def seen_both_ways(packed: Packed) -> Packed:
    """For texts whose tokens see what comes after them, too. Texts must share nothing."""
    length = packed.first.shape[-1]
    last = jnp.diff(packed.first, axis=-1, append=-1) != 0
    ends = jax.lax.cummin(jnp.where(last, jnp.arange(1, length + 1), length), axis=last.ndim - 1, reverse=True)
    return packed._replace(end=ends)


def _along(q_RTHC, k_SKC, v_SKC, ranges: KeyRanges, longest: int, **scores) -> jax.Array:
    """By the kernel for the platform; a range has at most `longest` keys."""
    qkv = q_RTHC.reshape(-1, *q_RTHC.shape[2:]), k_SKC, v_SKC
    if platform() == "tpu" and splashes(k_SKC, ranges, longest):
        out = attend_splash(*qkv, ranges, longest=longest, **scores)
    else:
        out = attend_blocks(*qkv, ranges, **scores)
    return out.reshape(q_RTHC.shape)


def _key_ranges(packed: Packed, window: jax.Array | None, striped: Striped | None, length: int) -> KeyRanges:
    """`[N]`, places counted along all rows, one behind the other and each with `length` keys."""
    rows, queries = packed.first.shape
    offset = jnp.arange(rows, dtype=jnp.int32)[:, None] * length
    first, end = ((y + offset).reshape(-1) for y in (packed.first, packed.end))
    context = None
    if packed.context is not None:
        context = tuple((y + offset).reshape(-1) for y in (packed.context, packed.context_end))
    if window is None:
        return KeyRanges(first, end) if context is None else KeyRanges(*context, first, end)
    window = window.reshape(-1) if window.ndim else window
    blocks = jnp.arange(rows * queries // BLOCK) if striped is None else striped.blocks(rows, queries // BLOCK)
    place = (blocks[:, None] * BLOCK + jnp.arange(BLOCK, dtype=jnp.int32)).reshape(-1)
    nearest, last = jnp.maximum(first, place - window + 1), place + jnp.minimum(end - place, window)
    if context is not None:  # a branch's first token is next to its context's last one
        begin, branch = context
        return KeyRanges(jnp.maximum(begin, branch + (place - first) - window + 1), branch, nearest, last)
    if packed.prompt is None:
        return KeyRanges(nearest, last)
    # An answer before its prompt: next to the answer's first token is the prompt's first, but its last is the nearest.
    prompt = (packed.prompt + offset).reshape(-1)
    before, position = place < prompt, end - 1 - place
    second = prompt + jnp.maximum(position - window + 1, 0)
    return KeyRanges(nearest, jnp.where(before, jnp.minimum(last, prompt), last), jnp.where(before, second, end), end)
