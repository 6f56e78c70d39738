"""torch's CPU random numbers and float32 sums, in NumPy."""

from __future__ import annotations

import math
import random
import secrets
from collections.abc import Mapping
from typing import NamedTuple

import numpy as np

# ----------------------------------------------------------------------------------------------------
# Relates the arrays that train to the tensors that torch's optimizers see.


class TorchParamLayout(NamedTuple):
    """Attributes:
    stacked: paths of arrays whose first axis counts layers; each layer is one of torch's tensors, or part of one.
    joined: path -> a name shared by the arrays of one tensor, which are joined along its outputs; arrays of other
        paths are tensors by themselves.
    """

    stacked: frozenset[str] = frozenset()
    joined: Mapping[str, str] = {}


# ----------------------------------------------------------------------------------------------------
# Float32 sums in the order of torch's kernels for CPUs.


_LANES = 8  # numbers in a vector
_AT_ONCE, _LEVELS = 4, 4  # partial sums that lie side by side; and those that one goes through


@np.errstate(invalid="ignore")  # of infinite numbers with each other
def torch_sum(values: np.ndarray, axis: int | None = None) -> np.ndarray:
    """The sums over an axis, which is left out.

    Args:
        values: float32, contiguous.
        axis: 1 of two or three; None: all values.
    """
    if axis is None:
        return _of_rows(values.reshape(1, -1))[0]
    if axis != 1 or values.ndim not in (2, 3):
        raise ValueError(f"axis={axis} of {values.ndim} axes, wanted 1 of two or three.")
    if values.ndim == 2 or values.shape[2] == 1:
        return _of_rows(values.reshape(values.shape[:2])).reshape(values.shape[:1] + values.shape[2:])
    return np.stack([_of_columns(part) for part in values])


def _of_rows(values: np.ndarray) -> np.ndarray:
    """`[P]` of `[P, n]`, whose rows are contiguous."""
    rows, count = values.shape
    if count < _LANES:
        return _of_row(values.T)
    vectors = count // _LANES
    whole = vectors * _LANES
    partial = _of_row(values[:, :whole].reshape(rows, vectors, _LANES).transpose(1, 0, 2))
    total = np.zeros(rows, np.float32)
    for place in range(whole, count):
        total = total + values[:, place]
    for lane in range(_LANES):
        total = total + partial[:, lane]
    return total


def _of_columns(values: np.ndarray) -> np.ndarray:
    """`[F]` of `[n, F]`, contiguous columns side by side."""
    columns = values.shape[1]
    together = columns - columns % (_AT_ONCE if columns < _LANES else _AT_ONCE * _LANES)
    return np.concatenate([_cascade(values[:, :together]), _of_row(values[:, together:])])


def _of_row(values: np.ndarray) -> np.ndarray:
    """The sum over the first axis, four at once."""
    whole = len(values) // _AT_ONCE
    parts = _cascade(values[: whole * _AT_ONCE].reshape(whole, _AT_ONCE, *values.shape[1:]))
    for rest in values[whole * _AT_ONCE :]:
        parts[0] = parts[0] + rest
    total = parts[0]
    for part in parts[1:]:
        total = total + part
    return total


def _cascade(values: np.ndarray) -> np.ndarray:
    """The sum over the first axis, one after the other; of many, sums of sums."""
    power = max(4, math.ceil(math.log2(max(len(values), 1))) // _LEVELS)
    sums = np.zeros((_LEVELS, *values.shape[1:]), np.float32)
    for number, value in enumerate(values, 1):
        sums[0] += value
        level = 0
        while level + 1 < _LEVELS and number % (1 << power * (level + 1)) == 0:
            sums[level + 1] += sums[level]
            sums[level] = 0
            level += 1
    total = sums[0]
    for partial in sums[1:]:
        total = total + partial
    return total


# ----------------------------------------------------------------------------------------------------
# torch's CPU random numbers, drawn with NumPy.


_LARGEST_32_BIT_PERMUTATION = (2**32 - 1) // 20  # from here on torch draws 64 bits for each swap
_BLOCK = 2**20  # words that are skipped at once


class GeneratorState(NamedTuple):
    """A place in the stream of a TorchGenerator, small enough to be kept and saved.

    key: uint32 `[624]`, the twister's words.
    used: how many of them were handed out, 0 to 624.
    position: words drawn since the seed.
    """

    key: np.ndarray
    used: int
    position: int


class TorchGenerator:
    """Draws the numbers of `torch.Generator().manual_seed(seed)` on the CPU; of a seed, its low 32 bits count.

    position: words of 32 bits drawn since the seed.
    """

    def __init__(self, seed: int):
        self.manual_seed(seed)

    def manual_seed(self, seed: int) -> None:
        """Go back to the beginning of a seed's stream."""
        self.seed, self.position = seed, 0
        self._state = np.random.RandomState(seed & 0xFFFFFFFF)

    def state(self) -> GeneratorState:
        """The place in the stream, for `restore`."""
        _, key, used, *_ = self._state.get_state()
        return GeneratorState(key, int(used), self.position)

    def restore(self, state: GeneratorState) -> None:
        """Go on from a place that `state` gave."""
        self._state.set_state(("MT19937", state.key, int(state.used)))
        self.position = int(state.position)

    def words(self, count: int) -> np.ndarray:
        """The next `count` raw outputs, uint32 `[count]`. Other threads run meanwhile."""
        self.position += count
        return self._state.randint(0, 2**32, size=count, dtype=np.uint32)

    def skip(self, count: int) -> None:
        """Leave out `count` words."""
        for start in range(0, count, _BLOCK):
            self.words(min(_BLOCK, count - start))

    def permutation(self, count: int) -> np.ndarray:
        """`torch.randperm(count)`: int64 `[count]`."""
        if count >= _LARGEST_32_BIT_PERMUTATION:
            raise ValueError(
                f"A shuffled dataset may have at most {_LARGEST_32_BIT_PERMUTATION - 1:,} rows, got {count:,}. "
                'Pass train_sampling_strategy="sequential" or an IterableDataset.'
            )
        order = list(range(count))
        if count > 1:
            jumps = self.words(count - 1) % np.arange(count, 1, -1, dtype=np.uint32)
            for i, jump in enumerate(jumps.tolist()):
                order[i], order[i + jump] = order[i + jump], order[i]
        return np.asarray(order, dtype=np.int64)

    def integers(self, count: int, high: int) -> np.ndarray:
        """`torch.randint(high, (count,))`, of a `high` below 2 ** 28: int64 `[count]`."""
        return self.words(count).astype(np.int64) % high

    def uniform(self, count: int, bound: float) -> np.ndarray:
        """`torch.empty(count).uniform_(-bound, bound)`: float32 `[count]`."""
        low, high = np.float32(-bound), np.float32(bound)
        return self._uniforms(count) * (high - low) + low

    def normal(self, count: int, std: float) -> np.ndarray:
        """`torch.empty(count).normal_(0, std)`: float32 `[count]`, within 1 ulp."""
        if count < 16:
            return self._normal_one_by_one(count, std)
        uniforms = self._uniforms(count)
        blocks = uniforms[: count - count % 16].reshape(-1, 16)
        values = np.empty(count, dtype=np.float32)
        values[: blocks.size] = _box_muller(blocks, std).reshape(-1)
        if count % 16:  # torch redraws the last sixteen as one block of their own
            values[-16:] = _box_muller(self._uniforms(16).reshape(1, 16), std).reshape(-1)
        return values

    def truncated_normal(self, count: int, std: float, bound: float) -> np.ndarray:
        """`torch.nn.init.trunc_normal_` between -bound and bound, at least 0.4 `std`: normals, drawn again while any
        lies outside; float32 `[count]`."""
        values = self.normal(count, std)
        while (outside := np.abs(values) > np.float32(bound)).any():
            values = np.where(outside, self.normal(count, std), values)
        return values

    def exponential(self, count: int) -> np.ndarray:
        """`torch.empty(count).exponential_(1)`: float32 `[count]`, two words each, equal to the bit."""
        return (-np.log1p(-self._doubles(count))).astype(np.float32)

    def multinomial(self, probabilities: np.ndarray) -> np.ndarray:
        """`torch.multinomial(probabilities, 1)[:, 0]` of float32 `[rows, V]`: int64 `[rows]`.

        The largest p / q wins, the first of equals, where q is exponential. One draws 2 * rows * V words, whatever
        the probabilities are.
        """
        q = self.exponential(probabilities.size).reshape(probabilities.shape)
        with np.errstate(divide="ignore"):  # a q of 0, once in 2^53
            return np.argmax(probabilities / q, axis=-1)

    def _doubles(self, count: int) -> np.ndarray:
        """Numbers of 53 random bits in [0, 1): the low bits of two words, the first of which is the high half."""
        words = self.words(2 * count).astype(np.uint64)
        bits = (words[0::2] << np.uint64(32)) | words[1::2]
        return (bits & np.uint64(2**53 - 1)).astype(np.float64) * 2.0**-53

    def _uniforms(self, count: int) -> np.ndarray:
        return (self.words(count) & np.uint32(0xFFFFFF)).astype(np.float32) * np.float32(2**-24)

    def _normal_one_by_one(self, count: int, std: float) -> np.ndarray:
        """Short tensors: pairs in double precision, 53 random bits each, cosine first and sine kept for the next."""
        pairs = (count + 1) // 2
        uniform = self._doubles(2 * pairs).reshape(pairs, 2)
        radius = np.sqrt(-2.0 * np.log1p(-uniform[:, 1]))
        angle = 2.0 * np.pi * uniform[:, 0]
        values = np.stack([radius * np.cos(angle), radius * np.sin(angle)], axis=1).reshape(-1)[:count]
        return (values * std).astype(np.float32)


def _box_muller(blocks: np.ndarray, std: float) -> np.ndarray:
    """`[n, 16]` uniforms to normals: element k pairs with k + 8."""
    radius = np.sqrt(np.float32(-2.0) * np.log(np.float32(1.0) - blocks[:, :8]))
    angle = np.float32(2.0 * np.pi) * blocks[:, 8:]
    normals = np.concatenate([radius * np.cos(angle), radius * np.sin(angle)], axis=1)
    return (normals * np.float32(std)).astype(np.float32)


# ----------------------------------------------------------------------------------------------------
# The random stream of the process, from which tokens are sampled where no seed is given.


_default = TorchGenerator(secrets.randbits(64))  # as torch's: another in each process until a seed is set


def default_generator() -> TorchGenerator:
    """The process's stream; whoever draws from it goes on where the last one stopped."""
    return _default


def set_seed(seed: int) -> None:
    """Seed `random`, NumPy and the process's stream, as `transformers.set_seed` seeds `random`, NumPy and torch.

    `generate` then samples the tokens that transformers samples after its `set_seed`. torch itself is left alone.
    """
    random.seed(seed)
    np.random.seed(seed)
    _default.manual_seed(seed)
