"""Weights of few bits that stand in for a matrix: unpacked where it is used, a layer at a time.

The formats are bitsandbytes': blocks of 64 numbers share a scale, and of those 256 one of their own (Dettmers et al.
2023, arXiv:2305.14314); in eight bits, a row has one (arXiv:2208.07339). Floats of sixteen bits are stored as whole
numbers: for a CPU, XLA would make 32 bits of a whole stack of layers, ahead of the loop that walks it.
"""

from __future__ import annotations

from dataclasses import dataclass

import jax
import jax.numpy as jnp
import numpy as np
from flax import nnx

HALVES = ("bfloat16", "float16")
BLOCK, SCALES = 64, 256  # numbers that share a scale, and scales that do

# The meanings of four bits: quantiles of a normal distribution, or floats of two exponent bits.
_NF4 = (
    -1.0, -0.6961928009986877, -0.5250730514526367, -0.39491748809814453, -0.28444138169288635, -0.18477343022823334,
    -0.09105003625154495, 0.0, 0.07958029955625534, 0.16093020141124725, 0.24611230194568634, 0.33791524171829224,
    0.44070982933044434, 0.5626170039176941, 0.7229568362236023, 1.0,
)  # fmt: skip
_FP4 = (0.0, 0.0625 / 12, 8 / 12, 1.0, 4 / 12, 0.5, 2 / 12, 0.25)
TABLES = {"nf4": np.asarray(_NF4, np.float32), "fp4": np.asarray([*_FP4, *(-x for x in _FP4)], np.float32)}


def _dynamic() -> np.ndarray:
    """The meanings of the eight bits of a scale: seven decades, each with twice as many steps as the one below
    (arXiv:1511.04561)."""
    steps = [np.linspace(0.1, 1, 2**decade + 1, dtype=np.float32) for decade in range(7)]
    middles = [10.0 ** (decade - 6) * (s[:-1] + s[1:]) / 2 for decade, s in enumerate(steps)]
    positive = np.concatenate(middles).astype(np.float32)
    return np.sort(np.concatenate([positive, -positive, np.asarray([0.0, 1.0], np.float32)]))


DYNAMIC = _dynamic()


@dataclass(frozen=True)
class Format:
    """The encoding of a matrix (out, in): kind "nf4", "fp4", "int8" or one of HALVES; `nested`: the scales of four bits
    are quantised."""

    kind: str
    shape: tuple[int, int]
    nested: bool = False

    def leaves(self) -> dict[str, tuple[tuple[int, ...], np.dtype]]:
        """The arrays of one matrix: name -> shape and dtype."""
        rows, columns = self.shape
        if self.kind in HALVES:
            return {"codes": (self.shape, np.dtype("uint16"))}
        if self.kind == "int8":
            return {"codes": ((rows, columns), np.dtype("int8")), "scales": ((rows,), np.dtype("float32"))}
        count = rows * columns
        blocks = -(-count // BLOCK)
        leaves = {"codes": ((-(-count // 2),), np.dtype("uint8"))}
        leaves["scales"] = ((blocks,), np.dtype("uint8" if self.nested else "float32"))
        if self.nested:
            leaves["scale_scales"] = ((-(-blocks // SCALES),), np.dtype("float32"))
            leaves["offset"] = ((), np.dtype("float32"))
        return leaves


class Quantized(nnx.Module):
    """Stands where a matrix's `nnx.Param` would: `weight[...]` is the float32 matrix."""

    def __init__(self, form: Format, lead: tuple[int, ...] = (), axes: tuple[str, ...] = ("", "")):
        """`lead` are the sizes of axes before the matrix's, `axes` the logical ones of both."""

        def param(name: str) -> nnx.Param | None:
            if name not in form.leaves():
                return None
            shape, dtype = form.leaves()[name]
            whole = name == "codes" and len(shape) == 2
            inner = axes[len(lead) :] if whole else ("flat" if name in ("codes", "scales") else "",) * len(shape)
            return nnx.Param(jnp.zeros((*lead, *shape), dtype), axes=(*axes[: len(lead)], *inner))

        self.codes, self.scales = param("codes"), param("scales")
        self.scale_scales, self.offset = param("scale_scales"), param("offset")
        self.form = form

    def __getitem__(self, key: object) -> jax.Array:
        names = self.form.leaves()
        return dequantized(self.form, {name: vars(self)[name][...] for name in names})[key]

    def whole(self) -> jax.Array:
        """The matrix; one of sixteen bits in its own dtype."""
        if self.form.kind not in HALVES:
            return self[...]
        return jax.lax.bitcast_convert_type(self.codes[...], jnp.dtype(self.form.kind))

    def rows(self, ids: jax.Array) -> jax.Array:
        """Rows of a table of sixteen bits, float32."""
        return dequantized(self.form, {"codes": jnp.take(self.codes[...], ids, axis=0, mode="clip")})


def dequantized(form: Format, leaves: dict[str, jax.Array]) -> jax.Array:
    """The matrix (out, in), float32."""
    codes = leaves["codes"]
    if form.kind in HALVES:
        return jax.lax.bitcast_convert_type(codes, jnp.dtype(form.kind)).astype(jnp.float32)
    scales = leaves["scales"]
    if form.kind == "int8":
        return codes.astype(jnp.float32) * (scales / 127)[:, None]
    if form.nested:
        per_group = jnp.repeat(leaves["scale_scales"], SCALES)[: scales.shape[0]]
        scales = jnp.asarray(DYNAMIC)[scales] * per_group + leaves["offset"]
    rows, columns = form.shape
    halves = jnp.stack([codes >> 4, codes & 15], axis=-1).reshape(-1)[: rows * columns]
    values = jnp.asarray(TABLES[form.kind])[halves]
    padded = jnp.pad(values, (0, -values.size % BLOCK)).reshape(-1, BLOCK) * scales[:, None]
    return padded.reshape(-1)[: rows * columns].reshape(form.shape)
