"""The decoding cache: keys and values, latents, and recurrent states.

The cache of one layer is a tuple of entries, and a forward pass returns what belongs to each of them:

    attention                  keys and values: two `TokenCache`, from two `NewTokens`
    multi-head latent          latents: one `TokenCache` with a single head, from one `NewTokens`
    convolution                its last inputs: one `StateCache`, from one `NewState`
    recurrent                  its convolution's last inputs, and the state: two `StateCache`, from two `NewState`
    attention and recurrent    keys, values, last inputs, state
    tokens by themselves       none

Arrays have the shapes given for one layer, or a leading axis L for several.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass, field, replace
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
from jax.sharding import PartitionSpec

from trl_jax.mesh.mesh import TENSOR

# One array per token


@jax.tree_util.register_dataclass
@dataclass(frozen=True)
class NewTokens:
    """Keys, values or latents of new tokens, `[R, T, K, C]`. `token_axis` as in `TokenCache`."""

    array: jax.Array
    token_axis: int = field(default=-2, metadata={"static": True})

    def cache(self, lengths: jax.Array, size: CacheSize) -> TokenCache:
        """The cache after prompts of these lengths, without completions."""
        prompts = self.array.swapaxes(-2, -3)
        *lead, heads, _, channels = prompts.shape
        shape = [*lead, size.group, heads, channels, channels]
        shape[self.token_axis] = size.per_completion
        completions = zeros_by_head(shape, len(lead) + 1, prompts.dtype)
        return TokenCache(last_tokens(prompts, lengths, size.window), completions, size.window, self.token_axis)

    def cache_of_texts(self, fill: CacheFill, size: CacheSize) -> TokenCache:
        """The cache of completions that follow their prompts in the rows; completions of a prompt are adjacent rows."""
        *lead, _, length, heads, channels = self.array.shape
        prompts = len(fill.prompt_lengths)
        rows = self.array.swapaxes(-2, -3).reshape(*lead, prompts, size.group, heads, length, channels)
        first = jax.lax.slice_in_dim(rows[..., 0, :, :, :], 0, length - size.capacity, axis=-2)
        positions_PT = fill.completion_positions(size.per_completion)
        positions = positions_PT.reshape(*(1 for _ in lead), prompts, 1, 1, size.per_completion, 1)
        completions = with_token_axis(jnp.take_along_axis(rows, positions, axis=-2), self.token_axis)
        prompts = last_tokens(first, fill.prompt_lengths, size.window)
        return TokenCache(prompts, completions, size.window, self.token_axis)


@jax.tree_util.register_dataclass
@dataclass(frozen=True)
class TokenCache:
    """Keys, values or latents of prompts and completions, in the compute dtype.

    prompts: `[P, K, S, C]`, prompts from place 0 on; of longer prompts, the last S tokens. Entries past a prompt's end
        are never attended to.
    completions: `[P, G, K, T, C]`, or `[P, G, K, C, T]` for keys: both layouts let a product with one query read memory
        sequentially.
    window: the most tokens that the layers attend to, which bounds S and T; None for no limit.
    token_axis: the axis T of `completions`, -2 or -1.
    """

    prompts: jax.Array
    completions: jax.Array
    window: int | None = field(default=None, metadata={"static": True})
    token_axis: int = field(default=-2, metadata={"static": True})

    @property
    def lead(self) -> int:
        """The number of axes before P: 1 for several layers."""
        return self.prompts.ndim - 4

    def appended(self, new: NewTokens, place: jax.Array, alive: jax.Array | None) -> TokenCache:
        """Add a token to every completion at `place`, modulo the capacity: the oldest is overwritten."""
        shape, axis = list(self.completions.shape), self.completions.ndim + self.token_axis
        place = place % shape[axis]
        shape[axis] = 1
        token = new.array.reshape(shape)
        if alive is not None and self.window is not None:  # without a window, nothing is overwritten
            token = where(alive, token, jax.lax.dynamic_slice_in_dim(self.completions, place, 1, axis), self.lead)
        token = token.astype(self.completions.dtype)
        return replace(self, completions=jax.lax.dynamic_update_slice_in_dim(self.completions, token, place, axis))

    def extended(self, new: NewTokens, lengths: jax.Array, more: jax.Array) -> TokenCache:
        """Append the first `more` `[P]` tokens of `new` `[P, T]` to prompts of these `lengths` `[P]`; they must fit."""
        prompts, count = self.prompts, self.prompts.shape[-2]
        positions = prompt_positions(lengths + more, count)
        if self.window is not None:
            prompts = tokens_at(prompts, positions - jnp.maximum(lengths - count, 0)[:, None])
        is_new = ((positions >= lengths[:, None]) & (positions < (lengths + more)[:, None]))[:, None, :, None]
        tokens = tokens_at(new.array.swapaxes(-2, -3), positions - lengths[:, None]).astype(prompts.dtype)
        return replace(self, prompts=jnp.where(is_new, tokens, prompts))

    def with_texts(self, earlier: TokenCache, texts: CachedTexts) -> TokenCache:
        """Set prompts to texts (prompt and completion) of an earlier cache."""
        completions = with_token_axis(earlier.completions, self.token_axis)
        return replace(self, prompts=texts.joined(self.prompts, earlier.prompts, completions))

    def empty(self, rows: int, length: int, size: CacheSize) -> TokenCache:
        """A cache like this one for `rows` prompts of up to `length` tokens."""
        lead, (*_, heads, _, channels) = self.prompts.shape[: self.lead], self.prompts.shape
        prompts = (*lead, rows, heads, within(self.window, length), channels)
        completions = [*lead, rows, size.group, heads, channels, channels]
        completions[self.token_axis] = within(self.window, size.capacity)
        dtype = self.completions.dtype
        return replace(self, prompts=jnp.zeros(prompts, dtype), completions=jnp.zeros(completions, dtype))

    def grown(self, more: int, written: jax.Array, grow: Grow) -> TokenCache:
        """Increase the capacity for completions, up to the window."""
        old = self.completions.shape[self.token_axis]
        size = max(within(self.window, old + more), old)
        return replace(self, completions=grow(self.completions, written, self.token_axis, size))

    def with_prompt_capacity(self, count: int) -> TokenCache:
        """Resize to `count` tokens per prompt, or the window if that is smaller. No prompt may be longer."""
        return replace(self, prompts=resized(self.prompts, -2, within(self.window, count)))

    def selected(self, select: Select) -> TokenCache:
        """Select some completions."""
        prompts, completions = select(self.prompts, self.lead, False), select(self.completions, self.lead, True)
        return replace(self, prompts=prompts, completions=completions)

    def refilled(self, slots: jax.Array, new: TokenCache) -> TokenCache:
        """Replace the prompts at `slots` by those of `new` `[P']`. Old completions stay, but are no longer visible."""
        new = new.with_prompt_capacity(self.prompts.shape[-2])
        return replace(self, prompts=replaced(self.prompts, slots, new.prompts, self.lead))


# One state per text


@jax.tree_util.register_dataclass
@dataclass(frozen=True)
class NewState:
    """The state after each row's text, `[R, ...]`. `axes` as in `StateCache`."""

    array: jax.Array
    axes: int = field(metadata={"static": True})

    def cache(self, lengths: jax.Array, size: CacheSize) -> StateCache:
        """The cache after prompts, without completions."""
        del lengths
        axis = self.array.ndim - self.axes
        return StateCache(jnp.repeat(jnp.expand_dims(self.array, axis), size.group, axis=axis), self.axes)


@jax.tree_util.register_dataclass
@dataclass(frozen=True)
class StateCache:
    """The state after each completion, `[P, G, ...]`; `axes` is the number of axes of one state. Its size does not
    depend on the number of tokens."""

    array: jax.Array
    axes: int = field(metadata={"static": True})

    @property
    def lead(self) -> int:
        """The number of axes before P: 1 for several layers."""
        return self.array.ndim - self.axes - 2

    def appended(self, new: NewState, place: jax.Array, alive: jax.Array | None) -> StateCache:
        """Replace the states by those after one more token."""
        del place
        array = new.array.astype(self.array.dtype).reshape(self.array.shape)
        return replace(self, array=array if alive is None else where(alive, array, self.array, self.lead))

    def extended(self, new: NewState, lengths: jax.Array, more: jax.Array) -> StateCache:
        """Replace the states of prompts with one completion each by those after more tokens."""
        del lengths, more
        return replace(self, array=new.array.astype(self.array.dtype).reshape(self.array.shape))

    def with_texts(self, earlier: StateCache, texts: CachedTexts) -> StateCache:
        """Set the states of prompts to those after texts (prompt and completion) of an earlier cache."""
        return replace(self, array=texts.states(self.array, earlier.array, self.lead))

    def empty(self, rows: int, length: int, size: CacheSize) -> StateCache:
        """A cache like this one for `rows` prompts."""
        del length
        shape, lead = self.array.shape, self.lead
        return replace(self, array=jnp.zeros((*shape[:lead], rows, size.group, *shape[lead + 2 :]), self.array.dtype))

    def grown(self, more: int, written: jax.Array, grow: Grow) -> StateCache:
        del more, written, grow
        return self

    def with_prompt_capacity(self, count: int) -> StateCache:
        del count
        return self

    def selected(self, select: Select) -> StateCache:
        """Select some completions."""
        return replace(self, array=select(self.array, self.lead, True))

    def refilled(self, slots: jax.Array, new: StateCache) -> StateCache:
        """Replace the prompts at `slots` by those of `new` `[P']`."""
        return replace(self, array=replaced(self.array, slots, new.array, self.lead))


# The cache of a model

NewEntries = tuple[NewTokens | NewState, ...]  # of one layer
LayerCache = tuple[TokenCache | StateCache, ...]


def each_entry(function: Callable, part: tuple, *others: tuple) -> tuple:
    """Call a function for the entries of a layer's cache, together with the same entries of other tuples."""
    return tuple(function(*entries) for entries in zip(part, *others, strict=True))


class Cache(NamedTuple):
    """The cache of a model, for P prompts and their P x G completions.

    parts: one per group of layers of a run that have the same window, with a leading axis L; or one per layer.
    fill: how much of the parts is filled.
    """

    parts: list[LayerCache]
    fill: CacheFill

    def _each(self, function: Callable, *others: list[tuple]) -> Cache:
        """Call a function for every entry of every part, together with the same entries of other lists."""
        parts = [each_entry(function, *parts) for parts in zip(self.parts, *others, strict=True)]
        return self._replace(parts=parts)

    def appended(self, new: list[NewEntries], *, after: jax.Array, alive: jax.Array | None = None) -> Cache:
        """Add a token to every completion, `new` part by part.

        Args:
            alive: bool `[P x G]`; the tokens of all other completions stay as they are, for `CachedTexts`. None: they
                may be overwritten.
            after: non-negative ids that were sampled using the whole cache. The write position is made to depend on
                them: otherwise XLA sees no order between the reads and writes of a step, and copies the whole cache.
        """
        place = jnp.minimum(self.fill.written, self.fill.written + jnp.maximum(jnp.max(after), 0))
        cache = self._each(lambda entry, new: entry.appended(new, place, alive), new)
        return cache._replace(fill=self.fill._replace(written=self.fill.written + 1))

    def extended(self, new: list[NewEntries], more: jax.Array) -> Cache:
        """Append the first `more` `[P]` tokens of `new` `[P, T]` to the prompts, which have no completions yet."""
        lengths = self.fill.prompt_lengths
        cache = self._each(lambda entry, new: entry.extended(new, lengths, more), new)
        return cache._replace(fill=self.fill._replace(prompt_lengths=lengths + more))

    def grown(self, more: int, grow: Grow) -> Cache:
        """Increase the capacity for completions; `grow` resizes one array, e.g. `grown_ring`. No completion may be
        longer than the current capacity."""
        return self._each(lambda entry: entry.grown(more, self.fill.written, grow))

    def with_prompt_capacity(self, count: int) -> Cache:
        """Resize to `count` tokens per prompt."""
        return self._each(lambda entry: entry.with_prompt_capacity(count))

    def selected(self, select: Select) -> Cache:
        """Select completions from all arrays, but not from `fill`."""
        return self._each(lambda entry: entry.selected(select))

    def refilled(self, slots: jax.Array, new: Cache) -> Cache:
        """Replace the prompts at `slots` by the prompts of `new` `[P']`, which must fit; their completions start empty.
        Prompts whose slot is out of range are dropped."""
        cache = self._each(lambda entry, new: entry.refilled(slots, new), new.parts)
        lengths, begun, written, offsets = self.fill
        lengths = lengths.at[slots].set(new.fill.prompt_lengths, mode="drop")
        if offsets is not None:
            offsets = offsets.at[slots].set(new.fill.offsets, mode="drop")
        return cache._replace(fill=CacheFill(lengths, begun.at[slots].set(written, mode="drop"), written, offsets))


# The fill state, and helpers for resizing


class CacheFill(NamedTuple):
    """How much of a cache is filled, the same for all layers. The token being computed comes next.

    prompt_lengths: int32 `[P]`.
    begun: int32 `[P]`, the value of `written` when the completions of a prompt began: 0, unless the prompt replaced
        another one.
    written: int32 scalar, number of tokens written so far; completions own the tokens since `begun`.
    offsets: int32 `[P]`, the position of the token after each prompt, minus the prompt's length: the tokens of an image
        share positions. None if positions just count tokens.
    """

    prompt_lengths: jax.Array
    begun: jax.Array
    written: jax.Array
    offsets: jax.Array | None = None

    def selected(self, prompts: jax.Array) -> CacheFill:
        """The fill state of these prompts, int32 `[P']`."""
        offsets = None if self.offsets is None else self.offsets[prompts]
        return CacheFill(self.prompt_lengths[prompts], self.begun[prompts], self.written, offsets)

    @property
    def completion_lengths(self) -> jax.Array:
        """Number of completion tokens in the cache for each prompt, int32 `[P]`."""
        return self.written - self.begun

    @property
    def next_positions(self) -> jax.Array:
        """The position of the next token of each prompt's completions, int32 `[P]`."""
        lengths = self.prompt_lengths + self.completion_lengths
        return lengths if self.offsets is None else lengths + self.offsets

    def tokens_back(self, capacity: int) -> jax.Array:
        """How many tokens ago each of `capacity` places was written, int32 `[T]`: 1 for the last token."""
        return (self.written - 1 - jnp.arange(capacity)) % capacity + 1

    def completion_positions(self, capacity: int) -> jax.Array:
        """The position in its text (prompt included) of the completion token at each of `capacity` places, int32
        `[P, T]`; arbitrary for empty places."""
        in_completion = jnp.maximum(self.completion_lengths[:, None] - self.tokens_back(capacity), 0)
        return in_completion + self.prompt_lengths[:, None]


class CachedTexts(NamedTuple):
    """For each prompt of a new cache, the text of another cache (a prompt and one of its completions) that it becomes;
    arrays `[R]`. The new cache has one completion per prompt.

    prompts, members: int32, the prompt, and the completion among the prompt's completions. All completions began
        together.
    prompt_lengths, lengths: int32, number of tokens of the prompt, and of the text.
    here: bool, whether the other cache has the text; the numbers are arbitrary if not.
    """

    prompts: jax.Array
    members: jax.Array
    prompt_lengths: jax.Array
    lengths: jax.Array
    here: jax.Array

    def joined(self, target: jax.Array, prompts: jax.Array, completions: jax.Array) -> jax.Array:
        """Set rows of `target` `[..., R, K, S', C]` to texts of `prompts` `[..., P, K, S, C]` and `completions`
        `[..., P, G, K, T, C]`; of longer texts, the last S' tokens. All rows are computed, because XLA needs no copy of
        `target` then."""
        count, capacity, layers = prompts.shape[-2], completions.shape[-2], (slice(None),) * (prompts.ndim - 4)
        positions, ends = prompt_positions(self.lengths, target.shape[-2]), self.prompt_lengths[:, None]
        of_prompt = tokens_at(prompts[*layers, self.prompts], positions - jnp.maximum(ends - count, 0))
        of_completion = tokens_at(completions[*layers, self.prompts, self.members], (positions - ends) % capacity)
        text = jnp.where((positions < ends)[:, None, :, None], of_prompt, of_completion)
        return jnp.where(self.here[:, None, None, None], text, target)

    def states(self, target: jax.Array, completions: jax.Array, lead: int) -> jax.Array:
        """Set rows of `target` `[..., R, 1, ...]` to the states of `completions` `[..., P, G, ...]`, after `lead`
        axes."""
        states = completions[*(slice(None),) * lead, self.prompts, self.members]
        return where(self.here, jnp.expand_dims(states, lead + 1), target, lead)


class CacheSize(NamedTuple):
    """The size of a new cache: `capacity` places for each of `group` completions per prompt. Layers with a `window`
    keep at most that many tokens of prompts and of completions; None for no limit."""

    group: int
    capacity: int
    window: int | None = None

    @property
    def per_completion(self) -> int:
        """Tokens per completion."""
        return within(self.window, self.capacity)


def within(window: int | None, count: int) -> int:
    """The smaller of `count` and the window."""
    return count if window is None else min(window, count)


def prompt_positions(lengths: jax.Array, count: int) -> jax.Array:
    """The position in its prompt of the token at each of `count` places, int32 `[P, S]`: from 0 on, or for longer
    prompts the positions of the last tokens."""
    return jnp.maximum(lengths - count, 0)[:, None] + jnp.arange(count)


def last_tokens(x: jax.Array, lengths: jax.Array, window: int | None) -> jax.Array:
    """Reduce `[..., P, K, S, C]` to the last tokens of each prompt, as many as fit into the window."""
    count = within(window, x.shape[-2])
    return x if count == x.shape[-2] else tokens_at(x, prompt_positions(lengths, count))


def tokens_at(x: jax.Array, places: jax.Array) -> jax.Array:
    """The tokens of `[..., R, K, S, C]` at these places, int32 `[R, T]`; places out of range give any token."""
    places = places[:, None, :, None]
    return jnp.take_along_axis(x, places.reshape(*(1 for _ in x.shape[:-4]), *places.shape), axis=-2, mode="clip")


def with_token_axis(array: jax.Array, axis: int) -> jax.Array:
    """`[..., T, C]` with its tokens on `axis`, -2 or -1; also the inverse."""
    return array if axis == -2 else array.swapaxes(-1, -2)


def where(which: jax.Array, new: jax.Array, old: jax.Array, lead: int) -> jax.Array:
    """`jnp.where` for `which` `[P x G]` and arrays `[..., P, G, ...]`, after `lead` axes."""
    shape = *(1 for _ in range(lead)), *new.shape[lead : lead + 2], *(1 for _ in new.shape[lead + 2 :])
    return jnp.where(which.reshape(shape), new, old)


def zeros_by_head(shape: Sequence[int], heads: int, dtype: jnp.dtype) -> jax.Array:
    """Zeros with an axis of heads that is sharded over `tensor` like the heads of the layers."""
    zeros, devices = jnp.zeros(shape, dtype), jax.sharding.get_abstract_mesh().shape.get(TENSOR, 1)
    if devices == 1 or shape[heads] % devices:
        return zeros
    axes: list[Any] = [None] * len(shape)
    axes[heads] = TENSOR
    return jax.lax.with_sharding_constraint(zeros, PartitionSpec(*axes))


def replaced(array: jax.Array, slots: jax.Array, new: jax.Array, axis: int) -> jax.Array:
    """Set `new` at these indices of an axis; indices out of range are dropped."""
    return array.at[(slice(None),) * axis + (slots,)].set(new.astype(array.dtype), mode="drop")


def resized(array: jax.Array, axis: int, size: int) -> jax.Array:
    """Resize an axis to `size`, by slicing or zero-padding."""
    missing = size - array.shape[axis]
    if missing < 0:
        return jax.lax.slice_in_dim(array, 0, size, axis=axis)
    widths = [(0, 0)] * array.ndim
    widths[axis] = (0, missing)
    return jnp.pad(array, widths)


# (array, axis of its prompts, whether the next axis counts completions) -> the selected prompts or completions
Select = Callable[[jax.Array, int, bool], jax.Array]
Grow = Callable[[jax.Array, jax.Array, int, int], jax.Array]  # `grown_ring`, or one that also frees the old array


def grown_ring(array: jax.Array, written: jax.Array, axis: int, size: int) -> jax.Array:
    """Grow a ring buffer of n places to `size` >= n: the token written at step s moves from place s % n to s % size.

    Places without a token of the last n steps get copies of others.

    Args:
        written: int32 scalar, number of steps so far.
    """
    old = array.shape[axis]
    if size == old:
        return array
    if size % old == 0:  # s % size % old == s % old
        return jnp.concatenate([array] * (size // old), axis=axis)
    last = written - 1 - (written - 1 - jnp.arange(size)) % size  # the step that wrote to each place last
    return jnp.take(array, last % old, axis=axis)
