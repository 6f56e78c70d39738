"""How the arrays that train are cut from the tensors that torch's optimizers see."""

from __future__ import annotations

from collections.abc import Mapping
from typing import NamedTuple


class TorchParamLayout(NamedTuple):
    """stacked: paths of arrays whose first axis counts layers, each of which is a tensor of torch's, or a part of one.

    joined: path -> a name that all arrays in the same tensor have, where they lie one below the other; who is not there
    is a tensor alone.
    """

    stacked: frozenset[str] = frozenset()
    joined: Mapping[str, str] = {}
