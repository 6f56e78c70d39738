"""Runs a program: one JAX function a node, in order."""

from __future__ import annotations

from typing import Any

import jax
import jax.numpy as jnp

from trl_jax.nn.aten.program import Node, Piece, Program, Ref
from trl_jax.nn.aten.table import OPERATIONS, RANDOM

_NARROW = {"int64": "int32", "float64": "float32", "uint64": "uint32", "complex128": "complex64"}


def run(
    program: Program,
    params: dict[str, jax.Array],
    rows: jax.Array,
    *,
    remat: bool = False,
    key: jax.Array | None = None,
) -> jax.Array:
    """The results of the program, `[R, 1]`.

    Args:
        params: by the names in `program.parameters`.
        rows: int32 `[2, R, T]`, token ids and mask.
        remat: the backward pass keeps what passes between layers and recomputes the rest.
        key: what random operations draw from; None where there are none.
    """
    values: dict[str, Any] = {
        name: jax.lax.stop_gradient(params[path]) if path in program.frozen else params[path]
        for name, path in program.parameters.items()
    }
    values |= {name: jnp.asarray(array) for name, array in program.constants.items()}
    values[program.input] = rows
    for number, piece in enumerate(program.pieces()):
        piece_key = None if key is None else jax.random.fold_in(key, number)
        values |= _run_piece(piece, values, piece_key, remat and piece.layer is not None)
    return values[program.output]


def _run_piece(piece: Piece, values: dict[str, Any], key: jax.Array | None, remat: bool) -> dict[str, Any]:
    """The values that later pieces read. Python numbers pass beside JAX: shapes must stay known."""
    given = {name: values[name] for name in piece.needs}
    numbers = {name: value for name, value in given.items() if isinstance(value, int | float)}
    arrays = {name: value for name, value in given.items() if name not in numbers}
    made_numbers: dict[str, Any] = {}

    def compute(arrays: dict[str, Any], key: jax.Array | None) -> dict[str, Any]:
        found = _run_nodes(piece.nodes, {**numbers, **arrays}, key)
        kept = {name: found[name] for name in piece.gives}
        made_numbers.update({name: value for name, value in kept.items() if isinstance(value, int | float)})
        return {name: value for name, value in kept.items() if name not in made_numbers}

    made = (jax.checkpoint(compute) if remat else compute)(arrays, key)
    return {**made, **made_numbers}


def _run_nodes(nodes: tuple[Node, ...], values: dict[str, Any], key: jax.Array | None) -> dict[str, Any]:
    for number, node in enumerate(nodes):
        args = _filled(node.args, values)
        kwargs = {name: _filled(value, values) for name, value in node.kwargs.items()}
        if node.op in RANDOM:
            kwargs["key"] = jax.random.fold_in(key, number)
        values[node.name] = _cast(OPERATIONS[node.op](*args, **kwargs), node.dtype)
    return values


def _filled(value: Any, values: dict[str, Any]) -> Any:
    if isinstance(value, Ref):
        return values[value.name]
    if isinstance(value, tuple):
        return tuple(_filled(entry, values) for entry in value)
    return value


def _cast(value: Any, dtype: str | tuple | None) -> Any:
    """The dtypes that the node records, in the widths JAX computes with."""
    if dtype is None:
        return value
    if isinstance(dtype, tuple):
        return tuple(_cast(part, kind) for part, kind in zip(value, dtype, strict=True))
    return jnp.asarray(value).astype(_NARROW.get(dtype, dtype))
