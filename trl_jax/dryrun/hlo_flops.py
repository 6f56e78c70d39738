"""FLOPs of one matrix product in HLO text, two for each multiplication, whose result is added to a sum."""

from __future__ import annotations

import math
import re
from collections.abc import Callable

from trl_jax.dryrun.hlo_text import Computation, Instruction, sizes_of


def dot_flops(one: Instruction, body: Computation) -> int:
    """FLOPs of a `dot`."""
    left = sizes_of(one.operand_shapes(body)[0])
    summed = re.search(r"lhs_contracting_dims=\{([\d,]*)\}", one.rest)[1]
    return 2 * math.prod(sizes_of(one.shape)) * math.prod(left[int(axis)] for axis in summed.split(",") if axis)


def convolution_flops(one: Instruction, body: Computation) -> int:
    """FLOPs of a `convolution`, which is how TPUs compute products: spatial axes stand for batch or contracted axes."""
    left, right = (sizes_of(shape) for shape in one.operand_shapes(body)[:2])
    of_left, of_right, of_out = re.search(r"dim_labels=(\w+)_(\w+)->(\w+)", one.rest).groups()
    out, window = sizes_of(one.shape), _window(one.rest)
    flops = 2 * out[of_out.index("b")] * out[of_out.index("f")] * right[of_right.index("i")]
    for axis in range(len(of_out) - 2):
        sizes = [side[labels.index(str(axis))] for side, labels in ((left, of_left), (right, of_right), (out, of_out))]
        flops *= _products(*sizes, *window(axis))
    return flops


def _window(rest: str) -> Callable[[int], tuple[int, int, int, int]]:
    """A function from a spatial axis to its stride, low padding, and dilations of left and right."""
    text = re.search(r"window=\{(.*?)\}", rest)
    fields = dict(part.split("=") for part in text[1].split()) if text else {}

    def of_axis(axis: int) -> tuple[int, int, int, int]:
        def value(key: str, default: str) -> int:
            return int(fields[key].split("x")[axis].split("_")[0]) if key in fields else int(default)

        return value("stride", "1"), value("pad", "0"), value("lhs_dilate", "1"), value("rhs_dilate", "1")

    return of_axis


def _products(left: int, right: int, out: int, stride: int, pad: int, left_dilation: int, right_dilation: int) -> int:
    """Number of products along one spatial axis; padding and the gaps of dilation are not multiplied."""
    last = (left - 1) * left_dilation
    places = (o * stride + r * right_dilation - pad for o in range(out) for r in range(right))
    return sum(0 <= place <= last and place % left_dilation == 0 for place in places)
