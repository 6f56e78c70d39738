"""A frozen model before whose texts virtual tokens stand, of which the arrays train."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import Any, Protocol

import jax
import jax.numpy as jnp
from flax import nnx

from trl_jax.models.arch import Run
from trl_jax.models.decoder import Decoder
from trl_jax.nn.virtual_tokens import Prefix, VectorMaker, VirtualRows

PREFIX = "prompt_encoder."  # of the arrays that train


class Place(Protocol):
    """The place in a model with a decoder where the vectors of virtual tokens go."""

    def prepare(self, decoder: Decoder, count: int) -> None:
        """Give the decoder the modules that hold the vectors of so many virtual tokens."""

    def arrays(self, vectors: jax.Array) -> dict[str, jax.Array]:
        """The parameters of these modules, by path in the decoder; of vectors `[n, width]`."""


@dataclass(frozen=True)
class AsEmbeddings:
    """They are the embeddings of the ids from `first` on."""

    first: int
    width: int

    def prepare(self, decoder: Decoder, count: int) -> None:
        decoder.virtual = VirtualRows(jnp.zeros((count, self.width)), self.first)

    def arrays(self, vectors: jax.Array) -> dict[str, jax.Array]:
        return {"virtual.rows": vectors}


@dataclass(frozen=True)
class AsKeysValues:
    """They are the keys and values of each layer for the ids from `first` on: of the first layer `heads` keys of
    `channels`, as many values, then those of the next layer."""

    first: int
    runs: tuple[Run, ...]
    heads: int
    channels: int

    def prepare(self, decoder: Decoder, count: int) -> None:
        decoder.first_virtual = self.first
        for run in self.runs:
            zeros = jnp.zeros((run.count, count, self.heads, self.channels))
            vars(decoder)[run.name].attention.prefix = Prefix(zeros, zeros)

    def arrays(self, vectors: jax.Array) -> dict[str, jax.Array]:
        by_layer = jnp.moveaxis(vectors.reshape(len(vectors), -1, 2, self.heads, self.channels), 0, 2)
        return {
            f"{run.name}.attention.prefix.{name}": by_layer[run.first : run.first + run.count, number]
            for run in self.runs
            for number, name in enumerate(("keys", "values"))
        }


@dataclass(frozen=True)
class VirtualGraph:
    """The graph that `models.functional.merge` makes a module of: `plain` is that of the model with virtual tokens,
    whose vectors `maker` makes, and which go to `place`."""

    plain: nnx.GraphDef
    maker: VectorMaker
    place: Place

    def installed(self, params: dict[str, Any], key: jax.Array | None) -> tuple[nnx.GraphDef, dict[str, Any]]:
        """A graph and its parameters: the virtual tokens' vectors in the place of what they are made of."""
        own = {path.removeprefix(PREFIX): array for path, array in params.items() if path.startswith(PREFIX)}
        arrays = {path: array for path, array in params.items() if not path.startswith(PREFIX)}
        placed = self.place.arrays(self.maker(own, key))
        return self.plain, arrays | {f"{Decoder.NAME}.{path}": array for path, array in placed.items()}


def virtual_graph(make: Callable[[], nnx.Module], maker: VectorMaker, place: Place) -> VirtualGraph:
    """The graph of what `make` makes, a model with a decoder, with virtual tokens."""

    def whole() -> nnx.Module:
        model = make()
        place.prepare(vars(model)[Decoder.NAME], maker.count)
        return model

    return VirtualGraph(nnx.split(nnx.eval_shape(whole))[0], maker, place)
