"""torch's CPU random numbers, drawn with NumPy.

TRL's run depends on two draws: the order in which rows are visited and the first values of the score head. Both come
from the 32-bit Mersenne Twister that `torch.manual_seed` seeds; reproducing them makes the same seed mean the same
run without torch installed.
"""

from __future__ import annotations

import numpy as np

_LARGEST_32_BIT_PERMUTATION = (2**32 - 1) // 20  # from here on torch draws 64 bits for each swap


class TorchGenerator:
    """Draws the numbers of `torch.Generator().manual_seed(seed)` on the CPU."""

    def __init__(self, seed: int):
        self.seed = seed
        self._state = np.random.RandomState(seed & 0xFFFFFFFF)

    def words(self, count: int) -> np.ndarray:
        """The next `count` raw outputs, uint32."""
        return self._state.randint(0, 2**32, size=count, dtype=np.uint32)

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

    def _uniforms(self, count: int) -> np.ndarray:
        return (self.words(count) & np.uint32(0xFFFFFF)).astype(np.float32) * np.float32(2**-24)

    def _normal_one_by_one(self, count: int, std: float) -> np.ndarray:
        """Short tensors: pairs in double precision, 53 random bits each, cosine first and sine kept for the next."""
        pairs = (count + 1) // 2
        words = self.words(4 * pairs).astype(np.uint64).reshape(pairs, 2, 2)
        bits = (words[..., 0] << np.uint64(32)) | words[..., 1]
        uniform = (bits & np.uint64(2**53 - 1)).astype(np.float64) * 2.0**-53
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
