"""A frozen model before whose texts virtual tokens stand, of which the arrays train."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import jax
import jax.numpy as jnp
from flax import nnx

from trl_jax.models.decoder import Decoder
from trl_jax.nn.virtual_tokens import VectorMaker, VirtualRows

PREFIX = "prompt_encoder."  # of the arrays that train


@dataclass(frozen=True)
class VirtualGraph:
    """The graph that `models.functional.merge` makes a module of: `plain` is that of the model with virtual tokens,
    whose vectors `maker` makes."""

    plain: nnx.GraphDef
    maker: VectorMaker

    def installed(self, params: dict[str, Any], key: jax.Array | None) -> tuple[nnx.GraphDef, dict[str, Any]]:
        """A graph and its parameters: the virtual tokens' vectors in the place of what they are made of."""
        own = {path.removeprefix(PREFIX): array for path, array in params.items() if path.startswith(PREFIX)}
        arrays = {path: array for path, array in params.items() if not path.startswith(PREFIX)}
        return self.plain, arrays | {f"{Decoder.NAME}.virtual.rows": self.maker(own, key)}


def virtual_graph(make: Callable[[], nnx.Module], maker: VectorMaker, first: int) -> VirtualGraph:
    """The graph of what `make` makes, a model with a decoder, with virtual tokens whose ids begin with `first`."""

    def whole() -> nnx.Module:
        model = make()
        vars(model)[Decoder.NAME].virtual = VirtualRows(jnp.zeros((maker.count, maker.width)), first)
        return model

    return VirtualGraph(nnx.split(nnx.eval_shape(whole))[0], maker)
