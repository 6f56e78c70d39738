"""Experts in four bits, read as bfloat16: MXFP4 of the OCP Microscaling Formats (MX) Specification 1.0."""

from __future__ import annotations

from pathlib import Path

import ml_dtypes
import numpy as np

from trl_jax.hub.formats.safetensors import CheckpointFiles

METHOD = "mxfp4"  # in quantization_config.quant_method
BLOCKS, SCALES = "_blocks", "_scales"
_POSITIVE = np.asarray([0, 0.5, 1, 1.5, 2, 3, 4, 6], np.float32)  # the numbers of E2M1, whose first bit is the sign
_NUMBERS = np.concatenate([_POSITIVE, -_POSITIVE])
_BYTES = _NUMBERS[np.arange(256)[:, None] >> np.asarray([0, 4]) & 15]  # of a byte, `[256, 2]`: the low bits come first
_BIAS = 127  # of a scale's exponent


class Mxfp4Files(CheckpointFiles):
    """A checkpoint in which `<tensor>_blocks`, uint8 `[E, out, G, B]`, and `<tensor>_scales`, uint8 `[E, out, G]`, are
    read as one tensor, bfloat16 `[E, in, out]`: G blocks of 2 B numbers, each block with a power of two."""

    def __init__(self, folder: Path):
        super().__init__(folder)
        self._quantized: set[str] = set()
        for name in [name for name in self.shapes if self._is_quantized(name.removesuffix(BLOCKS))]:
            self._join(name.removesuffix(BLOCKS))

    def _is_quantized(self, tensor: str) -> bool:
        parts = tensor + BLOCKS, tensor + SCALES
        return all(self.dtypes.get(part) == "U8" for part in parts) and (
            self.shapes[parts[0]][:-1] == self.shapes[parts[1]] and len(self.shapes[parts[1]]) == 3
        )

    def _join(self, tensor: str) -> None:
        blocks, scales = tensor + BLOCKS, tensor + SCALES
        experts, outputs, groups, size = self.shapes[blocks]
        for shard, names in self.shards.items():
            whole = [tensor if name == blocks else name for name in names]
            self.shards[shard] = [name for name in whole if name != scales]
        for part in (blocks, scales):
            del self.shapes[part], self.dtypes[part]
        self.shapes[tensor], self.dtypes[tensor] = (experts, groups * size * 2, outputs), "bfloat16"
        self._shard_of[tensor] = self._shard_of[blocks]
        self._quantized.add(tensor)

    def read(self, tensor: str) -> np.ndarray:
        if tensor not in self._quantized:
            return super().read(tensor)
        return dequantized(super().read(tensor + BLOCKS), super().read(tensor + SCALES))

    def read_part(self, tensor: str, index: tuple[slice, ...]) -> np.ndarray:
        return self.read(tensor)[index] if tensor in self._quantized else super().read_part(tensor, index)


def dequantized(blocks: np.ndarray, scales: np.ndarray) -> np.ndarray:
    """bfloat16 `[E, in, out]` of uint8 `[E, out, G, B]` and `[E, out, G]`, an expert at a time."""
    experts, outputs, groups, size = blocks.shape
    whole = np.empty((experts, groups * size * 2, outputs), ml_dtypes.bfloat16)
    with np.errstate(over="ignore", invalid="ignore"):  # a scale of 255 is no number
        powers = np.ldexp(np.float32(1), scales.astype(np.int32) - _BIAS)
        for expert in range(experts):
            values = _BYTES[blocks[expert]].reshape(outputs, groups, -1) * powers[expert][..., None]
            whole[expert] = values.reshape(outputs, -1).T
    return whole
