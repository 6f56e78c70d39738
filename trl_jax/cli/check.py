"""`trl-jax check`: read a TRL script without running it, and report what works, changes or is refused here."""

from __future__ import annotations

import argparse
import ast
import contextlib
import importlib
import inspect
import warnings
from collections.abc import Callable, Iterator
from dataclasses import fields
from functools import partial
from pathlib import Path
from typing import Any, Literal, NamedTuple

from trl_jax.cli.trl_alias import MODULES
from trl_jax.config.devices import without_launcher
from trl_jax.config.renamed import RENAMED, way_out
from trl_jax.config.rules import show
from trl_jax.core.secrets import CleanParser, cleaned
from trl_jax.core.trainers import EXPERIMENTAL, TRAINERS, TrainerNames
from trl_jax.trainer.overrides import NEAR, OWN_COLLATOR, check_not_experimental

# The command


class Parser(CleanParser):
    def parse_args_and_config(self, argv: list[str]) -> tuple[argparse.Namespace]:
        return (self.parse_args(argv),)


def make_parser(prog: str | None = None) -> Parser:
    parser = Parser(
        prog=prog,
        description="Read a TRL script without running it, and report for every name imported from trl, every "
        "argument and every overridden method whether it works, behaves differently here, or is refused.",
        epilog="Values that are known only when the script runs, such as datasets and checkpoints, are not checked: "
        "`trl-jax compare` runs the first steps.",
    )
    parser.add_argument("script", help="a script that imports trl or trl_jax")
    return parser


def main(args: argparse.Namespace) -> None:
    """Print one line per finding, and a verdict.

    Raises:
        FileNotFoundError: there is no such script.
        ValueError: the script is not valid Python.
    """
    if not Path(args.script).is_file():
        raise FileNotFoundError(f"there is no script {args.script!r}.")
    try:
        uses = read(Path(args.script).read_text(encoding="utf-8"))
    except (SyntaxError, ValueError) as error:  # ValueError: not UTF-8, or null bytes
        raise ValueError(f"{args.script} is not valid Python: {error}") from None
    except (RecursionError, MemoryError):
        raise ValueError(f"{args.script}: an expression is nested too deeply to read.") from None
    print("\n".join(map(cleaned, report(findings(uses)))))


def report(found: list[Finding]) -> list[str]:
    """One line per finding, in the order of the script, and the verdict."""
    if not found:
        return ["The script uses nothing from trl."]
    lines = [f"{one.line:5}  {one.what}: {one.kind}" + (f". {one.text}" if one.text else "") for one in found]
    changed, refused = (sum(one.kind == kind for one in found) for kind in ("changed", "refused"))
    if refused:
        are, them = ("is", "it") if refused == 1 else ("are", "them")
        verdict = f"{refused} of {len(found)} {are} refused: change {them} as described, then run the script."
    elif changed:
        verdict = f"The script runs unchanged; {changed} of {len(found)} behave{'s' * (changed == 1)} differently here."
    else:
        verdict = "The script runs unchanged."
    return [*lines, "", verdict]


# Findings: construct the configs and subclasses of the script, without model or data, and see what happens


class Finding(NamedTuple):
    """The verdict on one name, argument or method. `text` says what changes, or why it is refused and what to write."""

    line: int
    what: str
    kind: Literal["works", "changed", "refused"]
    text: str = ""


_KNOWN = (*TRAINERS.values(), *EXPERIMENTAL.values())
_OF_TRAINER = {names.trainer: names for names in _KNOWN}
_OF_CONFIG = {names.config: names for names in _KNOWN}
_IN_JAX = "Write it in jax.numpy, so that it is compiled together with the model and its gradient."
_IN_TORCH = "It uses torch: the outputs of each batch are copied to torch, and their gradient back. "


def findings(uses: Uses) -> list[Finding]:
    """All findings, ordered by line."""
    touched = {call.name for call in uses.calls} | {subclass.base for subclass in uses.subclasses}
    found = [_of_name(name, name.name in touched) for name in uses.names]
    used = [names for call in uses.calls if (names := _OF_TRAINER.get(call.name))]
    for call in uses.calls:
        if call.name in _OF_TRAINER:
            found += _of_trainer(call, _OF_TRAINER[call.name])
        elif call.name in _OF_CONFIG:
            found += _of_config(call, _OF_CONFIG[call.name].load_config())
        elif call.name == "TrainingArguments" and used:
            found += _of_config(call, used[0].load_config())
    for subclass in uses.subclasses:
        if subclass.base in _OF_TRAINER:
            found += _of_subclass(subclass, _OF_TRAINER[subclass.base])
    return sorted(dict.fromkeys(found), key=lambda one: one.line)


def _of_name(name: Name, touched: bool) -> Finding:
    what = f"{name.module}.{name.name}"
    if name.name in NEAR and name.module.removesuffix(".trainer") in PACKAGES:
        near = f" Closest: {NEAR[name.name]}." if NEAR[name.name] else ""
        kind = "refused" if touched else "changed"
        return Finding(name.line, what, kind, f"It can be imported but not used: trl_jax does not implement it.{near}")
    if name.module.removesuffix(".trainer") in PACKAGES:
        try:
            check_not_experimental(name.name)
        except ImportError as error:
            return Finding(name.line, what, "refused", str(error))
    own = [name.module] if name.module.partition(".")[0] == "trl_jax" else []
    modules = (*MODULES["trl"], *MODULES.get(name.module, ()), *own)
    if any(_has(module, name.name) for module in modules):
        return Finding(name.line, what, "works")
    if name.module in ("trl", "trl_jax"):
        return Finding(name.line, what, "refused", f"There is no such name: {way_out(name.name, _names())}")
    text = "Not in trl_jax: python -m trl_jax takes it from the installed trl."
    return Finding(name.line, what, "changed", text)


def _has(module: str, name: str) -> bool:
    try:
        return hasattr(importlib.import_module(module), name)
    except ImportError:  # no such module, or a name that is in trl.experimental alone
        return False


def _names() -> list[str]:
    """The public names."""
    return [name for module in MODULES["trl"] for name in importlib.import_module(module).__all__]


def _alone(config: type) -> type:
    """The same config class, except that it neither joins other processes nor asks JAX for devices.

    The number of devices is not known here. Batch sizes that depend on it are refused only if they fit neither one
    device nor num_generations devices.
    """

    def settle_sizes(self: Any) -> None:
        given = dict(vars(self))
        try:
            config.settle_sizes(self)
        except ValueError:
            if "num_generations" not in given:
                raise
            vars(self).update(given, _devices=self.num_generations)
            with contextlib.suppress(ValueError):
                return config.settle_sizes(self)
            raise

    own = {
        "join_processes": lambda self: None,
        "settle_sizes": settle_sizes,
        "_devices": 1,
        "data_parallel_size": property(lambda self: self._devices),
    }
    return type(config.__name__, (config,), own)


def _of_config(call: Call, config: type) -> Iterator[Finding]:
    """Construct the config once per argument whose value the script spells out, then with all of them together."""
    known, config = config, _alone(config)
    given = {name: value for name, value in call.arguments.items() if value is not UNKNOWN}
    fitting: dict[str, Any] = {}
    for name, value in given.items():
        alone = {"output_dir": "out", name: value}
        found = _tried(call.line, f"{call.name}({show(name, value)})", partial(config, **alone))
        if found.kind == "refused":
            together = _tried(call.line, found.what, partial(config, **{"output_dir": "out"} | given))
            found = together if together.kind != "refused" else found
            if found.kind == "changed" and name not in found.text:  # the warning is about another argument
                found = Finding(call.line, found.what, "works")
        if found.kind != "refused":
            fitting[name] = value
        yield found
    for name in call.arguments.keys() - given.keys():
        yield _of_unknown_value(call, name, known)
    whole = _tried(call.line, f"{call.name}(...)", partial(config, **{"output_dir": "out"} | fitting))
    if whole.kind == "refused":
        yield whole


def _of_unknown_value(call: Call, name: str, config: type) -> Finding:
    """Check the name of an argument whose value is known only when the script runs."""
    what, known = f"{call.name}({name}=...)", {field.name for field in fields(config)}
    if name in RENAMED and name not in known:
        return Finding(call.line, what, "changed", f"An old name: {RENAMED[name]}")
    if name not in known:
        text = f"{config.__name__} has no argument {name!r}: {way_out(name, known)}"
        return Finding(call.line, what, "refused", text)
    line = config.argument_table().get(name)
    if line is not None and line.how == "refused":
        return Finding(call.line, what, "changed", f"Refused unless it has its default value: {line.why}")
    return Finding(call.line, what, "works")


def _of_trainer(call: Call, names: TrainerNames) -> Iterator[Finding]:
    trainer = names.load_trainer()
    known, old = inspect.signature(trainer.__init__).parameters, trainer._old_arguments
    of_config = {field.name for field in fields(names.load_config())}
    for name in call.arguments:
        what = f"{call.name}({name}=...)"
        if name in old:
            yield Finding(call.line, what, "changed", f"An old name: {old[name]}")
        elif name == "data_collator" and call.arguments[name] is OWN:
            yield Finding(call.line, what, "refused", OWN_COLLATOR)
        elif name in known:
            yield Finding(call.line, what, "works")
        elif name == "tokenizer":
            yield Finding(call.line, what, "changed", "An old name: pass it as processing_class.")
        elif name in of_config or name in RENAMED:
            text = f"Now an argument of {names.config}." if name in of_config else f"An old name: {RENAMED[name]}"
            yield Finding(call.line, what, "changed", text)
        else:
            yield Finding(call.line, what, "refused", f"{call.name} has no argument {name!r}: {way_out(name, known)}")


def _of_subclass(subclass: Subclass, names: TrainerNames) -> Iterator[Finding]:
    """Define a subclass once per method, with that method alone."""
    trainer = names.load_trainer()
    for method, line in subclass.methods.items():
        what = f"{subclass.name}.{method}"
        found = _tried(line, what, partial(type, subclass.name, (trainer,), {method: lambda self: None}))
        if found.kind == "works" and method in subclass.in_torch and "loss" in method:
            own = method == "compute_loss"
            found = Finding(line, what, "changed" if own else "refused", _IN_TORCH + _IN_JAX if own else _IN_JAX)
        yield found


def _tried(line: int, what: str, do: Callable[[], Any]) -> Finding:
    with warnings.catch_warnings(record=True) as told, without_launcher():
        warnings.simplefilter("always")
        try:
            do()
        except Exception as error:  # the script would get the same error, whatever it is
            return Finding(line, what, "refused", _first(error))
    texts = [" ".join(str(warning.message).split()) for warning in told]
    return Finding(line, what, "changed", " ".join(dict.fromkeys(texts))) if texts else Finding(line, what, "works")


def _first(error: Exception) -> str:
    return " ".join(str(error).split())


# Reading: what a script uses of trl


PACKAGES = ("trl", "trl_jax")
_DEEPEST = 50  # levels of an expression; a deeper one counts as UNKNOWN
UNKNOWN = object()  # a value that is known only when the script runs
OWN = object()  # a function or an object of a class that the script defines


class Name(NamedTuple):
    """A name that the script imports from a module of trl, or reads as its attribute."""

    line: int
    module: str
    name: str


class Call(NamedTuple):
    """A call of a class or function of trl, or of transformers' TrainingArguments, with its keyword arguments."""

    line: int
    name: str
    arguments: dict[str, Any]


class Subclass(NamedTuple):
    """A subclass of a class of trl. methods: name -> line. in_torch: the names of those that use torch."""

    line: int
    name: str
    base: str
    methods: dict[str, int]
    in_torch: frozenset[str]


class Uses(NamedTuple):
    """Everything a script uses of trl, each list ordered by line."""

    names: list[Name]
    calls: list[Call]
    subclasses: list[Subclass]


def read(source: str) -> Uses:
    """Read a script.

    Raises:
        SyntaxError: the source is not valid Python.
    """
    tree = ast.parse(source)
    reader = _Reader()
    nodes = list(ast.walk(tree))  # iterative: a deep expression would exceed the recursion limit
    for node in nodes:  # imports first: walk() visits those inside functions late
        if isinstance(node, ast.ImportFrom | ast.Import):
            reader.visit(node)
    for node in nodes:
        if isinstance(node, ast.Attribute):
            reader.visit(node)
    own = {node.name for node in nodes if isinstance(node, ast.FunctionDef | ast.ClassDef)}
    made = {
        target.id: node.value
        for node in nodes
        if isinstance(node, ast.Assign)
        for target in node.targets
        if isinstance(target, ast.Name)
    }
    uses = Uses(reader.names, [], [])
    for node in nodes:
        if isinstance(node, ast.Call) and (name := reader.name_of(node.func)):
            arguments = {word.arg: _value(word.value) for word in node.keywords if word.arg}
            if any(word.arg == "data_collator" and _is_own(word.value, own, made) for word in node.keywords):
                arguments["data_collator"] = OWN
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
    """Resolves the names in a script to names of trl."""

    def __init__(self):
        self.names: list[Name] = []
        self._meaning: dict[str, str] = {}  # name in the script -> name in trl, or TrainingArguments
        self._modules: dict[str, str] = {}  # name in the script -> module of trl
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
        """The name in trl that an expression refers to, or None."""
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


def _is_own(node: ast.expr, own: set[str], made: dict[str, ast.expr]) -> bool:
    """Whether an expression is a function of the script's own, or an object of its own class or function.

    Args:
        own: names of functions and classes that the script defines.
        made: what it assigns to names.
    """
    for _ in range(_DEEPEST):
        if isinstance(node, ast.Lambda) or (isinstance(node, ast.Name) and node.id in own):
            return True
        if isinstance(node, ast.Call):
            partial_of = (
                node.args and isinstance(node.func, ast.Name | ast.Attribute) and "partial" in ast.dump(node.func)
            )
            node = node.args[0] if partial_of else node.func
        elif isinstance(node, ast.Name) and node.id in made:
            node = made[node.id]
        else:
            return False
    return False


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
