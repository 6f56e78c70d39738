"""Reuse of the cache between the turns of a conversation: a turn computes only the tokens that are new."""

from __future__ import annotations

from collections import Counter
from collections.abc import Sequence
from dataclasses import dataclass
from functools import partial
from math import prod
from typing import NamedTuple

import jax
import jax.numpy as jnp
import numpy as np

from trl_jax.core.outputs import reads_of_rows
from trl_jax.data.images import TextImages
from trl_jax.generation.weights import Shards, Weights, shard_mapped, trunk_of
from trl_jax.models.arch import cache_parts
from trl_jax.models.cached_decoder import with_keys
from trl_jax.models.model import merge
from trl_jax.nn.cache import Cache, CachedTexts, CacheFill, CacheSize, LayerCache, each_entry

_STEP = 64  # new tokens of each text per call, so that programs do not depend on the length of a tool's answer
_MOST_NEW = 1 / 2  # largest ratio of new tokens to the longest text's tokens; above, a prefill is as fast
UNEVEN = 2  # texts stay on their shard: the busiest may have at most this many times an even share


def can_keep(weights: Weights, *, stopped: bool) -> bool:
    """Whether a model's cache can be kept for another turn: not with LongRoPE, which rotates all keys differently once
    a text is long.

    Args:
        stopped: whether a `StopRule` ends completions some tokens after their end was generated. Then the layers must
            keep these tokens apart from earlier ones: no windows, and no recurrent layers.
    """
    arch = weights.arch
    separable = all(part.window is None for part in cache_parts(arch))
    separable = separable and all(run.kind.mixer in ("attention", None) for run in arch.runs)
    return weights.longrope_switch_length is None and (separable or not stopped)


@dataclass
class TurnCache:
    """The cache of the last turn of some conversations. Pass the same object to the generation of every turn; the
    model must not change in between.

    keeps: whether to keep the cache of the current turn, see `can_keep`. If not, the next turn begins with a prefill.
    later: whether there has been a turn.
    """

    keeps: bool = False
    later: bool = False
    _last: _Turn | None = None

    def end(self, pieces: list[Piece], texts: Sequence[np.ndarray], images: Sequence[TextImages] | None) -> None:
        """End the current generation.

        Args:
            pieces: of its cache, from now on owned by this object.
            texts: token ids of each row, prompt and completion.
            images: of each row; None without images.
        """
        places = {}
        for number, piece in enumerate(pieces):
            for slot, member in np.argwhere(piece.request_rows >= 0):
                row = piece.request_rows[slot, member]
                # The last token was sampled, but is not in the cache.
                places[_key(texts[row][:-1], _of(images, row))] = _Place(number, slot, member)
        lengths = sorted({length for length, *_ in places}, reverse=True)
        self._last = _Turn(pieces, places, lengths) if pieces else None

    def begin(
        self, texts: Sequence[np.ndarray], images: Sequence[TextImages] | None, group: int, shards: int
    ) -> ContinuedTexts | None:
        """Begin the next generation, and forget the last one.

        Args:
            texts: token ids of the prompts.
            images: of each prompt; None without images.
            group: completions per prompt. The last turn is only reused if there is one.
            shards: number of devices that the prompts are sharded over.

        Returns:
            None if the prompts do not continue the texts of the last generation, are so much longer that a prefill is
            as fast, or are on few of the shards.
        """
        last, self._last = self._last, None
        if last is None or group > 1:
            return None
        places, cached = zip(*(last.find(ids, _of(images, row)) for row, ids in enumerate(texts)), strict=True)
        if None in places:
            return None
        cached, lengths = np.asarray(cached, np.int32), np.asarray(list(map(len, texts)), np.int32)
        continued = ContinuedTexts(last.pieces, texts, images, places, cached, shards)
        busiest = Counter(continued.shard_of).most_common(1)[0][1]
        if (lengths - cached).max() > _MOST_NEW * lengths.max() or busiest > UNEVEN * -(-len(texts) // shards):
            return None
        return continued

    @property
    def device_bytes(self) -> int:
        """Bytes of the cache of the last turn on each device."""
        arrays = jax.tree.leaves([] if self._last is None else [piece.parts for piece in self._last.pieces])
        return sum(prod(array.sharding.shard_shape(array.shape)) * array.dtype.itemsize for array in arrays)

    def forget(self) -> None:
        """Free the cache of the last turn."""
        self._last = None


class Piece(NamedTuple):
    """Part of the cache of a generation.

    prompt_lengths: int `[P]`, in tokens.
    request_rows: int `[P, G]`, the row of each completion that has ended; -1 for others.
    """

    parts: list[LayerCache]
    prompt_lengths: np.ndarray
    request_rows: np.ndarray


class _Turn(NamedTuple):
    """The texts of a generation without their last tokens: where they are in its cache, and how long, longest first."""

    pieces: list[Piece]
    places: dict[_Key, _Place]
    lengths: list[int]

    def find(self, text: np.ndarray, images: TextImages | None) -> tuple[_Place | None, int]:
        """The longest of these texts that `text` continues, and its length."""
        for length in self.lengths:
            if length < len(text) and (place := self.places.get(_key(text[:length], images))) is not None:
                return place, length
        return None, 0


class _Place(NamedTuple):
    """Where the cache of a text is: the piece, the prompt in it, and the completion of the prompt."""

    piece: int
    prompt: int
    member: int


_Key = tuple[int, bytes, bytes]  # number of tokens, the tokens, and a digest of the images


def _key(text: np.ndarray, images: TextImages | None) -> _Key:
    return len(text), text.astype(np.int32).tobytes(), b"" if images is None else images.key


def _of(images: Sequence[TextImages] | None, row: int) -> TextImages | None:
    return None if images is None else images[row]


# The next turn


@dataclass(frozen=True)
class ContinuedTexts:
    """Prompts that continue the texts of the last turn.

    pieces: the cache of the last turn.
    texts, images: token ids, and images if there are any, of each prompt.
    places, known: where the cache of each prompt's beginning is, and its number of tokens, int32 `[prompts]`.
    shards: number of devices that the prompts of the pieces are sharded over.
    """

    pieces: list[Piece]
    texts: Sequence[np.ndarray]
    images: Sequence[TextImages] | None
    places: Sequence[_Place]
    known: np.ndarray
    shards: int

    @property
    def shard_of(self) -> list[int]:
        """The shard that has the cache of each prompt."""
        return [place.prompt // self._each(self.pieces[place.piece]) for place in self.places]

    def prefilled(
        self, weights: Weights, prompts: np.ndarray, size: CacheSize, prompt_capacity: int, max_tokens: int
    ) -> tuple[jax.Array, Cache]:
        """The result of `decode.prefill`. Consumes the cache of the last turn.

        Args:
            prompts: int `[P]`, indices of the prompts in the order of the new cache, which keeps them on their shards;
                -1 for padding.
            size, prompt_capacity, max_tokens: of the new cache, for `prefill`.
        """
        texts = [self.texts[prompt] if prompt >= 0 else np.zeros(1, np.int32) for prompt in prompts]
        cached = np.where(prompts >= 0, self.known[prompts], 0).astype(np.int32)
        parts = self._joined(weights.shards, prompts, cached, prompt_capacity, size)
        offsets = None
        if self.images is not None:
            after = [image.next_position - len(image.features) for image in self.images]
            offsets = np.where(prompts >= 0, np.asarray(after)[prompts], 0).astype(np.int32)
        fill = CacheFill(cached, np.zeros_like(cached), np.int32(0), offsets)
        return _run_new_tokens(weights, Cache(parts, fill), texts, cached, max_tokens)

    def _joined(
        self, shards: Shards | None, prompts: np.ndarray, cached: np.ndarray, prompt_capacity: int, size: CacheSize
    ) -> list[LayerCache]:
        """A cache of the known tokens of these prompts. Consumes the pieces, part by part."""
        texts, parts = [self._texts_of(number, prompts, cached) for number in range(len(self.pieces))], []
        sizes = {"rows": len(prompts) // self.shards, "length": prompt_capacity, "size": size}
        for number, example in enumerate(self.pieces[0].parts):
            part = _empty(example, **sizes, shards=shards)
            for piece, in_piece in zip(self.pieces, texts, strict=True):
                if in_piece.here.any():
                    part = _with_texts(part, piece.parts[number], in_piece, shards=shards)
                for array in jax.tree.leaves(piece.parts[number]):
                    array.delete()
            parts.append(part)
        return parts

    def _texts_of(self, number: int, prompts: np.ndarray, cached: np.ndarray) -> CachedTexts:
        """The texts of these prompts that are in this piece, with prompts numbered within each shard."""
        piece = self.pieces[number]
        places = np.asarray(self.places, np.int32)[prompts]
        here = (prompts >= 0) & (places[:, 0] == number)
        at, completions = np.where(here, places[:, 1:].T, 0)
        lengths = piece.prompt_lengths[at].astype(np.int32)
        return CachedTexts(at % self._each(piece), completions, lengths, cached, here)

    def _each(self, piece: Piece) -> int:
        """Prompts of a piece on each shard."""
        return len(piece.request_rows) // self.shards


@partial(jax.jit, static_argnames=("rows", "length", "size", "shards"))
def _empty(example: LayerCache, *, rows: int, length: int, size: CacheSize, shards: Shards | None) -> LayerCache:
    def of_shard(example: LayerCache) -> LayerCache:
        return each_entry(lambda entry: entry.empty(rows, length, size), example)

    def specs(shards: Shards) -> tuple:
        return (shards.cache.parts,), shards.cache.parts

    return shard_mapped(shards, of_shard, specs)(example)


@partial(jax.jit, static_argnames="shards", donate_argnums=0)
def _with_texts(
    part: LayerCache, earlier: LayerCache, texts: CachedTexts, *, shards: Shards | None = None
) -> LayerCache:
    def of_shard(part: LayerCache, earlier: LayerCache, texts: CachedTexts) -> LayerCache:
        return each_entry(lambda entry, earlier: entry.with_texts(earlier, texts), part, earlier)

    def specs(shards: Shards) -> tuple:
        return (shards.cache.parts, shards.cache.parts, shards.rows), shards.cache.parts

    return shard_mapped(shards, of_shard, specs)(part, earlier, texts)


def _run_new_tokens(
    weights: Weights, cache: Cache, texts: Sequence[np.ndarray], cached: np.ndarray, max_tokens: int
) -> tuple[jax.Array, Cache]:
    """Run the tokens of each text that are not in the cache through the model."""
    more, longest = np.asarray(list(map(len, texts))) - cached, max(map(len, texts))
    logits = None
    for first in range(0, int(more.max()), _STEP):
        tokens = np.zeros((len(texts), _STEP), np.int32)
        for row, text, start in zip(tokens, texts, cached + first, strict=True):
            new = text[start : start + _STEP]
            row[: len(new)] = new
        count = np.clip(more - first, 0, _STEP).astype(np.int32)
        logits, cache = _append_tokens(weights, cache, logits, tokens, count, np.int32(longest), max_tokens=max_tokens)
    return logits, cache


@partial(jax.jit, static_argnames=("max_tokens",), donate_argnames=("cache", "logits"))
def _append_tokens(
    weights: Weights,
    cache: Cache,
    logits: jax.Array | None,
    tokens: jax.Array,
    more: jax.Array,
    longest: jax.Array,
    *,
    max_tokens: int,
) -> tuple[jax.Array, Cache]:
    """Append the first `more` `[R]` of `tokens` `[R, T]` to the prompts of the cache.

    Args:
        logits: of the tokens before, `[R, V]`, returned for texts without another token; None at the start.
    """

    def of_shard(arrays, layers, cache, before, tokens, more, longest):
        model = merge(weights.graph, arrays)
        positions = cache.fill.next_positions[:, None] + jnp.arange(tokens.shape[1])
        reads = reads_of_rows(jnp.maximum(more - 1, 0), tokens.shape[1])
        options = {"cache": cache, "layers": layers, "dtype": weights.dtype, "max_tokens": max_tokens, "lengths": more}
        hidden, new = with_keys(trunk_of(model), tokens, positions, reads, longest, **options)
        logits = weights.logits(model, hidden)
        logits = logits if before is None else jnp.where(more[:, None] > 0, logits, before)
        return logits, cache.extended(new, more)

    def specs(shards: Shards) -> tuple:
        before = None if logits is None else shards.rows
        arguments = shards.params, shards.whole, shards.cache, before, shards.rows, shards.rows, shards.whole
        return arguments, (shards.rows, shards.cache)

    run = shard_mapped(weights.shards, of_shard, specs, parameters=True)
    return run(weights.arrays, weights.layers, cache, logits, tokens, more, longest)
