"""Follow the names of a script to what they mean, and expressions to their values. Nothing of the script runs."""

from __future__ import annotations

import ast
import operator
from collections.abc import Callable, Iterable, Iterator
from typing import Any, NamedTuple

from trl_jax.cli.reading import Constant, Defined, Imported, Made, Meaning, Method, Scope, Sequence, Super, Unknown

DEEPEST = 50  # steps from a name to what it means, and levels of a value's expression; beyond them it is UNKNOWN
UNKNOWN = object()  # a value that is known only when the script runs
_UNKNOWN = Unknown()

# Names


def meanings(node: ast.expr, scope: Scope, depth: int = 0) -> list[Meaning]:
    """All that an expression may mean; [Unknown()] if that shows only when the script runs."""
    if depth > DEEPEST:
        return [_UNKNOWN]
    follow = lambda one: meanings(one, scope, depth + 1)  # noqa: E731
    match node:
        case ast.Name():
            return _of_name(node, scope, depth)
        case ast.Attribute():
            return [
                Imported(f"{one.path}.{node.attr}") if isinstance(one, Imported) else Method(one, node.attr)
                for one in follow(node.value)
            ]
        case ast.Call():
            return _of_call(node, scope, depth)
        case ast.IfExp():
            return follow(node.body) + follow(node.orelse)
        case ast.BoolOp():
            return [one for part in node.values for one in follow(part)]
        case ast.Lambda():
            return [Defined(node, scope)]
        case ast.Tuple() | ast.List():
            return [Sequence(tuple(node.elts), scope)]
        case ast.NamedExpr():
            return follow(node.value)
        case ast.Constant():
            return [Constant(node.value)]
    return [_UNKNOWN]


def _of_name(node: ast.Name, scope: Scope, depth: int) -> list[Meaning]:
    found: list[Meaning] = []
    for bound in scope.find(node.id, node.lineno):
        if isinstance(bound.value, ast.expr):
            found += meanings(bound.value, bound.scope, depth + 1)
        else:
            found.append(bound.value)
    return found or [_UNKNOWN]


def _of_call(node: ast.Call, scope: Scope, depth: int) -> list[Meaning]:
    if isinstance(node.func, ast.Name) and node.func.id == "super":
        owner = class_of(scope)
        return [_UNKNOWN if owner is None else Super(owner)]
    found: list[Meaning] = []
    for one in meanings(node.func, scope, depth + 1):
        if one == Imported("functools.partial") and node.args:
            found += meanings(node.args[0], scope, depth + 1)
        elif one == Imported("importlib.import_module") and node.args:
            path = value_of(node.args[0], scope)
            found.append(Imported(path) if isinstance(path, str) else _UNKNOWN)
        elif isinstance(one, Defined) and isinstance(one.node, ast.FunctionDef):
            found += returned(one, depth + 1)
        else:
            found.append(Made(one, node, scope))
    return found


def returned(function: Defined, depth: int = 0) -> list[Meaning]:
    """What a function of the script returns."""
    inside = function.scope.module.scopes[function.node]
    found = [
        meaning
        for one in own_nodes(function.node)
        if isinstance(one, ast.Return) and one.value is not None
        for meaning in meanings(one.value, inside, depth + 1)
    ]
    return found or [_UNKNOWN]


def own_nodes(function: ast.AST) -> Iterator[ast.AST]:
    """The nodes of a function, without those of functions and classes inside it."""
    pending = list(ast.iter_child_nodes(function))
    while pending:
        node = pending.pop()
        yield node
        if not isinstance(node, ast.FunctionDef | ast.AsyncFunctionDef | ast.Lambda | ast.ClassDef):
            pending += ast.iter_child_nodes(node)


def class_of(scope: Scope | None) -> Defined | None:
    """The class in whose method a scope is."""
    while scope is not None:
        for found in scope.module.classes:
            if scope.owner in found.node.body:
                return found
        scope = scope.enclosing
    return None


def bases(made: Defined) -> list[Meaning]:
    """What the bases of a class mean, those of its own bases included, nearest first."""
    found: list[Meaning] = []
    pending = [made]
    for _ in range(DEEPEST):
        if not pending:
            break
        one = pending.pop(0)
        for base in one.node.bases:
            node = base.value if isinstance(base, ast.Subscript) else base
            for meaning in meanings(node, one.scope):
                found.append(meaning)
                if isinstance(meaning, Defined) and isinstance(meaning.node, ast.ClassDef):
                    pending.append(meaning)
    return found


# Values

_OPERATIONS: dict[type, Callable[[Any, Any], Any]] = {
    ast.Add: operator.add, ast.Sub: operator.sub, ast.Mult: operator.mul, ast.Div: operator.truediv,
    ast.FloorDiv: operator.floordiv, ast.Mod: operator.mod,
}  # fmt: skip


def value_of(node: ast.expr, scope: Scope, depth: int = 0) -> Any:
    """The value of an expression that is spelled out, or UNKNOWN. Names are followed, and arithmetic is done."""
    if depth > DEEPEST or _is_deep(node):
        return UNKNOWN
    follow = lambda one: value_of(one, scope, depth + 1)  # noqa: E731
    match node:
        case ast.Constant():
            return node.value
        case ast.Name():
            found = scope.find(node.id, node.lineno)
            if len(found) != 1 or not isinstance(found[0].value, ast.expr) or found[0].conditional:
                return UNKNOWN
            return value_of(found[0].value, found[0].scope, depth + 1)
        case ast.Tuple() | ast.List() | ast.Set():
            items = list(map(follow, node.elts))
            if any(item is UNKNOWN for item in items):
                return UNKNOWN
            return {ast.Tuple: tuple, ast.List: list, ast.Set: _set}[type(node)](items)
        case ast.Dict():
            return _dict(node.keys, node.values, follow)
        case ast.Call() if isinstance(node.func, ast.Name) and node.func.id == "dict" and not node.args:
            if all(word.arg for word in node.keywords):
                return _dict(
                    [ast.Constant(word.arg) for word in node.keywords], [one.value for one in node.keywords], follow
                )
        case ast.UnaryOp(op=ast.USub()):
            value = follow(node.operand)
            return -value if isinstance(value, int | float) else UNKNOWN
        case ast.UnaryOp(op=ast.Not()):
            value = follow(node.operand)
            return UNKNOWN if value is UNKNOWN else not value
        case ast.BinOp() if type(node.op) in _OPERATIONS:
            left, right = follow(node.left), follow(node.right)
            if isinstance(left, int | float) and isinstance(right, int | float):
                try:
                    return _OPERATIONS[type(node.op)](left, right)
                except ArithmeticError:
                    return UNKNOWN
    return UNKNOWN


def _set(items: list) -> Any:
    try:
        return set(items)
    except TypeError:
        return UNKNOWN


def _dict(keys: Iterable[ast.expr | None], values: Iterable[ast.expr], follow: Callable) -> Any:
    made: dict[Any, Any] = {}
    for key, value in zip(keys, values, strict=True):
        name, item = UNKNOWN if key is None else follow(key), follow(value)
        if not isinstance(name, str | int | float | bool | None) or item is UNKNOWN:
            return UNKNOWN
        made[name] = item
    return made


def _is_deep(node: ast.expr) -> bool:
    level: list[ast.AST] = [node]
    for _ in range(DEEPEST):
        level = [child for one in level for child in ast.iter_child_nodes(one)]
        if not level:
            return False
    return True


class Argument(NamedTuple):
    """An argument of a call. value: what it is, or UNKNOWN."""

    value: Any
    node: ast.expr
    scope: Scope


def arguments_of(call: ast.Call, scope: Scope, positional: list[str]) -> tuple[dict[str, Argument], bool]:
    """The arguments of a call by name, and whether it has others that are known only when the script runs.

    Args:
        positional: the names of the parameters, in order.
    """
    given: dict[str, Argument] = {}
    others = any(isinstance(one, ast.Starred) for one in call.args)
    for name, node in zip(positional, call.args, strict=False):
        if isinstance(node, ast.Starred):
            break
        given[name] = Argument(value_of(node, scope), node, scope)
    for word in call.keywords:
        if word.arg:
            given[word.arg] = Argument(value_of(word.value, scope), word.value, scope)
            continue
        spread = _spread(word.value, scope)
        others |= spread is None
        given |= spread or {}
    return given, others


def _spread(node: ast.expr, scope: Scope, depth: int = 0) -> dict[str, Argument] | None:
    """The arguments in `**node`, or None if they are known only when the script runs."""
    if depth > DEEPEST:
        return None
    match node:
        case ast.Name():
            found = scope.find(node.id, node.lineno)
            if len(found) == 1 and isinstance(found[0].value, ast.expr) and not found[0].conditional:
                return _spread(found[0].value, found[0].scope, depth + 1)
        case ast.Call() if isinstance(node.func, ast.Name) and node.func.id == "dict" and not node.args:
            pairs = [(word.arg, word.value) for word in node.keywords]
            if all(name for name, _ in pairs):
                return {name: Argument(value_of(one, scope), one, scope) for name, one in pairs}
        case ast.Dict():
            found = {}
            for key, value in zip(node.keys, node.values, strict=True):
                if key is None:
                    inner = _spread(value, scope, depth + 1)
                    if inner is None:
                        return None
                    found |= inner
                elif isinstance(key, ast.Constant) and isinstance(key.value, str):
                    found[key.value] = Argument(value_of(value, scope), value, scope)
                else:
                    return None
            return found
    return None
