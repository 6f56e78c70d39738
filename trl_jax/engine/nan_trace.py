"""Finds the operation of a computation that makes the first value that is not finite."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from jax.extend import core

# Operations that contain a program, and the parameter with it; `_scan` runs a loop over layers.
_INNER = {"jit": "jaxpr", "pjit": "jaxpr", "remat2": "jaxpr", "checkpoint": "jaxpr", "custom_jvp_call": "call_jaxpr",
          "custom_vjp_call": "call_jaxpr", "closed_call": "call_jaxpr"}  # fmt: skip


class _Found(Exception):
    pass


def nan_trace(function: Callable, *arguments: Any) -> str | None:
    """Names the first operation of `function(*arguments)` that makes a NaN or +inf of other numbers; None if none does.

    Operations run one by one. -inf does not count: attention masks contain it. The text names the iteration of the loop
    (the layer, where layers are scanned), the operation, and its line in the source.
    """
    closed = jax.make_jaxpr(function)(*arguments)
    try:
        _run(closed.jaxpr, closed.consts, jax.tree.leaves(arguments), "")
    except _Found as found:
        return str(found)
    return None


def _run(jaxpr: Any, consts: list, inputs: list, where: str) -> list:
    values = dict(zip([*jaxpr.constvars, *jaxpr.invars], [*consts, *inputs], strict=True))

    def read(atom):
        return atom.val if isinstance(atom, core.Literal) else values[atom]

    for equation in jaxpr.eqns:
        inputs = [read(atom) for atom in equation.invars]
        results = _apply(equation, inputs, where)
        if any(map(_bad, results)) and not any(map(_bad, inputs)):
            raise _Found(f"The first one arises {where}in {_line(equation)}.")
        values |= zip(equation.outvars, results, strict=True)
    return [read(atom) for atom in jaxpr.outvars]


def _apply(equation: Any, inputs: list, where: str) -> list:
    name, params = equation.primitive.name, equation.params
    if name == "scan":
        return _scan(equation, inputs, where)
    if name in _INNER:
        return _run(*_opened(params[_INNER[name]]), inputs, where)
    results = equation.primitive.bind(*inputs, **params)
    return list(results) if equation.primitive.multiple_results else [results]


def _opened(inner: Any) -> tuple[Any, list]:
    return (inner.jaxpr, inner.consts) if isinstance(inner, core.ClosedJaxpr) else (inner, [])


def _scan(equation: Any, inputs: list, where: str) -> list:
    length, reverse = equation.params["length"], equation.params["reverse"]
    body, constants = _opened(equation.params["jaxpr"])
    # JAX's releases name the numbers of constants, carried values and slices differently. In all of them, the body's
    # slices lack the axis of the loop, so ranks show which they are.
    carried = sum(map(_same_rank, equation.outvars, body.outvars))
    whole = sum(map(_same_rank, equation.invars, body.invars))
    consts, carry, slices, rows = inputs[: whole - carried], inputs[whole - carried : whole], inputs[whole:], []
    for turn in reversed(range(length)) if reverse else range(length):
        inner = f"{where}in turn {turn} (of {length}, layers are scanned) "
        outputs = _run(body, constants, [*consts, *carry, *(part[turn] for part in slices)], inner)
        carry = outputs[:carried]
        rows.append(outputs[carried:])
    rows = rows[::-1] if reverse else rows
    return [*carry, *(jnp.stack(column) for column in zip(*rows, strict=True))]


def _same_rank(outer: Any, inner: Any) -> bool:
    return outer.aval.ndim == inner.aval.ndim


def _bad(value: Any) -> bool:
    if not jnp.issubdtype(jnp.result_type(value), jnp.inexact):
        return False
    array = np.asarray(value, np.float32)
    return bool(np.isnan(array).any() or np.isposinf(array).any())


def _line(equation: Any) -> str:
    from jax._src import source_info_util  # the one place where JAX has an operation's line

    return f"{equation.primitive.name} ({source_info_util.summarize(equation.source_info)})"
