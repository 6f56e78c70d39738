"""A module as a static graph and a flat dict of arrays, keyed by dotted path; and back."""

from __future__ import annotations

from collections.abc import Callable

import jax
from flax import nnx

from trl_jax.models.adapted import AdaptedGraph
from trl_jax.models.virtual import VirtualGraph


def abstract(make: Callable[[], nnx.Module]) -> tuple[nnx.GraphDef, dict[str, jax.ShapeDtypeStruct]]:
    """The graph of a module and the shape of each of its parameters; nothing is allocated."""
    graph, state = nnx.split(nnx.eval_shape(make))
    return graph, {
        ".".join(map(str, path)): jax.ShapeDtypeStruct(leaf.shape, leaf.dtype)
        for path, leaf in nnx.to_flat_state(state)
    }


def logical_axes(make: Callable[[], nnx.Module]) -> dict[str, tuple[str, ...]]:
    """The logical axes of each parameter of a module, by path; see `trl_jax.nn`. Those that have none are left out."""
    state = nnx.to_flat_state(nnx.split(nnx.eval_shape(make))[1])
    named = ((".".join(map(str, path)), leaf.get_metadata()) for path, leaf in state)
    return {path: metadata["axes"] for path, metadata in named if "axes" in metadata}


Graph = nnx.GraphDef | AdaptedGraph | VirtualGraph


def merge(graph: Graph, params: dict[str, jax.Array], dropout_key: jax.Array | None = None) -> nnx.Module:
    """The module with these parameters: the inverse of taking it apart. `dropout_key` is for dropout in adapters."""
    if isinstance(graph, AdaptedGraph | VirtualGraph):
        graph, params = graph.installed(params, dropout_key)
    nested: dict = {}
    for path, array in params.items():
        *parents, name = path.split(".")
        level = nested
        for parent in parents:
            level = level.setdefault(parent, {})
        level[name] = array
    return nnx.merge(graph, nested)
