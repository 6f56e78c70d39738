"""What the names of a script mean in trl_jax: its modules, trainers and configs, and the attributes they have."""

from __future__ import annotations

import ast
import importlib
import inspect
import textwrap
import warnings
from collections.abc import Callable, Iterator
from functools import lru_cache
from typing import Any, Literal, NamedTuple

from trl_jax.cli.following import arguments_of, bases, meanings
from trl_jax.cli.installed import spec_of
from trl_jax.cli.reading import (
    Binding,
    Call,
    Defined,
    Imported,
    Made,
    Meaning,
    Method,
    Module,
    Name,
    Self,
    Unknown,
    parameters,
)
from trl_jax.cli.trl_alias import MODULES, public_names
from trl_jax.config.devices import without_launcher
from trl_jax.core.trainers import TRAINERS, TrainerNames
from trl_jax.trainer.overrides import NEAR

# Findings


KINDS = ("works", "changed", "refused", "not known", "not installed")
PACKAGES = ("trl", "trl_jax")


class Finding(NamedTuple):
    """The verdict on one name, argument, method or attribute. `text` says what changes, why it is refused and what to
    write, or why it is not known."""

    line: int
    what: str
    kind: Literal["works", "changed", "refused", "not known", "not installed"]
    text: str = ""
    place: str = ""


def tried(line: int, what: str, do: Callable[[], Any]) -> Finding:
    """What happens when something is done: "refused" if it raises, "changed" if it warns."""
    with warnings.catch_warnings(record=True) as told, without_launcher():
        warnings.simplefilter("always")
        try:
            do()
        except Exception as error:  # the script would get the same error, whatever it is
            return Finding(line, what, "refused", " ".join(str(error).split()))
    texts = [" ".join(str(warning.message).split()) for warning in told]
    return Finding(line, what, "changed", " ".join(dict.fromkeys(texts))) if texts else Finding(line, what, "works")


# What names mean


OF_TRAINER = {names.trainer: names for names in TRAINERS.values()}
OF_CONFIG = {names.config: names for names in TRAINERS.values()}


def package_of(path: str) -> str:
    return path.partition(".")[0]


def prefixes(path: str) -> Iterator[str]:
    """`a`, `a.b` and `a.b.c` for `a.b.c`."""
    parts = path.split(".")
    return (".".join(parts[:length]) for length in range(1, len(parts) + 1))


def short(meaning: Meaning | None) -> str:
    """The name of a class, without its module."""
    match meaning:
        case Imported():
            return meaning.path.rpartition(".")[2]
        case Defined(node=ast.ClassDef()):
            return meaning.node.name
    return ""


def split(path: str, line: int) -> Name:
    """The module and the name in a dotted path; further attributes are left out."""
    parts = path.split(".")
    length = next((size for size in range(len(parts) - 1, 0, -1) if module_exists(".".join(parts[:size]))), 1)
    return Name(line, ".".join(parts[:length]), parts[length] if length < len(parts) else "", False)


def module_exists(module: str) -> bool:
    """Whether trl_jax, or trl under `python -m trl_jax`, has this module."""
    if module in MODULES:
        return True
    if package_of(module) == "trl_jax":
        return spec_of(module) is not None or module.replace("trl_jax", "trl", 1) in MODULES
    return spec_of(module) is not None


def is_ours(module: str, name: str) -> bool:
    """Whether a name of trl, or of trl_jax, is trl_jax's own."""
    if package_of(module) == "trl":
        return f"{module}.{name}" in MODULES or name in names_of(module)
    if name in NEAR or not module_exists(module):
        return False
    if f"{module}.{name}" in _REPLACING:
        return True
    try:
        return hasattr(_imported(module), name)
    except ImportError:  # a name that is in trl.experimental alone
        return False


_REPLACING = {ours for of_module in MODULES.values() for ours in of_module}


def _imported(module: str) -> Any:
    return importlib.import_module(module)


def names_of(module: str) -> set[str]:
    """The names of a module of trl that are trl_jax's."""
    return {name for ours in MODULES.get(module, ()) for name in public_names(_imported(ours))}


def public() -> list[str]:
    """The public names."""
    return [name for module in MODULES["trl"] for name in _imported(module).__all__]


def trainer_of(meaning: Meaning | None) -> TrainerNames | None:
    """The trainer of trl_jax that a class is, or is derived from."""
    return _derived(meaning, OF_TRAINER)


def config_of(meaning: Meaning | None) -> type | None:
    names = _derived(meaning, OF_CONFIG)
    return None if names is None else names.load_config()


def _derived(meaning: Meaning | None, table: dict[str, TrainerNames]) -> TrainerNames | None:
    match meaning:
        case Imported() if package_of(meaning.path) in PACKAGES:
            module, _, name = meaning.path.rpartition(".")
            return table.get(name) if is_ours(module, name) else None
        case Defined(node=ast.ClassDef()):
            return next((found for base in bases(meaning) if (found := _derived_import(base, table))), None)
    return None


def _derived_import(base: Meaning, table: dict[str, TrainerNames]) -> TrainerNames | None:
    return _derived(base, table) if isinstance(base, Imported) else None


def methods(made: Defined) -> dict[str, ast.FunctionDef]:
    return {one.name: one for one in made.node.body if isinstance(one, ast.FunctionDef)}


def own_names(made: Defined) -> set[str]:
    """The names that a class of the script, or its bases of the script's, define."""
    kinds = [made, *(one for one in bases(made) if isinstance(one, Defined))]
    nodes = [node for kind in kinds for node in kind.node.body]
    named = {node.name for node in nodes if isinstance(node, ast.FunctionDef | ast.AsyncFunctionDef | ast.ClassDef)}
    targets = [target for node in nodes if isinstance(node, ast.Assign) for target in node.targets]
    targets += [node.target for node in nodes if isinstance(node, ast.AnnAssign)]
    foreign = any(not isinstance(one, Defined) and trainer_of(one) is None for one in bases(made))
    return named | {one.id for one in targets if isinstance(one, ast.Name)} | ({"*"} if foreign else set())


@lru_cache
def attributes_of(trainer: type) -> frozenset[str]:
    """The attributes of a trainer: those of its class, and those that its methods set."""
    found = set(dir(trainer))
    for kind in trainer.__mro__:
        if kind.__module__.startswith("trl_jax"):
            found |= vars(kind).get("__annotations__", {}).keys()
            tree = ast.parse(textwrap.dedent(inspect.getsource(kind)))
            found |= {
                one.attr
                for one in ast.walk(tree)
                if isinstance(one, ast.Attribute)
                and isinstance(one.ctx, ast.Store)
                and isinstance(one.value, ast.Name)
                and one.value.id == "self"
            }
    return frozenset(found)


def follow_trainers(modules: list[Module]) -> None:
    """Let the parameters that a trainer is passed to mean that trainer: of rollout functions, and of functions that
    they call."""
    calls = [call for module in modules for call in module.calls]
    for call in calls:
        for meaning in meanings(call.node.func, call.scope):
            if (names := trainer_of(meaning)) is None:
                continue
            made = Made(meaning, call.node, call.scope)
            known = [one for one in inspect.signature(names.load_trainer().__init__).parameters if one != "self"]
            given, _ = arguments_of(call.node, call.scope, known)
            if "rollout_func" in given:
                for function in meanings(given["rollout_func"].node, given["rollout_func"].scope):
                    _mean(function, 1, "trainer", made)
    for _ in range(3):  # functions that call functions
        for call in calls:
            _pass_on(call)


def _pass_on(call: Call) -> None:
    """Let a trainer that a call passes be what the parameter means."""
    given: list[tuple[int, str, ast.expr]] = [(place, "", node) for place, node in enumerate(call.node.args)]
    given += [(-1, word.arg, word.value) for word in call.node.keywords if word.arg]
    for place, name, node in given:
        if not isinstance(node, ast.Name):
            continue
        for passed in meanings(node, call.scope):
            trainer = passed.by if isinstance(passed, Made) else passed.of if isinstance(passed, Self) else None
            if trainer_of(trainer) is None:
                continue
            made = passed if isinstance(passed, Made) else Made(trainer, call.node, call.scope)
            for function in meanings(call.node.func, call.scope):
                _mean(function, place, name, made)


def _mean(function: Meaning, place: int, name: str, made: Made) -> None:
    """Let a parameter of a function of the script mean `made`.

    Args:
        place: its place among the positional arguments; -1: it is passed by name.
    """
    match function:
        case Defined(node=ast.ClassDef()):
            method, place = methods(function).get("__init__"), place + 1
        case Made(by=Defined(node=ast.ClassDef())):
            function, method, place = function.by, methods(function.by).get("__call__"), place + 1
        case Method(of=(Made(by=Defined(node=ast.ClassDef())) | Self())):
            owner = function.of.by if isinstance(function.of, Made) else function.of.of
            function, method, place = owner, methods(owner).get(function.name), place + 1
        case Defined():
            method = function.node
        case _:
            return
    scope = None if method is None else function.scope.module.scopes.get(method)
    if scope is None:
        return
    known = parameters(method)
    name = name if name in scope.bindings and name else known[place] if 0 < place + 1 <= len(known) else ""
    if not name or not scope.bindings.get(name) or not isinstance(scope.bindings[name][0].value, Unknown):
        return
    scope.bindings[name][0] = Binding(0, made, scope, False)
