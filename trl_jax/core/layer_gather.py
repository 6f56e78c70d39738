"""Arrays of which a device holds a part: the axes that products and texts are divided over, and how a layer gets the
whole."""

from __future__ import annotations

import contextlib
from collections.abc import Callable, Iterator
from contextvars import ContextVar
from typing import Any

TENSOR, SEQUENCE = "tensor", "sequence"

# (a parameter's path, what a device holds of it) -> all of it. Set while a step is traced, so that models, which know
# no mesh, ask for a layer's parameters in the turn of the loop that uses them.
_whole: ContextVar[Callable[[str, Any], Any] | None] = ContextVar("whole", default=None)


@contextlib.contextmanager
def made_whole_by(whole: Callable[[str, Any], Any]) -> Iterator[None]:
    """While this holds, `whole` is what `maker` gives."""
    token = _whole.set(whole)
    try:
        yield
    finally:
        _whole.reset(token)


def maker() -> Callable[[str, Any], Any] | None:
    """From (path, part) to the whole array; None where every device holds all of each."""
    return _whole.get()
