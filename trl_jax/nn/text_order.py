"""Packed rows as texts: one row per text, and the order of tokens for layers that must read each text in order
(convolutions and recurrent layers) and for attention within images."""

from __future__ import annotations

from typing import NamedTuple

import jax
import jax.numpy as jnp

from trl_jax.core.outputs import Packed, RowView

# One row per text


def by_text(x: jax.Array, texts: RowView) -> jax.Array:
    """Tokens of packed rows `[R, T, ...]` as one zero-padded row per text, `[R x X, L, ...]`. Tokens shared by several
    texts are copied to each of them."""
    rows, count, length = texts.places.shape
    gathered = _to_texts(x.reshape(*x.shape[:2], -1), texts.places.reshape(rows, -1), texts.rows)
    return gathered.reshape(rows * count, length, *x.shape[2:])


def by_token(x: jax.Array, texts: RowView) -> jax.Array:
    """The inverse of `by_text`; one of the identical copies of a shared token is used."""
    rows = len(texts.places)
    gathered = _to_tokens(x.reshape(rows, -1, x[0, 0].size), texts.places.reshape(rows, -1), texts.rows)
    return gathered.reshape(*gathered.shape[:2], *x.shape[2:])


def _at(x: jax.Array, places: jax.Array) -> jax.Array:
    """Index `[R, S, D]` with `[R, M]`; zeros where the index is out of range."""
    return jnp.take_along_axis(x, places[..., None], axis=1, mode="fill", fill_value=0)


@jax.custom_vjp
def _to_texts(x, places, rows):
    return _at(x, places)


def _to_texts_backward(saved, gradient):
    _, rows = saved
    parts = (_at(gradient, rows[:, text]).astype(jnp.float32) for text in range(rows.shape[1]))
    return sum(parts).astype(gradient.dtype), None, None


_to_texts.defvjp(lambda x, places, rows: (_at(x, places), (places, rows)), _to_texts_backward)


@jax.custom_vjp
def _to_tokens(x, places, rows):
    return _at(x, rows[:, 0])


def _to_tokens_backward(saved, gradient):
    places, rows = saved
    read = jnp.take_along_axis(rows[:, 0], places, axis=1, mode="fill", fill_value=-1) == jnp.arange(places.shape[1])
    return jnp.where(read[..., None], _at(gradient, places), 0), None, None


_to_tokens.defvjp(lambda x, places, rows: (_at(x, rows[:, 0]), (places, rows)), _to_tokens_backward)


# The order of tokens


class PreviousTokens(NamedTuple):
    """The W tokens that precede each token in its text, nearest last, `[R, T, W]`; either `within` or `places` is None.

    within: bool, for contiguous texts: whether the token at this distance belongs to the same text.
    places: int32, for other texts: the positions of these tokens in the row; T if there is no such token.
    """

    within: jax.Array | None
    places: jax.Array | None


class TextOrder(NamedTuple):
    """Packed rows reordered so that each text is in order, and branches follow their context; int32 `[R, T]`.

    first, context, context_end: as in `core.outputs.Packed`, for the reordered rows. The last two are None if no text
        has a context.
    previous: for convolutions on the reordered rows.
    order: the positions in the packed row of the reordered tokens. inverse: its inverse. Both None if the order is
        kept.
    """

    first: jax.Array
    context: jax.Array | None
    context_end: jax.Array | None
    previous: PreviousTokens
    order: jax.Array | None = None
    inverse: jax.Array | None = None

    def to_order(self, x: jax.Array) -> jax.Array:
        """Reorder tokens `[R, T, ...]` of packed rows."""
        return x if self.order is None else _gathered(x, self.order)

    def from_order(self, x: jax.Array) -> jax.Array:
        """The inverse of `to_order`."""
        return x if self.inverse is None else _gathered(x, self.inverse)


def text_order(packed: Packed, count: int) -> TextOrder:
    """The order of packed rows, for layers whose convolution also covers the `count` preceding tokens.

    If two completions share a prompt (one is stored before it, in reverse order), both become branches of the prompt.
    """
    if packed.prompt is None and packed.context is None:
        return TextOrder(packed.first, None, None, previous_tokens(packed, count))
    order, inverse, first, *context = jax.vmap(_branches)(packed)
    behind = Packed(first, packed.end, packed.longest, None, None, *context)
    return TextOrder(first, *context, previous_tokens(behind, count), order, inverse)


def _branches(packed: Packed) -> tuple[jax.Array, ...]:
    """For one row: `order`, `inverse`, `first`, `context` and `context_end`."""
    length = len(packed.first)
    place = jnp.arange(length, dtype=jnp.int32)
    head, context, end = packed.first, jnp.full_like(place, length), jnp.full_like(place, length)
    along = place
    if packed.context is not None:
        context, end = packed.context, packed.context_end
    if packed.prompt is not None:
        head, backwards, answer, stop = _completions(packed)
        context, end = jnp.where(answer, packed.prompt, context), jnp.where(answer, stop, end)
        along = jnp.where(backwards, -place, place)
    branch = context < end
    order = jnp.lexsort((along, jnp.where(branch, 1 + head, 0), jnp.where(branch, context, head))).astype(jnp.int32)
    inverse = jnp.zeros_like(place).at[order].set(place)

    def moved(at: jax.Array) -> jax.Array:
        return inverse.at[at].get(mode="fill", fill_value=length)

    first, context, end = (
        moved(head), jnp.where(branch, moved(context), length), jnp.where(branch, 1 + moved(end - 1), length)
    )  # fmt: skip
    return order, inverse, *(x[order] for x in (first, context, end))


def _completions(packed: Packed) -> tuple[jax.Array, ...]:
    """For one row with prompts that two completions share, for each token: the first token, in reading order, of its
    completion or else of its text; whether it is in a completion stored in reverse order; whether it is in any
    completion; and the end of its prompt, or 0."""
    length = len(packed.first)
    place = jnp.arange(length, dtype=jnp.int32)
    backwards = (place < packed.prompt) & (packed.first < length)
    stop = jnp.zeros_like(place).at[packed.prompt].max(jnp.where(backwards, packed.end, 0), mode="drop")
    stop = stop.at[packed.prompt].get(mode="fill", fill_value=0)
    behind = (stop > 0) & (place >= stop)
    head = jnp.where(backwards, packed.prompt - 1, jnp.where(behind, stop, packed.first))
    return head, backwards, backwards | behind, stop


def _gathered(x: jax.Array, places: jax.Array) -> jax.Array:
    return jax.vmap(lambda row, at: row[at])(x, places)


def previous_tokens(packed: Packed, count: int) -> PreviousTokens:
    """The `count` preceding tokens of each token. A branch follows its context, a completion its prompt."""
    if packed.prompt is not None or packed.context is not None:
        return PreviousTokens(None, _places_before(packed, count))
    back = jnp.arange(packed.first.shape[1])[:, None] - jnp.arange(count, 0, -1)
    return PreviousTokens(back >= packed.first[..., None], None)


def _places_before(packed: Packed, count: int) -> jax.Array:
    length = packed.first.shape[1]
    place = jnp.arange(length, dtype=jnp.int32)
    last = jnp.where(place > packed.first, place - 1, length)  # within the token's own range
    if packed.context is not None:
        ends = jnp.where(packed.context_end > packed.context, packed.context_end - 1, length)
        last = jnp.where(place > packed.first, place - 1, ends)
    if packed.prompt is not None:  # a completion before its prompt is in reverse order, see core.outputs.Packed
        nearer = jnp.where(place + 1 < packed.prompt, place + 1, packed.end - 1)
        last = jnp.where(place < packed.prompt, nearer, last)
    last = jnp.where(packed.first < length, last, length).astype(jnp.int32)  # padding
    places = [last]
    while len(places) < count:
        places.append(jax.vmap(lambda row, at: row.at[at].get(mode="fill", fill_value=length))(last, places[-1]))
    return jnp.stack(places[::-1], axis=-1)


# Images


def tokens_ahead(image: jax.Array, packed: Packed | None) -> jax.Array:
    """For each token, how many later tokens of its text belong to the same image: int32 `[R, T]`.

    Consecutive image tokens of a text are one image. If two completions share a prompt, their first tokens do not
    continue an image of the prompt.

    Args:
        image: bool `[R, T]`, which tokens belong to images.
        packed: the layout of rows of several texts; None if each row is one text.
    """
    places = jnp.broadcast_to(jnp.arange(image.shape[1], dtype=jnp.int32), image.shape)
    joined, backwards = image[:, 1:] & image[:, :-1], False
    if packed is not None:
        head, backwards = (packed.first, False) if packed.prompt is None else jax.vmap(_completions)(packed)[:2]
        joined &= head[:, 1:] == head[:, :-1]
    last, first = (jnp.pad(~joined, ((0, 0), side), constant_values=True) for side in ((0, 1), (1, 0)))
    end = jax.lax.cummin(jnp.where(last, places, image.shape[1]), axis=1, reverse=True)
    start = jax.lax.cummax(jnp.where(first, places, 0), axis=1)
    return jnp.where(backwards, places - start, end - places)
