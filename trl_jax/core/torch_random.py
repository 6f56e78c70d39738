"""torch's CPU random numbers and float32 sums, reproduced in NumPy."""

from __future__ import annotations

import math
import random
import secrets
from collections.abc import Mapping
from typing import NamedTuple

import numpy as np

# Mapping from our arrays to torch's tensors


class TorchParamLayout(NamedTuple):
    """How trainable arrays correspond to the tensors that a torch optimizer would see.

    stacked: paths of arrays whose first axis counts layers; each layer is a tensor of its own, or part of one.
    joined: path -> a name shared by arrays that form one tensor, concatenated along the output axis. Other arrays
        are tensors of their own.
    axes: path -> the output axis where it is neither the last but one of a matrix nor the last of a vector.
    kernels: path of a matrix `[out, in]` -> the shape of torch's kernel per output, if it is a convolution there.
    """

    stacked: frozenset[str] = frozenset()
    joined: Mapping[str, str] = {}
    axes: Mapping[str, int] = {}
    kernels: Mapping[str, tuple[int, ...]] = {}


# Float32 sums in the order of torch's CPU kernels

_LANES = 8  # numbers per SIMD vector
_INTERLEAVED, _LEVELS = 4, 4  # partial sums computed side by side, and levels of the cascade


@np.errstate(invalid="ignore")  # inf - inf
def torch_sum(values: np.ndarray, axis: int | None = None) -> np.ndarray:
    """Sum over an axis in torch's order, removing the axis.

    Args:
        values: float32, contiguous.
        axis: 1, for two or three axes; None: sum all values.
    """
    if axis is None:
        return _sum_rows(values.reshape(1, -1))[0]
    if axis != 1 or values.ndim not in (2, 3):
        raise ValueError(f"axis must be 1, of two or three axes, got axis={axis} of {values.ndim}.")
    if values.ndim == 2 or values.shape[2] == 1:
        return _sum_rows(values.reshape(values.shape[:2])).reshape(values.shape[:1] + values.shape[2:])
    return np.stack([_sum_columns(part) for part in values])


def _sum_rows(values: np.ndarray) -> np.ndarray:
    """Sum `[P, n]` over contiguous rows: `[P]`."""
    rows, count = values.shape
    if count < _LANES:
        return _sum_interleaved(values.T)
    vectors = count // _LANES
    whole = vectors * _LANES
    partial = _sum_interleaved(values[:, :whole].reshape(rows, vectors, _LANES).transpose(1, 0, 2))
    total = np.zeros(rows, np.float32)
    for column in range(whole, count):
        total = total + values[:, column]
    for lane in range(_LANES):
        total = total + partial[:, lane]
    return total


def _sum_columns(values: np.ndarray) -> np.ndarray:
    """Sum `[n, F]` over the first axis: `[F]`; neighboring columns are contiguous."""
    columns = values.shape[1]
    together = columns - columns % (_INTERLEAVED if columns < _LANES else _INTERLEAVED * _LANES)
    return np.concatenate([_cascade(values[:, :together]), _sum_interleaved(values[:, together:])])


def _sum_interleaved(values: np.ndarray) -> np.ndarray:
    """Sum over the first axis, in four interleaved partial sums."""
    whole = len(values) // _INTERLEAVED
    parts = _cascade(values[: whole * _INTERLEAVED].reshape(whole, _INTERLEAVED, *values.shape[1:]))
    for remainder in values[whole * _INTERLEAVED :]:
        parts[0] = parts[0] + remainder
    total = parts[0]
    for part in parts[1:]:
        total = total + part
    return total


def _cascade(values: np.ndarray) -> np.ndarray:
    """Sum over the first axis sequentially; long sums cascade through several levels of partial sums."""
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


# torch's CPU random numbers

_LARGEST_32_BIT_PERMUTATION = (2**32 - 1) // 20  # from this count on, torch draws 64 bits per swap
_BLOCK = 2**20  # words skipped at a time


class GeneratorState(NamedTuple):
    """A position in the stream of a TorchGenerator, small enough to save in a checkpoint.

    key: uint32 `[624]`, the Mersenne Twister state.
    used: how many of these words were handed out, 0 to 624.
    position: words drawn since seeding.
    """

    key: np.ndarray
    used: int
    position: int


class TorchGenerator:
    """Reproduces `torch.Generator().manual_seed(seed)` on the CPU. Only the low 32 bits of the seed are used.

    position: 32-bit words drawn since seeding; seedings: how often it has been seeded.
    """

    def __init__(self, seed: int):
        self.seedings = 0
        self.manual_seed(seed)

    def manual_seed(self, seed: int) -> None:
        """Restart the stream with a seed."""
        self.seed, self.position = seed, 0
        self.seedings += 1
        self._state = np.random.RandomState(seed & 0xFFFFFFFF)

    def state(self) -> GeneratorState:
        """The current position in the stream, for `restore`."""
        _, key, used, *_ = self._state.get_state()
        return GeneratorState(key, int(used), self.position)

    def restore(self, state: GeneratorState) -> None:
        """Continue from a position returned by `state`."""
        self._state.set_state(("MT19937", state.key, int(state.used)))
        self.position = int(state.position)

    def words(self, count: int) -> np.ndarray:
        """The next `count` raw outputs, uint32 `[count]`. Releases the GIL."""
        self.position += count
        return self._state.randint(0, 2**32, size=count, dtype=np.uint32)

    def skip(self, count: int) -> None:
        """Skip `count` words."""
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
        """`torch.randint(high, (count,))` for `high` < 2 ** 28: int64 `[count]`."""
        return self.words(count).astype(np.int64) % high

    def uniform(self, count: int, bound: float) -> np.ndarray:
        """`torch.empty(count).uniform_(-bound, bound)`: float32 `[count]`."""
        low, high = np.float32(-bound), np.float32(bound)
        return self._uniforms(count) * (high - low) + low

    def normal(self, count: int, std: float) -> np.ndarray:
        """`torch.empty(count).normal_(0, std)`: float32 `[count]`, within 1 ulp."""
        if count < 16:
            return self._normal_in_pairs(count, std)
        uniforms = self._uniforms(count)
        blocks = uniforms[: count - count % 16].reshape(-1, 16)
        values = np.empty(count, dtype=np.float32)
        values[: blocks.size] = _box_muller(blocks, std).reshape(-1)
        if count % 16:  # torch redraws the last sixteen as a block of their own
            values[-16:] = _box_muller(self._uniforms(16).reshape(1, 16), std).reshape(-1)
        return values

    def truncated_normal(self, count: int, std: float, bound: float) -> np.ndarray:
        """`torch.nn.init.trunc_normal_` between -bound and bound, where bound >= 0.4 `std`: normals are redrawn until
        all are inside; float32 `[count]`."""
        values = self.normal(count, std)
        while (outside := np.abs(values) > np.float32(bound)).any():
            values = np.where(outside, self.normal(count, std), values)
        return values

    def exponential(self, count: int) -> np.ndarray:
        """`torch.empty(count).exponential_(1)`, bit for bit: float32 `[count]`, two words per number."""
        return (-np.log1p(-self._doubles(count))).astype(np.float32)

    def multinomial(self, probabilities: np.ndarray) -> np.ndarray:
        """`torch.multinomial(probabilities, 1)[:, 0]` of float32 `[rows, V]`: int64 `[rows]`.

        The largest p / q wins (the first one, if there are ties), where q is exponential. A draw always consumes
        2 * rows * V words.
        """
        q = self.exponential(probabilities.size).reshape(probabilities.shape)
        with np.errstate(divide="ignore"):  # q is 0 once in 2^53
            return np.argmax(probabilities / q, axis=-1)

    def _doubles(self, count: int) -> np.ndarray:
        """Uniforms in [0, 1) from 53 random bits: the low bits of two words, high word first."""
        words = self.words(2 * count).astype(np.uint64)
        bits = (words[0::2] << np.uint64(32)) | words[1::2]
        return (bits & np.uint64(2**53 - 1)).astype(np.float64) * 2.0**-53

    def _uniforms(self, count: int) -> np.ndarray:
        return (self.words(count) & np.uint32(0xFFFFFF)).astype(np.float32) * np.float32(2**-24)

    def _normal_in_pairs(self, count: int, std: float) -> np.ndarray:
        """As torch for fewer than 16: pairs in double precision, first the cosine, then the sine."""
        pairs = (count + 1) // 2
        uniform = self._doubles(2 * pairs).reshape(pairs, 2)
        radius = np.sqrt(-2.0 * np.log1p(-uniform[:, 1]))
        angle = 2.0 * np.pi * uniform[:, 0]
        values = np.stack([radius * np.cos(angle), radius * np.sin(angle)], axis=1).reshape(-1)[:count]
        return (values * std).astype(np.float32)


def _box_muller(blocks: np.ndarray, std: float) -> np.ndarray:
    """`[n, 16]` uniforms to normals; element k pairs with k + 8."""
    radius = np.sqrt(np.float32(-2.0) * np.log(np.float32(1.0) - blocks[:, :8]))
    angle = np.float32(2.0 * np.pi) * blocks[:, 8:]
    normals = np.concatenate([radius * np.cos(angle), radius * np.sin(angle)], axis=1)
    return (normals * np.float32(std)).astype(np.float32)


# The process-wide stream, used to sample tokens when no seed is given

_default = TorchGenerator(secrets.randbits(64))  # like torch's, random until a seed is set


def default_generator() -> TorchGenerator:
    """The process-wide stream, shared by all callers."""
    return _default


def set_seed(seed: int) -> None:
    """Seed `random`, NumPy and the process-wide stream, as `transformers.set_seed` seeds `random`, NumPy and torch.

    `generate` then samples the same tokens as transformers after its `set_seed`. torch itself is not seeded.
    """
    random.seed(seed)
    np.random.seed(seed)
    _default.manual_seed(seed)
