"""The random numbers that tokens are sampled with.

A token is drawn as torch draws it: each id has an exponential number q, and the largest p / q wins. q comes from one of
two sources, which the decode loop cannot tell apart:

- TorchNoise, the stream of torch's CPU generator: the tokens that transformers draws from the same seed. A step takes
  2 * rows * V words of the stream, those of rows that have ended included.
- KeyedNoise, JAX's generator with a key for each row and position: a row's tokens do not depend on the rows beside it,
  on the devices or on the order in which rows are completed.
"""

from __future__ import annotations

from concurrent.futures import Future, ThreadPoolExecutor
from typing import NamedTuple, Protocol

import jax
import jax.numpy as jnp
import numpy as np
from jax.sharding import PartitionSpec

from trl_jax.core.torch_random import GeneratorState, TorchGenerator
from trl_jax.generation.decode import Shards

_LOW_21 = np.uint32(2**21 - 1)
_CHUNK_BYTES = 2**27  # of words for the steps of a chunk


class Noise(Protocol):
    """The numbers for some steps of some rows: a pytree, handed to a jitted chunk of steps."""

    def places(self, shards: Shards) -> Noise:
        """How they are divided."""

    def exponentials(self, step: jax.Array | int, vocabulary: int) -> jax.Array:
        """q of one step, float32 `[R, V]`, at least 0. `step` counts from the chunk's first and may be traced."""


class TorchNoise(NamedTuple):
    """The words of torch's stream for a chunk: uint32 `[steps, R, V, 2]`, as `PrefetchedWords.noise` gives them."""

    words: jax.Array | np.ndarray

    def places(self, shards: Shards) -> TorchNoise:
        return TorchNoise(PartitionSpec(None, *shards.rows))

    def exponentials(self, step: jax.Array | int, vocabulary: int) -> jax.Array:
        words_RV2 = jax.lax.dynamic_index_in_dim(jnp.asarray(self.words), step, keepdims=False)
        return exponential(words_RV2[..., 0], words_RV2[..., 1])


class KeyedNoise(NamedTuple):
    """JAX's threefry, folded with a row's number and its position.

    key: of a generation, as `random_key` makes it.
    rows: int32 `[R]`, the number of each row among all rows of the generation.
    positions: int32 `[R]`, how many new tokens each row has at step 0.
    """

    key: jax.Array
    rows: jax.Array
    positions: jax.Array

    def places(self, shards: Shards) -> KeyedNoise:
        return KeyedNoise(shards.whole, shards.rows, shards.rows)

    def exponentials(self, step: jax.Array | int, vocabulary: int) -> jax.Array:
        def bits(row, position):
            return jax.random.bits(jax.random.fold_in(jax.random.fold_in(self.key, row), position), (vocabulary,))

        bits_RV = jax.vmap(bits)(self.rows, self.positions + step)
        return exponential(bits_RV >> 11, (bits_RV << 21) | jnp.uint32(2**20))  # half a unit more, so never 0


def random_key(generator: TorchGenerator) -> jax.Array:
    """The key of a generation: the next two words of the stream, so that calls in a row differ and repeat by seed."""
    return jax.random.wrap_key_data(jnp.asarray(generator.words(2)), impl="threefry2x32")


def exponential(high: jax.Array, low: jax.Array) -> jax.Array:
    """-log(1 - u) in float32, within 6e-7 of itself, of u = (the 53 lowest bits of two words) * 2^-53.

    No doubles are needed: below 1/16 the logarithm is a series in u, and above 1 - u has the inverted bits.
    """
    high = high & _LOW_21
    u = high.astype(jnp.float32) * 2.0**-21 + low.astype(jnp.float32) * 2.0**-53
    rest = (high ^ _LOW_21).astype(jnp.float32) * 2.0**-21 + ((~low).astype(jnp.float32) * 2.0**-53 + 2.0**-53)
    series = jnp.float32(1 / 7)
    for n in (6, 5, 4, 3, 2, 1):
        series = series * u + jnp.float32(1 / n)
    return jnp.where(u < 1 / 16, series * u, -jnp.log(rest))


def sample(scores: jax.Array, q: jax.Array) -> jax.Array:
    """The ids that win, int32 `[R]`, of scores and q, float32 `[R, V]`; of equals the first.

    -1 where `torch.multinomial` would raise: a NaN, an infinite score, or no id that is left.
    """
    weights_RV = jnp.exp(scores - scores.max(axis=-1, keepdims=True)) / q
    weights_RV = jax.lax.optimization_barrier(weights_RV)  # else XLA's CPU compiler takes each logarithm in the argmax
    ids_R = jnp.argmax(weights_RV, axis=-1).astype(jnp.int32)
    best_R1 = jnp.take_along_axis(weights_RV, ids_R[:, None], axis=-1)
    return jnp.where(jnp.isnan(best_R1[:, 0]), -1, ids_R)


def chunk_steps(rows: int, vocabulary: int, most: int) -> int:
    """How many steps a chunk should have so that its words stay within 128 MiB; 1 to `most`."""
    return max(1, min(most, _CHUNK_BYTES // (8 * rows * vocabulary)))


class NoiseSource(Protocol):
    """The random numbers of one generation, a chunk of steps at a time."""

    def noise(self, rows: np.ndarray, drawn: np.ndarray) -> Noise:
        """The next chunk, for `rows`, int `[R]`, of which each has `drawn` tokens, int `[R]`."""

    def close(self, steps: int) -> None:
        """End it, after `steps` steps of which the numbers were used."""


class KeyedSource:
    """Numbers by row and position.

    Args:
        key: of the generation, as `random_key` makes it. numbers: of its rows, int `[R]`: two rows with one number, of
            one call or of two, draw alike.
    """

    def __init__(self, key: jax.Array, *, numbers: np.ndarray):
        self._key, self._numbers = key, numbers

    def noise(self, rows: np.ndarray, drawn: np.ndarray) -> KeyedNoise:
        return KeyedNoise(self._key, self._numbers[rows].astype(np.int32), drawn.astype(np.int32))

    def close(self, steps: int) -> None:
        """There is nothing to end: what comes next has another key."""


class PrefetchedWords:
    """The words of torch's stream for one generation, a thread making those of the next chunk ahead of time.

    Args:
        generator: nobody else may draw from it before `close`.
        rows: all of the generation, with those that have ended.
        steps: of a chunk.
        max_steps: of the generation; no chunk is made ahead that begins behind them.
    """

    def __init__(self, generator: TorchGenerator, *, rows: int, vocabulary: int, steps: int, max_steps: int):
        self._generator, self._shape, self._max_steps = generator, (steps, rows, vocabulary, 2), max_steps
        self._starts: list[GeneratorState] = []
        self._thread = ThreadPoolExecutor(max_workers=1, thread_name_prefix="words")
        self._next: Future | None = self._thread.submit(self._make)

    def noise(self, rows: np.ndarray, drawn: np.ndarray) -> TorchNoise:
        """The next chunk, for `rows`, int `[R]`; all have drawn as many tokens."""
        del drawn
        future = self._next or self._thread.submit(self._make)
        words = future.result()
        behind = len(self._starts) * self._shape[0] >= self._max_steps
        self._next = None if behind else self._thread.submit(self._make)
        return TorchNoise(words if len(rows) == self._shape[1] else words[:, rows])

    def close(self, steps: int) -> None:
        """End the thread and leave the generator where torch's is after `steps` steps."""
        self._thread.shutdown(wait=True)
        chunk, within = divmod(steps, self._shape[0])
        if chunk == len(self._starts):  # all that was made was used
            chunk, within = chunk - 1, self._shape[0]
        self._generator.restore(self._starts[chunk])
        self._generator.skip(within * int(np.prod(self._shape[1:])))

    def _make(self) -> np.ndarray:
        self._starts.append(self._generator.state())
        return self._generator.words(int(np.prod(self._shape))).reshape(self._shape)
