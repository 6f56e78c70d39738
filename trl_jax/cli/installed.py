"""What installed packages contain, read from their source. None of them is imported."""

from __future__ import annotations

import ast
import sys
from functools import lru_cache
from importlib.machinery import ModuleSpec, PathFinder
from pathlib import Path


def spec_of(module: str) -> ModuleSpec | None:
    """Where a module is, found without importing the packages above it; None: nowhere."""
    parent, _, _ = module.rpartition(".")
    if not parent:
        return PathFinder.find_spec(module)
    above = spec_of(parent)
    if above is None or above.submodule_search_locations is None:
        return None
    return PathFinder.find_spec(module, above.submodule_search_locations)


def is_installed(module: str) -> bool:
    """Whether a module can be imported, as far as its file tells."""
    package = module.partition(".")[0]
    return package in sys.stdlib_module_names or package in sys.builtin_module_names or spec_of(module) is not None


@lru_cache
def names_in(module: str) -> frozenset[str] | None:
    """The names that a module defines or imports; None if its source does not tell."""
    tree = _source(module)
    if tree is None:
        return None
    names: set[str] = set()
    pending: list[ast.AST] = list(tree.body)
    while pending:
        node = pending.pop()
        match node:
            case ast.Import() | ast.ImportFrom():
                if any(alias.name == "*" for alias in node.names):
                    return None
                names |= {alias.asname or alias.name.partition(".")[0] for alias in node.names}
            case ast.FunctionDef() | ast.AsyncFunctionDef() | ast.ClassDef():
                if node.name == "__getattr__":
                    return None
                names.add(node.name)
            case ast.Assign():
                names |= {one.id for target in node.targets for one in ast.walk(target) if isinstance(one, ast.Name)}
            case ast.AnnAssign() if isinstance(node.target, ast.Name):
                names.add(node.target.id)
            case ast.If() | ast.Try() | ast.With() | ast.For() | ast.ExceptHandler():
                pending += ast.iter_child_nodes(node)
    return frozenset(names)


def has_name(module: str, name: str) -> bool | None:
    """Whether a module has this name, or a submodule of this name; None if its source does not tell."""
    if spec_of(f"{module}.{name}") is not None:
        return True
    names = names_in(module)
    return None if names is None else name in names


def _source(module: str) -> ast.Module | None:
    spec = spec_of(module)
    if spec is None or spec.origin is None or not spec.origin.endswith(".py"):
        return None
    return ast.parse(Path(spec.origin).read_text(encoding="utf-8"))
