"""Sums over the tokens that a router of experts saw. Arrays are of NumPy or JAX."""

from __future__ import annotations

from typing import Any, NamedTuple


class RouterSums(NamedTuple):
    """Float32, of each layer and expert `[L, E]`, and of each layer `[L]`.

    selected: how many tokens were sent to the expert.
    probabilities: the sum of the probabilities that the router gave it.
    tokens: how many tokens were counted.
    """

    selected: Any
    probabilities: Any
    tokens: Any
