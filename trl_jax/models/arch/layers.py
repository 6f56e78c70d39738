"""The facts that tell the layers of one decoder from one another."""

from __future__ import annotations

from dataclasses import dataclass
from itertools import groupby
from typing import NamedTuple

from trl_jax.models.arch.mixers import Heads


@dataclass(frozen=True)
class LayerEmbedding:
    """Each layer has its own embedding of every token, `channels` wide, from a table with this many `rows`."""

    rows: int
    channels: int


@dataclass(frozen=True)
class LayerKind:
    """The parameters that a layer has: `mixer` is "attention", "convolution", "delta_net", "mamba", "attention+mamba"
    for both side by side, or None where it has none; `experts`: whether these are in the place of the MLP, or beside
    it; `mlp`: whether it has either of them. `heads` and `mlp_size` are None where they are those of the Arch.

    A layer that is `unplaced` knows no positions, and norms no queries and keys. One that `reuses` makes no keys and
    values: it attends to those of the last layer that is `reused` and has the same heads.
    """

    mixer: str | None = "attention"
    experts: bool = False
    mlp: bool = True
    heads: Heads | None = None
    mlp_size: int | None = None
    unplaced: bool = False
    reused: bool = False
    reuses: bool = False


class Run(NamedTuple):
    """`count` layers of one kind, one after another, from layer `first` on; `name` is that of their stack."""

    first: int
    count: int
    kind: LayerKind
    name: str


def runs_of(kinds: tuple[LayerKind, ...]) -> tuple[Run, ...]:
    """The layers in runs of one kind each; `kinds` has an entry a layer."""
    groups = [list(group) for _, group in groupby(range(len(kinds)), key=lambda layer: kinds[layer])]
    if len(groups) == 1:
        return (Run(0, len(kinds), kinds[0], "layers"),)
    return tuple(Run(group[0], len(group), kinds[group[0]], f"layers_from_{group[0]}") for group in groups)
