"""Reads what a script takes from trl from its source."""

from __future__ import annotations

import ast
from typing import Any, NamedTuple

PACKAGES = ("trl", "trl_jax")
_DEEPEST = 50  # levels of an expression that are read
UNKNOWN = object()  # a value that only a run would know


class Name(NamedTuple):
    """A name that is taken from a module of trl."""

    line: int
    module: str
    name: str


class Call(NamedTuple):
    """A call of one of trl's names, or of transformers' TrainingArguments, with its keyword arguments."""

    line: int
    name: str
    arguments: dict[str, Any]


class Subclass(NamedTuple):
    """A class of the script's on one of trl's names, with the lines of its methods and those that use torch."""

    line: int
    name: str
    base: str
    methods: dict[str, int]
    in_torch: frozenset[str]


class Uses(NamedTuple):
    """All of a script's, each in the order of lines."""

    names: list[Name]
    calls: list[Call]
    subclasses: list[Subclass]


def read(source: str) -> Uses:
    """Read a script.

    Raises:
        SyntaxError: it is no Python.
    """
    tree = ast.parse(source)
    reader = _Reader()
    nodes = list(ast.walk(tree))  # not by recursion: expressions may be deep
    for node in nodes:  # imports first: a class may come before one
        if isinstance(node, ast.ImportFrom | ast.Import):
            reader.visit(node)
    for node in nodes:
        if isinstance(node, ast.Attribute):
            reader.visit(node)
    uses = Uses(reader.names, [], [])
    for node in nodes:
        if isinstance(node, ast.Call) and (name := reader.name_of(node.func)):
            arguments = {word.arg: _value(word.value) for word in node.keywords if word.arg}
            uses.calls.append(Call(node.lineno, name, arguments))
        elif isinstance(node, ast.ClassDef):
            for base in filter(None, map(reader.name_of, node.bases)):
                methods = {one.name: one for one in node.body if isinstance(one, ast.FunctionDef)}
                torch = frozenset(name for name, one in methods.items() if reader.uses_torch(one))
                lines = {name: one.lineno for name, one in methods.items()}
                uses.subclasses.append(Subclass(node.lineno, node.name, base, lines, torch))
    for part in uses:
        part.sort(key=lambda one: one.line)
    return uses


class _Reader(ast.NodeVisitor):
    """Finds what names mean."""

    def __init__(self):
        self.names: list[Name] = []
        self._meaning: dict[str, str] = {}  # of names in the script that are trl's, or TrainingArguments
        self._modules: dict[str, str] = {}  # of modules of trl
        self._torch: set[str] = set()

    def visit_ImportFrom(self, node: ast.ImportFrom) -> None:
        module = (node.module or "").partition(".")[0]
        for alias in node.names:
            own = alias.asname or alias.name
            if module in PACKAGES and not node.level:
                self.names.append(Name(node.lineno, node.module, alias.name))
                self._meaning[own] = alias.name
            elif module == "transformers" and alias.name == "TrainingArguments":
                self._meaning[own] = alias.name
            elif module == "torch":
                self._torch.add(own)

    def visit_Import(self, node: ast.Import) -> None:
        for alias in node.names:
            module, _, _ = alias.name.partition(".")
            if module in PACKAGES:
                self._modules[alias.asname or module] = alias.name if alias.asname else module
            elif module == "torch":
                self._torch.add(alias.asname or module)

    def visit_Attribute(self, node: ast.Attribute) -> None:
        module = self._module_of(node.value)
        if module is not None and node.attr[:1].isupper():
            self.names.append(Name(node.lineno, module, node.attr))

    def name_of(self, node: ast.expr) -> str | None:
        """The name of trl's that an expression means; None for others."""
        if isinstance(node, ast.Name):
            return self._meaning.get(node.id)
        if isinstance(node, ast.Attribute) and self._module_of(node.value) is not None:
            return node.attr
        return None

    def uses_torch(self, node: ast.AST) -> bool:
        return any(isinstance(one, ast.Name) and one.id in self._torch for one in ast.walk(node))

    def _module_of(self, node: ast.expr) -> str | None:
        below: list[str] = []
        while isinstance(node, ast.Attribute) and node.attr.islower() and len(below) < _DEEPEST:
            below.append(node.attr)
            node = node.value
        module = self._modules.get(node.id) if isinstance(node, ast.Name) else None
        return None if module is None else ".".join([module, *reversed(below)])


def _value(node: ast.expr) -> Any:
    if _is_deep(node):  # literal_eval and repr are recursive
        return UNKNOWN
    try:
        return ast.literal_eval(node)
    except (ValueError, TypeError):
        return UNKNOWN


def _is_deep(node: ast.expr) -> bool:
    level: list[ast.AST] = [node]
    for _ in range(_DEEPEST):
        level = [child for one in level for child in ast.iter_child_nodes(one)]
        if not level:
            return False
    return True
