"""Static analysis of a script or notebook: parse it and resolve its names, without running any of it."""

from __future__ import annotations

import ast
import json
import operator
import os
import re
from collections.abc import Callable, Iterable, Iterator
from importlib.machinery import PathFinder
from pathlib import Path
from typing import Any, NamedTuple

_MOST_FILES = 50
DEEPEST = 50  # steps from a name to its meaning, and levels of a value's expression; UNKNOWN beyond that
UNKNOWN = object()  # a value that is known only when the script runs

# What an expression may mean


class Imported(NamedTuple):
    """A module, or a name of one, by its dotted path: `trl`, `trl.SFTTrainer`."""

    path: str


class Defined(NamedTuple):
    """A function, lambda or class that the script defines."""

    node: ast.FunctionDef | ast.AsyncFunctionDef | ast.Lambda | ast.ClassDef
    scope: Scope


class CallResult(NamedTuple):
    """The result of a call."""

    callee: Meaning
    call: ast.Call
    scope: Scope


class Method(NamedTuple):
    """An attribute of something that is not a module."""

    owner: Meaning
    name: str


class Self(NamedTuple):
    """The first parameter of a method."""

    owner: Defined


class Super(NamedTuple):
    """`super()` in a method of a class."""

    owner: Defined


class Sequence(NamedTuple):
    """A tuple or list display."""

    items: tuple[ast.expr, ...]
    scope: Scope


class Constant(NamedTuple):
    """A literal: a number, a string, True, False or None."""

    value: Any


class Unknown(NamedTuple):
    """Anything else, such as a parameter or a loop variable."""


Meaning = Imported | Defined | CallResult | Method | Self | Super | Sequence | Constant | Unknown
_UNKNOWN = Unknown()


class Binding(NamedTuple):
    """One assignment of a name. value: an expression, to be evaluated in `scope`, or the meaning itself."""

    line: int
    value: ast.expr | Meaning
    scope: Scope
    conditional: bool


class Scope:
    """The names of a module, class or function. enclosing: the scope to search for other names."""

    def __init__(self, module: Module, enclosing: Scope | None, owner: ast.AST | None = None):
        self.module, self.enclosing, self.owner = module, enclosing, owner
        self.bindings: dict[str, list[Binding]] = {}

    def find(self, name: str, line: int) -> list[Binding]:
        """The assignments of a name that may be in effect at a line: the last one before it and, as long as these are
        conditional, earlier ones."""
        scope: Scope | None = self
        while scope is not None:
            if bindings := scope.bindings.get(name):
                earlier = [binding for binding in bindings if binding.line <= line] if scope is self else []
                return _until_unconditional(earlier or bindings)
            scope = scope.enclosing
        return []


def _until_unconditional(bindings: list[Binding]) -> list[Binding]:
    in_effect: list[Binding] = []
    for binding in reversed(bindings):
        in_effect.append(binding)
        if not binding.conditional:
            break
    return in_effect


# What a script contains


class Name(NamedTuple):
    """A name of a package that the script imports, or reads as an attribute of a module.

    guarded: an ImportError is caught, or the import depends on a condition.
    """

    line: int
    module: str
    name: str
    guarded: bool


class Call(NamedTuple):
    node: ast.Call
    scope: Scope


class Attribute(NamedTuple):
    """An attribute that the script reads, or sets to a value."""

    node: ast.Attribute
    scope: Scope
    value: ast.expr | None = None


class Module:
    """A script, a notebook, or a local module that a script imports.

    Attributes:
        names: the names that it imports from packages, or reads as attributes of modules.
        calls, classes, attributes: its calls, classes and attributes, in the order of the file.
        checked_names: names that it checks for with hasattr or getattr.
        mappings: names of variables, and ids of call nodes, whose values it reads by key or unpacks.
        skipped: (line, reason) of code that is not valid Python.
        inner: the local modules that it imports.
        reads: the names that its own statements read, outside functions and classes.
        globals: names that functions declare as global.
        open_ended: whether it may define names that are not seen here: with `import *`, with exec and the like, or with
            notebook magics.
    """

    def __init__(self, path: Path, label: str, library: Library):
        self.path, self.label, self.library = path, label, library
        self.names: list[Name] = []
        self.calls: list[Call] = []
        self.classes: list[Defined] = []
        self.attributes: list[Attribute] = []
        self.checked_names: set[str] = set()
        self.mappings: set[str | int] = set()
        self.skipped: list[tuple[int, str]] = []
        self.inner: list[Module] = []
        self.reads: list[ast.Name] = []
        self.globals: set[str] = set()
        self.open_ended = False
        self.scopes: dict[ast.AST, Scope] = {}  # of its functions
        self.cells: list[int] = []  # of a notebook: the line before the first one of each cell
        self.top = Scope(self, None)

    def place(self, line: int) -> str:
        """Where a line is, as a reader finds it: in a notebook, by the number of the code cell."""
        if self.cells:
            cell = max(number for number, start in enumerate(self.cells) if start < line)
            return f"cell {cell + 1}, line {line - self.cells[cell]}"
        return f"{self.label}:{line}" if self.label else str(line)


class Library:
    """Finds and reads local modules: in the folder of the script, in the two above it, and in folders that the script
    adds to `sys.path`."""

    def __init__(self, folder: Path):
        self.folder = folder
        self.added: list[Path] = []
        self.modules: dict[Path, Module | None] = {}

    def find(self, dotted: str, level: int, importer: Module) -> Module | None:
        """The module of this name, or None if it is not a local one."""
        parts = [part for part in dotted.split(".") if part]
        folders = importer.path.parents[level - 1 : level] if level else self._folders(parts[0])
        for folder in folders:
            base = folder.joinpath(*parts)
            for path in (base.with_suffix(".py") if parts else base / "__init__.py", base / "__init__.py"):
                if path.is_file() and path != importer.path:
                    return self._read(path)
        return None

    def _folders(self, package: str) -> list[Path]:
        """Where a package may be: with the script, or above it if it is not an installed one."""
        above = [] if PathFinder.find_spec(package) else list(self.folder.parents)[:2]
        return [*self.added, self.folder, *above]

    def add(self, call: ast.Call) -> None:
        """Also search the folders that a call adds to `sys.path`: its string literals, relative to the script's folder
        or one of the two above it."""
        texts = [child.value for node in call.args for child in ast.walk(node) if isinstance(child, ast.Constant)]
        folders = [self.folder, *list(self.folder.parents)[:2]]
        candidates = (base / text for text in texts if isinstance(text, str) and text for base in folders)
        self.added += [path.resolve() for path in candidates if os.path.isdir(path)]  # never raises

    def is_importable(self, module: Module) -> bool:
        """Whether Python itself finds a module: it does not search the folders above the script."""
        return not {self.folder, *self.added}.isdisjoint(module.path.parents)

    def _read(self, path: Path) -> Module | None:
        if path not in self.modules and len(self.modules) < _MOST_FILES:
            self.modules[path] = None  # while it is read: modules may import each other
            label = path.name if path.parent == self.folder else f"{path.parent.name}/{path.name}"
            try:
                self.modules[path] = read(path.read_text(encoding="utf-8"), path, label, self)
            except (SyntaxError, ValueError, RecursionError, MemoryError):
                self.modules[path] = Module(path, label, self)
                self.modules[path].skipped.append((1, "This file is not valid Python."))
        return self.modules.get(path)


# Reading


def read(source: str, path: Path | None = None, label: str = "", library: Library | None = None) -> Module:
    """Read a script, or a notebook if `path` ends with .ipynb.

    Args:
        path: its path, for finding the local modules that it imports; None: do not read these.
        label: the name of its file in findings; "" for the script itself.

    Raises:
        SyntaxError: the source is not valid Python.
        ValueError: the notebook is not valid JSON, or not a Python notebook.
    """
    full_path = Path("script.py") if path is None else path.absolute()
    module = Module(full_path, label, library or Library(full_path.parent))
    tree = _parse_notebook(json.loads(source), module) if full_path.suffix == ".ipynb" else _parse(source)
    _Reader(module, inner=path is not None).read(tree)
    return module


def _parse(source: str, flags: int = 0) -> ast.Module:
    """Parse source code, and compile it as well, because some errors, such as a repeated argument, are only found
    then."""
    tree = compile(source, "script", "exec", ast.PyCF_ONLY_AST | flags, dont_inherit=True)
    compile(source, "script", "exec", flags, dont_inherit=True)
    return tree


_MAGIC = re.compile(r"\s*(?:[!%?]|[\w.]+\s*=\s*[!%])|[^#]*\?\s*$")
_DEFINING = re.compile(r"\s*(?:%run|%load|%store|%pylab|%%capture|%%cython|[\w.]+\s*=\s*[!%])")
_PYTHON_CELLS = ("%%time", "%%timeit", "%%capture", "%%prun")


def _parse_notebook(content: Any, module: Module) -> ast.Module:
    """The code of a notebook's cells. Shell commands and magics are left out."""
    if not isinstance(content, dict) or not isinstance(content.get("cells"), list):
        raise ValueError("the notebook has no cells.")
    language = content.get("metadata", {}).get("kernelspec", {}).get("language", "python")
    if language != "python":
        raise ValueError(f"the notebook is written in {language}.")
    body: list[ast.stmt] = []
    line = 0
    for cell in content["cells"]:
        if cell.get("cell_type") != "code":
            continue
        text = cell.get("source", "")
        lines = (text if isinstance(text, str) else "".join(text)).splitlines()
        module.open_ended |= any(map(_DEFINING.match, lines))
        module.cells.append(line)
        try:
            tree = _parse(_strip_magics(lines), ast.PyCF_ALLOW_TOP_LEVEL_AWAIT)
        except SyntaxError as error:
            module.skipped.append((line + (error.lineno or 1), f"This cell is not valid Python: {error.msg}."))
        else:
            body += [ast.increment_lineno(statement, line) for statement in tree.body]
        line += len(lines) + 1
    return ast.Module(body, [])


def _strip_magics(lines: list[str]) -> str:
    """The cell with each shell command and magic replaced by `pass`, which keeps the line numbers, and dedented by the
    indentation of its first line, as in IPython."""
    first = next((line for line in lines if line.strip()), "")
    if first.strip().startswith("%%") and not first.strip().startswith(_PYTHON_CELLS):
        return ""
    margin = first[: len(first) - len(first.lstrip())]
    output, continued = [], False
    for line in (line.removeprefix(margin) for line in lines):
        magic = _MAGIC.match(line) is not None
        indent = line[: len(line) - len(line.lstrip())]
        output.append("" if continued else f"{indent}pass" if magic else line)
        continued = (magic or continued) and line.rstrip().endswith("\\")
    return "\n".join(output)


def _adds_to_path(function: ast.expr) -> bool:
    match function:
        case ast.Attribute(
            attr="insert" | "append" | "extend", value=ast.Attribute(attr="path", value=ast.Name("sys"))
        ):
            return True
    return False


class _Context(NamedTuple):
    """The context of a node. conditional: it may not run. guarded: as in `Name`."""

    scope: Scope
    conditional: bool
    guarded: bool


class _Reader:
    """Collects the bindings and uses of a module. Iterative: a deep expression would exceed the recursion limit."""

    def __init__(self, module: Module, *, inner: bool):
        self.module, self._inner = module, inner
        self._classes: dict[ast.AST | None, Defined] = {}

    def read(self, tree: ast.Module) -> None:
        pending: list[tuple[ast.AST, _Context]] = [(tree, _Context(self.module.top, False, False))]
        while pending:
            node, context = pending.pop()
            children = self._visit(node, context)
            pending += reversed(children)

    def _visit(self, node: ast.AST, context: _Context) -> list[tuple[ast.AST, _Context]]:
        """Record a node, and return its children, each with its context."""
        scope = context.scope
        match node:
            case ast.Import() | ast.ImportFrom():
                self._import(node, context)
            case ast.FunctionDef() | ast.AsyncFunctionDef() | ast.Lambda():
                return self._function(node, context)
            case ast.ClassDef():
                return self._class(node, context)
            case ast.Assign():
                for target in node.targets:
                    self._bind(target, node.value, context)
            case ast.AnnAssign() if node.value is not None:
                self._bind(node.target, node.value, context)
            case ast.NamedExpr():
                self._bind(node.target, node.value, context)
            case ast.AugAssign():
                self._bind(node.target, _UNKNOWN, context)
            case ast.For() | ast.AsyncFor() | ast.comprehension():
                self._bind(node.target, _UNKNOWN, context)
            case ast.withitem() if node.optional_vars is not None:
                self._bind(node.optional_vars, _UNKNOWN, context)
            case ast.ExceptHandler() if node.name:
                self._add(node.name, node.lineno, _UNKNOWN, context)
            case ast.Name() if isinstance(node.ctx, ast.Load) and scope is self.module.top:
                self.module.reads.append(node)
            case ast.Global():
                self.module.globals |= set(node.names)
            case ast.MatchAs() | ast.MatchStar() if node.name:
                self._add(node.name, node.lineno, _UNKNOWN, context)
            case ast.MatchMapping() if node.rest:
                self._add(node.rest, node.lineno, _UNKNOWN, context)
            case ast.Subscript(slice=ast.Constant(value=str())) | ast.keyword(arg=None):
                self._note_mapping(node.value)
            case ast.Dict():
                for key, value in zip(node.keys, node.values, strict=True):
                    if key is None:
                        self._note_mapping(value)
            case ast.Call():
                self.module.calls.append(Call(node, scope))
                if _adds_to_path(node.func):
                    self.module.library.add(node)
                if isinstance(node.func, ast.Name) and node.func.id in ("exec", "globals", "locals", "vars"):
                    self.module.open_ended = True
                if isinstance(node.func, ast.Name) and node.func.id in ("hasattr", "getattr") and len(node.args) > 1:
                    name = node.args[1]
                    self.module.checked_names |= {name.value} if isinstance(name, ast.Constant) else set()
            case ast.Attribute() if isinstance(node.ctx, ast.Load):
                if node.attr in ("input_ids", "attention_mask", "keys", "values", "items"):
                    self._note_mapping(node.value)
                self.module.attributes.append(Attribute(node, scope))
        return [(child, self._child_context(child, node, context)) for child in ast.iter_child_nodes(node)]

    def _note_mapping(self, node: ast.expr) -> None:
        self.module.mappings.add(node.id if isinstance(node, ast.Name) else id(node))

    def _child_context(self, child: ast.AST, node: ast.AST, context: _Context) -> _Context:
        match node:
            case ast.If() if child is not node.test:
                return context if _is_main(node.test) else context._replace(conditional=True, guarded=True)
            case ast.For() | ast.AsyncFor() | ast.While() | ast.Match():
                return context._replace(conditional=True)
            case ast.Try() | ast.TryStar():
                caught = any(_catches_import_error(handler) for handler in node.handlers)
                return context._replace(conditional=True, guarded=context.guarded or caught)
            case ast.ExceptHandler():
                return context._replace(conditional=True, guarded=False)
        return context

    def _import(self, node: ast.Import | ast.ImportFrom, context: _Context) -> None:
        for alias in node.names:
            if isinstance(node, ast.Import):
                path = alias.name if alias.asname else alias.name.partition(".")[0]
                inner = self._find(alias.name, 0)
                if inner is None or not self.module.library.is_importable(inner):
                    self.module.names.append(Name(node.lineno, alias.name, "", context.guarded))
                self._add(alias.asname or path, node.lineno, Imported(path), context)
                continue
            inner = self._find(node.module or "", node.level)
            if inner is not None and not node.level and not self.module.library.is_importable(inner):
                self.module.names.append(Name(node.lineno, node.module, "", context.guarded))
            if inner is None:
                self.module.open_ended |= alias.name == "*"
                if not node.level:
                    self.module.names.append(Name(node.lineno, node.module, alias.name, context.guarded))
                path = "." * node.level + (node.module or "")
                self._add(alias.asname or alias.name, node.lineno, Imported(f"{path}.{alias.name}"), context)
                continue
            for name in inner.top.bindings if alias.name == "*" else [alias.name]:
                local_name = alias.asname or name
                for binding in reversed(_until_unconditional(inner.top.bindings.get(name, []))):
                    self._add(local_name, node.lineno, binding.value, context, binding.scope)
                if name not in inner.top.bindings:
                    self._add(local_name, node.lineno, _UNKNOWN, context)

    def _find(self, dotted: str, level: int) -> Module | None:
        module = self.module.library.find(dotted, level, self.module) if self._inner else None
        if module is not None and module not in self.module.inner:
            self.module.inner.append(module)
        return module

    def _function(self, node: Any, context: _Context) -> list[tuple[ast.AST, _Context]]:
        enclosing = context.scope
        if isinstance(enclosing.owner, ast.ClassDef):  # methods do not see names of the class body
            enclosing = enclosing.enclosing
        scope = Scope(self.module, enclosing, node)
        arguments = node.args
        self.module.scopes[node] = scope
        named = (*arguments.posonlyargs, *arguments.args, *arguments.kwonlyargs)
        for parameter in filter(None, (*named, arguments.vararg, arguments.kwarg)):
            scope.bindings[parameter.arg] = [Binding(0, _UNKNOWN, scope, False)]
        owner = self._classes.get(context.scope.owner)
        if owner is not None and parameters(node) and not isinstance(node, ast.Lambda) and not node.decorator_list:
            scope.bindings[parameters(node)[0]] = [Binding(0, Self(owner), scope, False)]
        inner_context = _Context(scope, False, context.guarded)
        if isinstance(node, ast.Lambda):
            return [(node.body, inner_context), *((default, context) for default in _defaults(arguments))]
        self._add(node.name, node.lineno, Defined(node, context.scope), context)
        outside = [(child, context) for child in (*node.decorator_list, *_defaults(arguments))]
        return outside + [(child, inner_context) for child in node.body]

    def _class(self, node: ast.ClassDef, context: _Context) -> list[tuple[ast.AST, _Context]]:
        definition = Defined(node, context.scope)
        self.module.classes.append(definition)
        self._classes[node] = definition
        self._add(node.name, node.lineno, definition, context)
        scope = Scope(self.module, context.scope, node)
        outside = [(child, context) for child in (*node.decorator_list, *node.bases)]
        return outside + [(child, _Context(scope, False, context.guarded)) for child in node.body]

    def _bind(self, target: ast.expr, value: ast.expr | Meaning, context: _Context) -> None:
        match target:
            case ast.Name():
                self._add(target.id, target.lineno, value, context)
            case ast.Attribute():
                expression = value if isinstance(value, ast.expr) else None
                self.module.attributes.append(Attribute(target, context.scope, expression or ast.Constant(None)))
            case ast.Tuple() | ast.List():
                pairs = isinstance(value, ast.Tuple | ast.List) and len(value.elts) == len(target.elts)
                for index, element in enumerate(target.elts):
                    self._bind(element, value.elts[index] if pairs else _UNKNOWN, context)
            case ast.Starred():
                self._bind(target.value, _UNKNOWN, context)

    def _add(
        self, name: str, line: int, value: ast.expr | Meaning, context: _Context, scope: Scope | None = None
    ) -> None:
        binding = Binding(line, value, scope or context.scope, context.conditional)
        context.scope.bindings.setdefault(name, []).append(binding)


def _is_main(test: ast.expr) -> bool:
    return isinstance(test, ast.Compare) and isinstance(test.left, ast.Name) and test.left.id == "__name__"


def _defaults(arguments: ast.arguments) -> list[ast.expr]:
    return [default for default in (*arguments.defaults, *arguments.kw_defaults) if default is not None]


def _catches_import_error(handler: ast.ExceptHandler) -> bool:
    if handler.type is None:
        return True
    names = {child.id for child in ast.walk(handler.type) if isinstance(child, ast.Name)}
    return bool(names & {"ImportError", "ModuleNotFoundError", "Exception", "BaseException"})


def parameters(function: Any) -> list[str]:
    """The names of a function's positional parameters."""
    return [parameter.arg for parameter in (*function.args.posonlyargs, *function.args.args)]


# Following names


def meanings(node: ast.expr, scope: Scope, depth: int = 0) -> list[Meaning]:
    """All possible meanings of an expression; [Unknown()] if it is only known when the script runs."""
    if depth > DEEPEST:
        return [_UNKNOWN]
    follow = lambda child: meanings(child, scope, depth + 1)  # noqa: E731
    match node:
        case ast.Name():
            return _name_meanings(node, scope, depth)
        case ast.Attribute():
            return [
                Imported(f"{owner.path}.{node.attr}") if isinstance(owner, Imported) else Method(owner, node.attr)
                for owner in follow(node.value)
            ]
        case ast.Call():
            return _call_meanings(node, scope, depth)
        case ast.IfExp():
            return follow(node.body) + follow(node.orelse)
        case ast.BoolOp():
            return [meaning for part in node.values for meaning in follow(part)]
        case ast.Lambda():
            return [Defined(node, scope)]
        case ast.Tuple() | ast.List():
            return [Sequence(tuple(node.elts), scope)]
        case ast.NamedExpr():
            return follow(node.value)
        case ast.Constant():
            return [Constant(node.value)]
    return [_UNKNOWN]


def _name_meanings(node: ast.Name, scope: Scope, depth: int) -> list[Meaning]:
    results: list[Meaning] = []
    for binding in scope.find(node.id, node.lineno):
        if isinstance(binding.value, ast.expr):
            results += meanings(binding.value, binding.scope, depth + 1)
        else:
            results.append(binding.value)
    return results or [_UNKNOWN]


def _call_meanings(node: ast.Call, scope: Scope, depth: int) -> list[Meaning]:
    if isinstance(node.func, ast.Name) and node.func.id == "super":
        owner = enclosing_class(scope)
        return [_UNKNOWN if owner is None else Super(owner)]
    results: list[Meaning] = []
    for callee in meanings(node.func, scope, depth + 1):
        if callee == Imported("functools.partial") and node.args:
            results += meanings(node.args[0], scope, depth + 1)
        elif callee == Imported("importlib.import_module") and node.args:
            path = value_of(node.args[0], scope)
            results.append(Imported(path) if isinstance(path, str) else _UNKNOWN)
        elif isinstance(callee, Defined) and isinstance(callee.node, ast.FunctionDef):
            results += return_meanings(callee, depth + 1)
        else:
            results.append(CallResult(callee, node, scope))
    return results


def return_meanings(function: Defined, depth: int = 0) -> list[Meaning]:
    """What a function of the script returns."""
    scope = function.scope.module.scopes[function.node]
    results = [
        meaning
        for statement in direct_nodes(function.node)
        if isinstance(statement, ast.Return) and statement.value is not None
        for meaning in meanings(statement.value, scope, depth + 1)
    ]
    return results or [_UNKNOWN]


def direct_nodes(function: ast.AST) -> Iterator[ast.AST]:
    """The nodes of a function, without the bodies of nested functions and classes."""
    pending = list(ast.iter_child_nodes(function))
    while pending:
        node = pending.pop()
        yield node
        if not isinstance(node, ast.FunctionDef | ast.AsyncFunctionDef | ast.Lambda | ast.ClassDef):
            pending += ast.iter_child_nodes(node)


def enclosing_class(scope: Scope | None) -> Defined | None:
    """The class whose method contains a scope."""
    while scope is not None:
        for definition in scope.module.classes:
            if scope.owner in definition.node.body:
                return definition
        scope = scope.enclosing
    return None


def bases(definition: Defined) -> list[Meaning]:
    """The meanings of the direct and indirect bases of a class, nearest first."""
    results: list[Meaning] = []
    pending = [definition]
    for _ in range(DEEPEST):
        if not pending:
            break
        current = pending.pop(0)
        for base in current.node.bases:
            node = base.value if isinstance(base, ast.Subscript) else base
            for meaning in meanings(node, current.scope):
                results.append(meaning)
                if isinstance(meaning, Defined) and isinstance(meaning.node, ast.ClassDef):
                    pending.append(meaning)
    return results


# Values

_OPERATIONS: dict[type, Callable[[Any, Any], Any]] = {
    ast.Add: operator.add, ast.Sub: operator.sub, ast.Mult: operator.mul, ast.Div: operator.truediv,
    ast.FloorDiv: operator.floordiv, ast.Mod: operator.mod,
}  # fmt: skip


def value_of(node: ast.expr, scope: Scope, depth: int = 0) -> Any:
    """The value of a constant expression, or UNKNOWN. Names are followed, and arithmetic is computed."""
    if depth > DEEPEST or _is_deep(node):
        return UNKNOWN
    follow = lambda child: value_of(child, scope, depth + 1)  # noqa: E731
    match node:
        case ast.Constant():
            return node.value
        case ast.Name():
            bindings = scope.find(node.id, node.lineno)
            if len(bindings) != 1 or not isinstance(bindings[0].value, ast.expr) or bindings[0].conditional:
                return UNKNOWN
            return value_of(bindings[0].value, bindings[0].scope, depth + 1)
        case ast.Tuple() | ast.List() | ast.Set():
            items = list(map(follow, node.elts))
            if any(item is UNKNOWN for item in items):
                return UNKNOWN
            return {ast.Tuple: tuple, ast.List: list, ast.Set: _make_set}[type(node)](items)
        case ast.Dict():
            return _make_dict(node.keys, node.values, follow)
        case ast.Call() if isinstance(node.func, ast.Name) and node.func.id == "dict" and not node.args:
            if all(keyword.arg for keyword in node.keywords):
                keys = [ast.Constant(keyword.arg) for keyword in node.keywords]
                return _make_dict(keys, [keyword.value for keyword in node.keywords], follow)
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


def _make_set(items: list) -> Any:
    try:
        return set(items)
    except TypeError:
        return UNKNOWN


def _make_dict(keys: Iterable[ast.expr | None], values: Iterable[ast.expr], follow: Callable) -> Any:
    result: dict[Any, Any] = {}
    for key, value in zip(keys, values, strict=True):
        name, item = UNKNOWN if key is None else follow(key), follow(value)
        if not isinstance(name, str | int | float | bool | None) or item is UNKNOWN:
            return UNKNOWN
        result[name] = item
    return result


def _is_deep(node: ast.expr) -> bool:
    level: list[ast.AST] = [node]
    for _ in range(DEEPEST):
        level = [child for parent in level for child in ast.iter_child_nodes(parent)]
        if not level:
            return False
    return True


class Argument(NamedTuple):
    """An argument of a call. value: its value, or UNKNOWN."""

    value: Any
    node: ast.expr
    scope: Scope


def arguments_of(call: ast.Call, scope: Scope, positional: list[str]) -> tuple[dict[str, Argument], bool]:
    """The arguments of a call by name, and whether it has others that are known only when the script runs.

    Args:
        positional: the names of the parameters, in order.
    """
    arguments: dict[str, Argument] = {}
    has_unknown = any(isinstance(argument, ast.Starred) for argument in call.args)
    for name, node in zip(positional, call.args, strict=False):
        if isinstance(node, ast.Starred):
            break
        arguments[name] = Argument(value_of(node, scope), node, scope)
    for keyword in call.keywords:
        if keyword.arg:
            arguments[keyword.arg] = Argument(value_of(keyword.value, scope), keyword.value, scope)
            continue
        spread = _spread(keyword.value, scope)
        has_unknown |= spread is None
        arguments |= spread or {}
    return arguments, has_unknown


def _spread(node: ast.expr, scope: Scope, depth: int = 0) -> dict[str, Argument] | None:
    """The arguments in `**node`, or None if they are known only when the script runs."""
    if depth > DEEPEST:
        return None
    match node:
        case ast.Name():
            bindings = scope.find(node.id, node.lineno)
            if len(bindings) == 1 and isinstance(bindings[0].value, ast.expr) and not bindings[0].conditional:
                return _spread(bindings[0].value, bindings[0].scope, depth + 1)
        case ast.Call() if isinstance(node.func, ast.Name) and node.func.id == "dict" and not node.args:
            pairs = [(keyword.arg, keyword.value) for keyword in node.keywords]
            if all(name for name, _ in pairs):
                return {name: Argument(value_of(value, scope), value, scope) for name, value in pairs}
        case ast.Dict():
            arguments = {}
            for key, value in zip(node.keys, node.values, strict=True):
                if key is None:
                    inner = _spread(value, scope, depth + 1)
                    if inner is None:
                        return None
                    arguments |= inner
                elif isinstance(key, ast.Constant) and isinstance(key.value, str):
                    arguments[key.value] = Argument(value_of(value, scope), value, scope)
                else:
                    return None
            return arguments
    return None
