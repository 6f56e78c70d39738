"""Relates the arrays that train to the tensors that torch's optimizers see."""

from __future__ import annotations

from collections.abc import Mapping
from typing import NamedTuple


class TorchParamLayout(NamedTuple):
    """Attributes:
        stacked: paths of arrays whose first axis counts layers; each layer is one of torch's tensors, or part of one.
        joined: path -> a name shared by the arrays of one tensor, which are joined along its outputs; arrays of other
            paths are tensors by themselves.
    """

    stacked: frozenset[str] = frozenset()
    joined: Mapping[str, str] = {}
