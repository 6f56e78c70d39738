"""Random numbers for sampling tokens.

A token is sampled as in torch.multinomial: each id gets an exponential random number q, and the id with the largest
p / q wins. q comes from one of two sources, which the decode loop treats alike:

- TorchNoise, the stream of torch's CPU generator: gives the tokens that transformers samples from the same seed. Each
  step consumes 2 * rows * V words of the stream, including rows that have ended. Step s of row r gets the same words
  whether all rows are generated at once (`PrefetchedWords`) or some of them later (`RowWords`).
- KeyedNoise, JAX's generator with a key per row and position: a row's tokens do not depend on the rest of the batch,
  the devices, or the order in which rows end.
"""

from __future__ import annotations

from collections.abc import Collection, Iterator
from concurrent.futures import Future, ThreadPoolExecutor
from typing import NamedTuple, Protocol

import jax
import jax.numpy as jnp
import numpy as np
from jax.sharding import PartitionSpec

from trl_jax.core.torch_random import GeneratorState, TorchGenerator
from trl_jax.generation.weights import Shards

_LOW_21 = np.uint32(2**21 - 1)
_CHUNK_BYTES = 2**27  # maximum bytes of the words of a chunk
_STATE_BYTES, _MOST_STATES_BYTES = 2500, 2**28  # of one state of torch's generator, and limit for all


class Noise(Protocol):
    """Random numbers for a chunk of steps: a pytree that is passed to jitted code."""

    def specs(self, shards: Shards) -> Noise:
        """Partition specs."""

    def exponentials(self, step: jax.Array | int, vocabulary: int) -> jax.Array:
        """q of one step, float32 `[R, V]`, at least 0. `step` is relative to the chunk's start and may be traced."""


class TorchNoise(NamedTuple):
    """Words of torch's stream for a chunk: uint32 `[steps, R, V, 2]`, from `PrefetchedWords` or `RowWords`."""

    words: jax.Array | np.ndarray

    def specs(self, shards: Shards) -> TorchNoise:
        return TorchNoise(PartitionSpec(None, *shards.rows))

    def exponentials(self, step: jax.Array | int, vocabulary: int) -> jax.Array:
        words_RV2 = jax.lax.dynamic_index_in_dim(jnp.asarray(self.words), step, keepdims=False)
        return exponential(words_RV2[..., 0], words_RV2[..., 1])


class KeyedNoise(NamedTuple):
    """JAX's threefry generator with a key folded with the row number and the position.

    key: of the generation, from `random_key`.
    rows: int32 `[R]`, the number of each row among all rows of the generation.
    positions: int32 `[R]`, number of new tokens of each row at step 0.
    """

    key: jax.Array
    rows: jax.Array
    positions: jax.Array

    def specs(self, shards: Shards) -> KeyedNoise:
        return KeyedNoise(shards.whole, shards.rows, shards.rows)

    def exponentials(self, step: jax.Array | int, vocabulary: int) -> jax.Array:
        def bits(row, position):
            return jax.random.bits(jax.random.fold_in(jax.random.fold_in(self.key, row), position), (vocabulary,))

        bits_RV = jax.vmap(bits)(self.rows, self.positions + step)
        return exponential(bits_RV >> 11, (bits_RV << 21) | jnp.uint32(2**20))  # plus half a unit, so never 0


def random_key(generator: TorchGenerator) -> jax.Array:
    """The key of a generation: the next two words of the stream, so that successive calls differ and are
    reproducible."""
    return jax.random.wrap_key_data(jnp.asarray(generator.words(2)), impl="threefry2x32")


def exponential(high: jax.Array, low: jax.Array) -> jax.Array:
    """-log(1 - u) in float32, with relative error below 6e-7, for u = (the 53 lowest bits of two words) * 2^-53.

    Avoids doubles: below 1/16 the logarithm is a series in u; above, 1 - u is computed from the inverted bits.
    """
    high = high & _LOW_21
    u = high.astype(jnp.float32) * 2.0**-21 + low.astype(jnp.float32) * 2.0**-53
    rest = (high ^ _LOW_21).astype(jnp.float32) * 2.0**-21 + ((~low).astype(jnp.float32) * 2.0**-53 + 2.0**-53)
    series = jnp.float32(1 / 7)
    for n in (6, 5, 4, 3, 2, 1):
        series = series * u + jnp.float32(1 / n)
    return jnp.where(u < 1 / 16, series * u, -jnp.log(rest))


def sample(scores: jax.Array, q: jax.Array) -> jax.Array:
    """Sample ids, int32 `[R]`, from scores and q, float32 `[R, V]`; ties go to the first id.

    -1 where `torch.multinomial` would raise: a NaN, an infinite score, or no id left.
    """
    weights_RV = jnp.exp(scores - scores.max(axis=-1, keepdims=True)) / q
    weights_RV = jax.lax.optimization_barrier(weights_RV)  # or XLA's CPU compiler fuses the logarithms into the argmax
    ids_R = jnp.argmax(weights_RV, axis=-1).astype(jnp.int32)
    best_R1 = jnp.take_along_axis(weights_RV, ids_R[:, None], axis=-1)
    return jnp.where(jnp.isnan(best_R1[:, 0]), -1, ids_R)


def chunk_steps(rows: int, vocabulary: int, most: int) -> int:
    """Number of steps per chunk, 1 to `most`, that keeps its words within 128 MiB."""
    return max(1, min(most, _CHUNK_BYTES // (8 * rows * vocabulary)))


class NoiseSource(Protocol):
    """The random numbers of one generation, one chunk of steps at a time."""

    def noise(self, rows: np.ndarray, drawn: np.ndarray) -> Noise:
        """The next chunk for `rows`, int `[R]`, which have `drawn` tokens each, int `[R]`. Row -1 needs no numbers."""

    def close(self, steps: int) -> None:
        """Finish a generation that used the numbers of `steps` steps."""


class QueueSource(NoiseSource, Protocol):
    """Random numbers for rows that start at different times."""

    def first(self, rows: np.ndarray) -> Noise:
        """A chunk of one step, for the first token of `rows`, int `[R]`."""


class KeyedSource:
    """Noise keyed by row and position.

    Args:
        key: of the generation, from `random_key`.
        numbers: int `[R]`, one per row; rows with the same number get the same noise, also across calls.
    """

    def __init__(self, key: jax.Array, *, numbers: np.ndarray):
        self._key, self._numbers = key, numbers

    def noise(self, rows: np.ndarray, drawn: np.ndarray) -> KeyedNoise:
        return KeyedNoise(self._key, self._numbers[rows].astype(np.int32), drawn.astype(np.int32))

    def first(self, rows: np.ndarray) -> KeyedNoise:
        return self.noise(rows, np.zeros(len(rows)))

    def close(self, steps: int) -> None:
        """Nothing to do: the next generation has another key."""


class PrefetchedWords:
    """The words of torch's stream for one generation; a thread prefetches the next chunk.

    Args:
        generator: must not be used elsewhere until `close`.
        rows: number of rows, including those that have ended.
        steps: per chunk.
        max_steps: of the generation; no chunk beyond these is prefetched.
    """

    def __init__(self, generator: TorchGenerator, *, rows: int, vocabulary: int, steps: int, max_steps: int):
        self._generator, self._shape, self._max_steps = generator, (steps, rows, vocabulary, 2), max_steps
        self._starts: list[GeneratorState] = []
        self._thread = ThreadPoolExecutor(max_workers=1, thread_name_prefix="words")
        self._next: Future | None = self._thread.submit(self._make)

    def noise(self, rows: np.ndarray, drawn: np.ndarray) -> TorchNoise:
        """The next chunk for `rows`, int `[R]`; all must have the same number of tokens."""
        del drawn
        future = self._next or self._thread.submit(self._make)
        words = future.result()
        behind = len(self._starts) * self._shape[0] >= self._max_steps
        self._next = None if behind else self._thread.submit(self._make)
        return TorchNoise(words if len(rows) == self._shape[1] else words[:, rows])

    def close(self, steps: int) -> None:
        """Stop the thread and rewind the generator to where torch's would be after `steps` steps."""
        self._thread.shutdown(wait=True)
        chunk, within = divmod(steps, self._shape[0])
        if chunk == len(self._starts):  # every chunk was used up
            chunk, within = chunk - 1, self._shape[0]
        self._generator.restore(self._starts[chunk])
        self._generator.skip(within * int(np.prod(self._shape[1:])))

    def _make(self) -> np.ndarray:
        self._starts.append(self._generator.state())
        return self._generator.words(int(np.prod(self._shape))).reshape(self._shape)


class RowWords:
    """The words of torch's stream for rows that start at different times.

    The stream has the words of all rows for step 0, then those of all rows for step 1, and so on. It is read once, step
    by step, and states of the generator are kept on the way, so that a row that starts later can read its words again.

    Args:
        generator: must not be used elsewhere until `close`.
        rows: number of rows of the generation.
        steps: per chunk.
        max_steps: of the generation.
    """

    def __init__(self, generator: TorchGenerator, *, rows: int, vocabulary: int, steps: int, max_steps: int):
        self._generator, self._again = generator, TorchGenerator(0)
        self._rows, self._vocabulary, self._steps, self._max_steps = rows, vocabulary, steps, max_steps
        self._block = -(-rows * max_steps * _STATE_BYTES // _MOST_STATES_BYTES)  # rows between two saved states
        self._states: list[list[GeneratorState]] = []  # for each step that was read, the state at each block

    def noise(self, rows: np.ndarray, drawn: np.ndarray) -> TorchNoise:
        """The next chunk for `rows`, int `[R]`, which have `drawn` tokens each, int `[R]`. Row -1 gets zeros."""
        return self._chunk(rows, drawn, self._steps)

    def first(self, rows: np.ndarray) -> TorchNoise:
        """A chunk of one step, for the first token of `rows`, int `[R]`."""
        return self._chunk(rows, np.zeros(len(rows), np.int64), 1)

    def close(self, steps: int) -> None:
        """Set the generator to where torch's would be after `steps` steps."""
        self._read_until(steps)
        if steps < len(self._states):
            self._generator.restore(self._states[steps][0])

    def _chunk(self, rows: np.ndarray, drawn: np.ndarray, steps: int) -> TorchNoise:
        words = np.zeros((steps, len(rows), self._vocabulary, 2), np.uint32)
        needed: dict[int, dict[int, list[tuple[int, int, int]]]] = {}  # step -> block -> (row in block, chunk indices)
        for place, (row, first) in enumerate(zip(rows.tolist(), drawn.tolist(), strict=True)):
            if row >= 0:
                block, within = divmod(row, self._block)
                for step in range(int(first), min(int(first) + steps, self._max_steps)):
                    needed.setdefault(step, {}).setdefault(block, []).append((within, step - int(first), place))
        for step, of_step in sorted(needed.items()):
            self._read_until(step)
            for block, block_words in self._words(step, of_step.keys()):
                for within, at, place in of_step[block]:
                    words[at, place] = block_words[within]
        return TorchNoise(words)

    def _read_until(self, step: int) -> None:
        while len(self._states) < step:
            for _ in self._words(len(self._states), ()):
                pass

    def _words(self, step: int, needed: Collection[int]) -> Iterator[tuple[int, np.ndarray]]:
        """The words `[rows, V, 2]` of the needed blocks of a step that was read before or is the next to be read."""
        if step < len(self._states):
            for block in needed:
                self._again.restore(self._states[step][block])
                yield block, self._of_block(self._again, block)
            return
        states = []
        for block in range(-(-self._rows // self._block)):
            states.append(self._generator.state())
            words = self._of_block(self._generator, block)
            if block in needed:
                yield block, words
        self._states.append(states)

    def _of_block(self, generator: TorchGenerator, block: int) -> np.ndarray:
        rows = min(self._block, self._rows - block * self._block)
        return generator.words(rows * self._vocabulary * 2).reshape(rows, self._vocabulary, 2)
