"""Operations on Python numbers: sizes, and what is worked out from them while a shape is traced."""

from __future__ import annotations

import math
import operator
from typing import Any


def _size(x: Any, axis: int | None = None) -> Any:
    return x.shape if axis is None else x.shape[axis]


def _assert(condition: bool, message: str) -> None:
    if not condition:
        raise ValueError(f"These rows do not fit the program they are run with: {message}.")


_NAMES = "add sub mul floordiv truediv mod neg pow eq ne lt le gt ge and_ or_ not_ getitem".split()
OPERATIONS = {f"operator.{name}": getattr(operator, name) for name in _NAMES} | {
    "aten.sym_size.int": _size,
    "aten.sym_size.default": _size,
    "aten.sym_numel.default": lambda x: math.prod(x.shape),
    "aten._assert_scalar.default": _assert,
    "torch.sym_max": max,
    "torch.sym_min": min,
    "torch.sym_float": float,
    "torch.sym_int": int,
    "torch.sym_not": operator.not_,
    "torch.sym_ite": lambda condition, yes, no: yes if condition else no,
    "math.floor": math.floor,
    "math.ceil": math.ceil,
    "math.trunc": math.trunc,
    "math.pow": math.pow,
    "math.sqrt": math.sqrt,
}
