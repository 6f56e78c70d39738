"""Where in a computation the first value arises that is no number."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from jax.extend import core

# Programs inside programs, and the parameter that holds them; a loop over layers is walked by hand.
_INNER = {"jit": "jaxpr", "pjit": "jaxpr", "remat2": "jaxpr", "checkpoint": "jaxpr", "custom_jvp_call": "call_jaxpr",
          "custom_vjp_call": "call_jaxpr", "closed_call": "call_jaxpr"}  # fmt: skip


class _Found(Exception):
    pass


def nan_trace(function: Callable, *arguments: Any) -> str | None:
    """The first operation of `function(*arguments)` that makes a NaN or +inf of ordinary numbers; None if none does.

    Operations run one by one. -inf is ordinary: attention masks are made of it. The text names the turn of the loop
    (the layer, where layers are scanned), the operation, and the line it stands in.
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
        found = [read(atom) for atom in equation.invars]
        results = _apply(equation, found, where)
        if any(map(_bad, results)) and not any(map(_bad, found)):
            raise _Found(f"The first one arises {where}in {_line(equation)}.")
        values |= zip(equation.outvars, results, strict=True)
    return [read(atom) for atom in jaxpr.outvars]


def _apply(equation: Any, found: list, where: str) -> list:
    name, how = equation.primitive.name, equation.params
    if name == "scan":
        return _scan(equation, found, where)
    if name in _INNER:
        return _run(*_opened(how[_INNER[name]]), found, where)
    results = equation.primitive.bind(*found, **how)
    return list(results) if equation.primitive.multiple_results else [results]


def _opened(inner: Any) -> tuple[Any, list]:
    return (inner.jaxpr, inner.consts) if isinstance(inner, core.ClosedJaxpr) else (inner, [])


def _scan(equation: Any, found: list, where: str) -> list:
    length, reverse = equation.params["length"], equation.params["reverse"]
    body, constants = _opened(equation.params["jaxpr"])
    # JAX's releases name the numbers of constants, carried values and slices differently. In all of them the body
    # sees slices without the axis of turns, so ranks tell.
    carried = sum(map(_same_rank, equation.outvars, body.outvars))
    whole = sum(map(_same_rank, equation.invars, body.invars))
    consts, carry, slices, rows = found[: whole - carried], found[whole - carried : whole], found[whole:], []
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
    from jax._src import source_info_util  # the one place where JAX keeps the line an operation was written in

    return f"{equation.primitive.name} ({source_info_util.summarize(equation.source_info)})"
