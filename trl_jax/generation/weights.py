"""The weights of a generation: the model's own arrays and, where it is quicker, each layer's by itself."""

from __future__ import annotations

from functools import partial
from typing import Any

import jax
from flax import nnx

from trl_jax.models.functional import merge

_LARGEST = 512 * 2**20  # bytes of layers that are copied to be decoded one by one on a CPU


def trunk_of(model: nnx.Module) -> nnx.Module:
    """The decoder of a model."""
    return vars(model)[model.trunk_name]


@partial(jax.jit, static_argnums=0)
def _unstacked(graph: Any, arrays: dict[str, jax.Array]) -> list[nnx.State]:
    stack = trunk_of(merge(graph, arrays)).layers
    state = nnx.split(stack)[1]
    count = len(jax.tree.leaves(state)[0])
    return [jax.tree.map(lambda leaf: leaf[i], state) for i in range(count)]  # noqa: B023


def layers_for_decoding(graph: Any, arrays: dict[str, jax.Array], platform: str) -> list[nnx.State] | None:
    """Each layer's parameters by themselves, on a CPU and where they are small; None: decode along the stack.

    On a CPU a scan copies a layer's weights and cache out of the stacks in every turn, which takes a small model half
    of its time. Elsewhere it does not, and a large model has no room for another copy.
    """
    stacked = sum(array.nbytes for path, array in arrays.items() if ".layers." in path)
    return _unstacked(graph, arrays) if platform == "cpu" and stacked <= _LARGEST else None
