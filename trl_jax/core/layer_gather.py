"""Arrays of which a device holds a part: the axes that divide products and texts, and how a layer gets its whole
parameters."""

from __future__ import annotations

import contextlib
from collections.abc import Callable, Iterator
from contextvars import ContextVar
from typing import Any

TENSOR, SEQUENCE = "tensor", "sequence"

# (path of a stacked parameter, the part of one layer's that a device holds) -> all of that layer's.
Gather = Callable[[str, Any], Any]
_gather: ContextVar[Gather | None] = ContextVar("gather", default=None)
_model: ContextVar[str] = ContextVar("model", default="")


@contextlib.contextmanager
def layers_gathered_by(gather: Gather) -> Iterator[None]:
    """Set while a step is traced: models, which know no mesh, ask for a layer's parameters in the turn of the loop that
    uses them."""
    token = _gather.set(gather)
    try:
        yield
    finally:
        _gather.reset(token)


@contextlib.contextmanager
def layers_of(prefix: str) -> Iterator[None]:
    """Set while another of a step's models is traced, the paths of whose own parameters begin with `prefix`."""
    token = _model.set(prefix)
    try:
        yield
    finally:
        _model.reset(token)


def model_prefix() -> str:
    """The one that is set; "" for the model that trains."""
    return _model.get()


def layer_gather() -> Gather | None:
    """The one that is set; None where every device holds all of each parameter."""
    return _gather.get()
