"""`trl-jax check`: read a TRL script without running it, and report what works, changes or is refused here."""

from __future__ import annotations

import argparse
import ast
import contextlib
import difflib
import importlib
import inspect
import textwrap
import warnings
from collections.abc import Callable, Iterator
from dataclasses import fields
from functools import lru_cache, partial
from pathlib import Path
from typing import Any, Literal, NamedTuple

import transformers

from trl_jax.cli.installed import has_name, is_installed, spec_of
from trl_jax.cli.reading import (
    UNKNOWN,
    Argument,
    Attribute,
    Binding,
    Call,
    Constant,
    Defined,
    Imported,
    Made,
    Meaning,
    Method,
    Module,
    Name,
    Self,
    Sequence,
    Super,
    Unknown,
    arguments_of,
    bases,
    meanings,
    parameters,
    read,
)
from trl_jax.cli.trl_alias import MODULES, public_names
from trl_jax.config.devices import without_launcher
from trl_jax.config.renamed import RENAMED, way_out
from trl_jax.config.rules import show
from trl_jax.core.secrets import CleanParser, cleaned
from trl_jax.core.trainers import TRAINERS, TrainerNames
from trl_jax.trainer.overrides import NEAR, OWN_COLLATOR, check_not_experimental

# The command


class Parser(CleanParser):
    def parse_args_and_config(self, argv: list[str]) -> tuple[argparse.Namespace]:
        return (self.parse_args(argv),)


def make_parser(prog: str | None = None) -> Parser:
    parser = Parser(
        prog=prog,
        description="Read a TRL script or notebook without running it, and report for every name imported from trl, "
        "every argument and every overridden method whether it works under `python -m trl_jax`, behaves differently "
        "here, or is refused. The script's own modules are read, too.",
        epilog="Values that are known only when the script runs, such as datasets and checkpoints, are not checked: "
        "`trl-jax compare` runs the first steps.",
    )
    parser.add_argument("script", help="a script (.py) or notebook (.ipynb) that imports trl or trl_jax")
    return parser


def main(args: argparse.Namespace) -> None:
    """Print one line per finding, and a verdict.

    Raises:
        FileNotFoundError: there is no such script.
        ValueError: the script is not valid Python.
    """
    path = Path(args.script)
    if not path.is_file():
        raise FileNotFoundError(f"there is no script {args.script!r}.")
    try:
        module = read(path.read_text(encoding="utf-8"), path)
    except (SyntaxError, ValueError) as error:  # ValueError: not UTF-8, null bytes, or no notebook
        kind = "notebook of Python cells" if path.suffix == ".ipynb" else "Python"
        raise ValueError(f"{args.script} is not a valid {kind}: {error}".replace("a valid Py", "valid Py")) from None
    except (RecursionError, MemoryError):
        raise ValueError(f"{args.script}: an expression is nested too deeply to read.") from None
    print("\n".join(map(cleaned, report(findings(module)))))


def report(found: list[Finding]) -> list[str]:
    """One line per finding, in the order of the script, and the verdict."""
    if not found:
        return ["The script uses nothing from trl."]
    lines = [f"{one.place:>5}  {one.what}: {one.kind}" + (f". {one.text}" if one.text else "") for one in found]
    count = {kind: sum(one.kind == kind for one in found) for kind in KINDS}
    refused, unknown, changed = count["refused"], count["not known"], count["changed"]
    missing = ", ".join(dict.fromkeys(one.what for one in found if one.kind == "not installed"))
    if refused:
        are, them = ("is", "it") if refused == 1 else ("are", "them")
        verdict = f"{refused} of {len(found)} {are} refused: change {them} as described, then run the script."
    elif unknown:
        verdict = (
            f"Nothing is refused, but {unknown} of {len(found)} cannot be judged before the script runs: try its first "
            "steps with `trl-jax compare`."
        )
    elif changed:
        verdict = f"The script runs unchanged; {changed} of {len(found)} behave{'s' * (changed == 1)} differently here."
    else:
        verdict = "The script runs unchanged."
    if missing:
        verdict = f"Not installed here: {missing}. With it: " + verdict[0].lower() + verdict[1:]
    return [*lines, "", verdict]


# Findings: construct the configs and subclasses of the script, without model or data, and see what happens


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


_OF_TRAINER = {names.trainer: names for names in TRAINERS.values()}
_OF_CONFIG = {names.config: names for names in TRAINERS.values()}
_IN_JAX = "Write it in jax.numpy, so that it is compiled together with the model and its gradient."
_IN_TORCH = "It uses torch: the outputs of each batch are copied to torch, and their gradient back. "
_WITH_TORCH = "The installed trl's: it trains with torch, and its arguments are not checked."
_OWN_MODEL = (
    "A model class of the script's own is not supported. Use one of transformers' classes, and put the difference into "
    "compute_loss."
)
_UNSLOTH = (
    "Unsloth replaces TRL's trainers and the code of models, and needs a GPU. Load the model with transformers, or "
    "pass its name, and pass a LoraConfig as peft_config."
)
_ONE_LABEL = "A reward model gives one score per text: load it with num_labels=1, or pass its name."
_OPTAX = "Pass an optax transformation, or name the optimizer in the arguments: optim='adamw_torch'."
_WITH_MATH_VERIFY = ("accuracy_reward", "reasoning_accuracy_reward")
# Packages whose names are checked; of others, only whether they are installed.
_CHECKED = ("transformers", "peft", "datasets", "accelerate", "huggingface_hub", "torch")


def findings(module: Module) -> list[Finding]:
    """All findings in a script and its own modules, ordered by line."""
    modules = _with_inner(module)
    _follow_trainers(modules)
    script = _Script(modules)
    found: list[Finding] = []
    for one in modules:
        of_module = [Finding(line, "code", "not known", text) for line, text in one.skipped]
        of_module += script.of_names(one)
        for call in one.calls:
            of_module += script.of_call(call)
        for made in one.classes:
            of_module += script.of_class(made)
        for attribute in one.attributes:
            of_module += script.of_attribute(attribute)
        of_module = sorted(of_module, key=lambda each: each.line)
        found += [each._replace(place=one.place(each.line)) for each in of_module]
    seen: set[tuple[str, str]] = set()  # names and attributes are reported where they are used first
    return [
        one for one in found if "(" in one.what or not ((one.what, one.kind) in seen or seen.add((one.what, one.kind)))
    ]


def _with_inner(module: Module) -> list[Module]:
    """A module, and those of the script's own that it imports, each once."""
    found = [module]
    for one in found:
        found += [inner for inner in one.inner if inner not in found]
    return found


class _Script:
    """What the findings on one part of a script need to know of the others.

    Attributes:
        called: paths of what is called or subclassed.
        assigned: names of attributes that are set somewhere, or asked for with hasattr.
    """

    def __init__(self, modules: list[Module]):
        self.modules = modules
        used = [one for module in modules for call in module.calls for one in meanings(call.node.func, call.scope)]
        used += [one for module in modules for made in module.classes for one in bases(made)]
        self.called = {part for one in used if isinstance(one, Imported) for part in _prefixes(one.path)}
        self.assigned = {one.node.attr for module in modules for one in module.attributes if one.value is not None}
        self.assigned |= {name for module in modules for name in module.asked}
        self.configs = [names.load_config() for one in used if (names := _trainer_of(one)) is not None]

    # Names

    def of_names(self, module: Module) -> Iterator[Finding]:
        inner = {id(one.node.value) for one in module.attributes}
        for name in module.names:
            yield from self._of_import(name)
        for one in module.attributes:
            if id(one.node) not in inner and one.value is None:
                for meaning in meanings(one.node, one.scope):
                    if isinstance(meaning, Imported) and _package(meaning.path) in PACKAGES:
                        yield from self._of_import(_split(meaning.path, one.node.lineno))

    def _of_import(self, name: Name) -> Iterator[Finding]:
        """The finding on a name that is imported from a package."""
        package = _package(name.module)
        path = f"{name.module}.{name.name}".removesuffix(".")
        if package in PACKAGES:
            if name.name:
                found = self._of_trl(name, path)
                yield _if_reached(found) if name.guarded else found
            elif not _module_exists(name.module):
                found = _no_module(name)
                yield _if_reached(found) if name.guarded else found
        elif package == "unsloth":
            found = Finding(name.line, package, "refused", _UNSLOTH)
            yield _if_reached(found) if name.guarded else found
        elif name.guarded or (package == "IPython" and self.modules[0].cells):
            return
        elif not is_installed(name.module):
            what = package if not is_installed(package) else name.module
            yield Finding(name.line, what, "not installed", "The script stops at this import.")
        elif package in _CHECKED and name.name not in ("", "*") and not _may_have(name.module, name.name):
            text = f"The installed {package} has no such name, so the script stops at this import, under TRL, too."
            yield Finding(name.line, path, "refused", text)

    def _of_trl(self, name: Name, path: str) -> Finding:
        """The finding on a name of trl, or of trl_jax."""
        touched = path in self.called
        if name.name == "*":
            return Finding(name.line, path, "not known", "The names that the script takes from it are not known.")
        if _is_ours(name.module, name.name):
            if name.name in _WITH_MATH_VERIFY and not is_installed("math_verify"):
                return Finding(name.line, "math_verify", "not installed", f"{path} needs it.")
            return Finding(name.line, path, "works")
        if not _module_exists(name.module):
            return _no_module(name)
        theirs = None if spec_of("trl") is None or _package(name.module) != "trl" else has_name(name.module, name.name)
        if theirs is not False and spec_of("trl") is not None and _package(name.module) == "trl":
            if name.module.startswith("trl.experimental"):
                return Finding(name.line, path, "changed", _WITH_TORCH)
            text = "Not in trl_jax: python -m trl_jax takes it from the installed trl."
            if touched and name.name.endswith(("Callback", "Trainer")):
                text += " It is written for a torch model, and may not work with a trainer of trl_jax."
                return Finding(name.line, path, "not known", text)
            return Finding(name.line, path, "changed", text)
        if name.module.removesuffix(".trainer") in PACKAGES:
            try:
                check_not_experimental(name.name)
            except ImportError as error:
                return Finding(name.line, path, "refused", str(error))
            if name.name in NEAR:
                near = f" Closest: {NEAR[name.name]}." if NEAR[name.name] else ""
                text = f"It can be imported but not used: trl_jax does not implement it.{near}"
                return Finding(name.line, path, "refused" if touched else "changed", text)
        if spec_of("trl") is None and _package(name.module) == "trl" and name.module != "trl":
            return Finding(name.line, path, "not installed", "Not in trl_jax: it takes an installed trl.")
        known = _names() if name.module in PACKAGES else _names_of(name.module)
        close = ", ".join(difflib.get_close_matches(name.name, known, n=1))
        text = "There is no such name, so the script stops at this import"
        return Finding(name.line, path, "refused", f"{text}: did you mean {close}?" if close else f"{text}.")

    # Calls

    def of_call(self, call: Call) -> Iterator[Finding]:
        line = call.node.lineno
        for meaning in dict.fromkeys(meanings(call.node.func, call.scope)):
            names, config = _trainer_of(meaning), _config_of(meaning)
            if names is not None:
                yield from self._of_trainer(call, meaning, names)
            elif config is not None:
                yield from _of_config(call, meaning, config)
            elif meaning == Imported("transformers.TrainingArguments") and self.configs:
                yield from _of_config(call, meaning, self.configs[0])
            elif isinstance(meaning, Method) and meaning.name in (*_OF_TRAINER, *_OF_CONFIG):
                text = "Whether it is TRL's is known only when the script runs."
                yield Finding(line, f"{meaning.name}(...)", "not known", text)
            elif isinstance(meaning, Imported) and _is_foreign_trainer(meaning.path):
                text = "Another package's trainer, which is not read."
                yield Finding(line, f"{meaning.path}(...)", "not known", text)
            elif meaning in (Imported("transformers.Trainer"), Imported("transformers.Seq2SeqTrainer")):
                yield Finding(line, f"{meaning.path}(...)", "changed", "transformers' trainer: it trains with torch.")
        if any(word.arg == "quantization_config" for word in call.node.keywords):
            yield from _of_quantization(call)

    def _of_trainer(self, call: Call, meaning: Meaning, names: TrainerNames) -> Iterator[Finding]:
        trainer, name = names.load_trainer(), _short(meaning)
        signature = inspect.signature(trainer.__init__).parameters
        known, old = [one for one in signature if one != "self"], trainer._old_arguments
        of_config = {field.name for field in fields(names.load_config())}
        own_init = isinstance(meaning, Defined) and "__init__" in _methods(meaning)
        given, others = arguments_of(call.node, call.scope, [] if own_init else known)
        line = call.node.lineno
        if others:
            yield Finding(line, f"{name}(**...)", "not known", "These arguments are made when the script runs.")
        for argument, value in given.items():
            what = f"{name}({argument}=...)"
            if argument in old:
                yield Finding(line, what, "changed", f"An old name: {old[argument]}")
            elif argument in known:
                yield from _of_argument(line, what, trainer, argument, value) or [Finding(line, what, "works")]
            elif own_init:
                continue
            elif argument == "tokenizer":
                yield Finding(line, what, "changed", "An old name: pass it as processing_class.")
            elif argument in of_config or argument in RENAMED:
                text = (
                    f"Now an argument of {names.config}."
                    if argument in of_config
                    else f"An old name: {RENAMED[argument]}"
                )
                yield Finding(line, what, "changed", text)
            else:
                text = f"{name} has no argument {argument!r}: {way_out(argument, known)}"
                yield Finding(line, what, "refused", text)

    # Subclasses

    def of_class(self, made: Defined) -> Iterator[Finding]:
        """Define a subclass once per method, with that method alone."""
        names = _trainer_of(made)
        if names is None:
            return
        trainer = names.load_trainer()
        for method, node in _methods(made).items():
            what = f"{made.node.name}.{method}"
            found = _tried(node.lineno, what, partial(type, made.node.name, (trainer,), {method: lambda self: None}))
            if found.kind == "works" and "loss" in method and _uses_torch(node, made.scope.module):
                own = method == "compute_loss"
                found = Finding(
                    node.lineno, what, "changed" if own else "refused", _IN_TORCH + _IN_JAX if own else _IN_JAX
                )
            yield found

    # Attributes of trainers

    def of_attribute(self, used: Attribute) -> Iterator[Finding]:
        """Attributes of trainers that ours do not have, or do not read."""
        for meaning in dict.fromkeys(meanings(used.node.value, used.scope)):
            match meaning:
                case Made():
                    owner = meaning.by
                case Self() | Super():
                    owner = meaning.of
                case Imported() if used.value is not None:  # set on the class
                    owner = meaning
                case _:
                    continue
            if (names := _trainer_of(owner)) is None:
                continue
            if used.value is not None:
                found = _of_set(used, owner, names.load_trainer())
            elif used.node.attr in self.assigned:
                found = None
            else:
                found = _of_read(used, owner, names.load_trainer())
            if found is not None:
                yield found


def _of_set(used: Attribute, owner: Meaning, trainer: type) -> Finding | None:
    """The finding on an attribute of a trainer that the script sets."""
    name, line = used.node.attr, used.node.lineno
    what, text = f"{_short(owner)}.{name} = ...", ""
    never_called = {**trainer._never_called, **trainer._once_called}
    if name in trainer._never_read:
        text = f"trl_jax never reads it. {trainer._never_read[name]}"
    elif name in never_called:
        text = f"trl_jax never calls it. {never_called[name]}"
    return Finding(line, what, "refused", text) if text else None


def _of_read(used: Attribute, owner: Meaning, trainer: type) -> Finding | None:
    """The finding on an attribute of a trainer that the script reads, or a method that it calls."""
    name, line = used.node.attr, used.node.lineno
    own = _own_names(owner) if isinstance(owner, Defined) else set()
    if name in own or name in _attributes(trainer) or name.startswith("__"):
        return None
    what = f"{_short(owner)}.{name}"
    if "*" in own:
        return Finding(line, what, "not known", "A base class of the script's is not read, and may have it.")
    text = f"{trainer.__name__} of trl_jax has no such attribute."
    if name in trainer._never_called:
        text += f" {trainer._never_called[name]}"
    elif name.startswith("_"):
        text += " It is a private one of TRL's."
    return Finding(line, what, "refused", text)


# What names mean


def _package(path: str) -> str:
    return path.partition(".")[0]


def _prefixes(path: str) -> Iterator[str]:
    parts = path.split(".")
    return (".".join(parts[:length]) for length in range(1, len(parts) + 1))


def _short(meaning: Meaning | None) -> str:
    match meaning:
        case Imported():
            return meaning.path.rpartition(".")[2]
        case Defined(node=ast.ClassDef()):
            return meaning.node.name
    return ""


def _if_reached(found: Finding) -> Finding:
    """The finding on an import that may fail, or may not be reached."""
    if found.kind not in ("refused", "not installed"):
        return found
    return found._replace(kind="changed", text=f"If this line is reached, it fails. {found.text}")


def _split(path: str, line: int) -> Name:
    """The module and the name in a dotted path; further attributes are left out."""
    parts = path.split(".")
    length = next((size for size in range(len(parts) - 1, 0, -1) if _module_exists(".".join(parts[:size]))), 1)
    return Name(line, ".".join(parts[:length]), parts[length] if length < len(parts) else "", False)


def _module_exists(module: str) -> bool:
    """Whether trl_jax, or trl under `python -m trl_jax`, has this module."""
    if module in MODULES:
        return True
    if _package(module) == "trl_jax":
        return spec_of(module) is not None or module.replace("trl_jax", "trl", 1) in MODULES
    return spec_of(module) is not None


def _no_module(name: Name) -> Finding:
    path = f"{name.module}.{name.name}".removesuffix(".")
    if _package(name.module) == "trl" and spec_of("trl") is None:
        return Finding(name.line, path, "not installed", f"{name.module} is not in trl_jax: it takes an installed trl.")
    there = "trl_jax" if _package(name.module) == "trl_jax" else "trl_jax, nor in the installed trl"
    near = NEAR.get(name.name, "")
    text = f"There is no module {name.module} in {there}." + (f" Closest: {near}." if near else "")
    return Finding(name.line, path, "refused", text)


def _is_ours(module: str, name: str) -> bool:
    """Whether a name of trl, or of trl_jax, is trl_jax's own."""
    if _package(module) == "trl_jax":
        exists = spec_of(module) is not None or module in _FAKE_MODULES
        if not exists:
            return False
        return f"{module}.{name}" in _FAKE_MODULES or hasattr(_imported(module), name) and name not in NEAR
    return f"{module}.{name}" in MODULES or name in _names_of(module)


_FAKE_MODULES = {ours for of_module in MODULES.values() for ours in of_module}


def _imported(module: str) -> Any:
    return importlib.import_module(module)


def _names_of(module: str) -> set[str]:
    """The names of a module of trl that are trl_jax's."""
    return {name for ours in MODULES.get(module, ()) for name in public_names(_imported(ours))}


def _names() -> list[str]:
    """The public names."""
    return [name for module in MODULES["trl"] for name in _imported(module).__all__]


def _may_have(module: str, name: str) -> bool:
    if module == "transformers":
        return name in dir(transformers) or is_installed(f"{module}.{name}")
    return has_name(module, name) is not False


def _trainer_of(meaning: Meaning | None) -> TrainerNames | None:
    """The trainer of trl_jax that a class is, or is derived from."""
    return _derived(meaning, _OF_TRAINER)


def _config_of(meaning: Meaning | None) -> type | None:
    names = _derived(meaning, _OF_CONFIG)
    return None if names is None else names.load_config()


def _derived(meaning: Meaning | None, table: dict[str, TrainerNames]) -> TrainerNames | None:
    match meaning:
        case Imported() if _package(meaning.path) in PACKAGES:
            module, _, name = meaning.path.rpartition(".")
            return table.get(name) if _is_ours(module, name) else None
        case Defined(node=ast.ClassDef()):
            return next((found for base in bases(meaning) if (found := _derived_import(base, table))), None)
    return None


def _derived_import(base: Meaning, table: dict[str, TrainerNames]) -> TrainerNames | None:
    return _derived(base, table) if isinstance(base, Imported) else None


def _is_foreign_trainer(path: str) -> bool:
    return path.endswith("Trainer") and _package(path) not in (*PACKAGES, "transformers", "unsloth", "")


def _methods(made: Defined) -> dict[str, ast.FunctionDef]:
    return {one.name: one for one in made.node.body if isinstance(one, ast.FunctionDef)}


def _own_names(made: Defined) -> set[str]:
    """The names that a class of the script, or its bases of the script's, define."""
    kinds = [made, *(one for one in bases(made) if isinstance(one, Defined))]
    nodes = [node for kind in kinds for node in kind.node.body]
    named = {node.name for node in nodes if isinstance(node, ast.FunctionDef | ast.AsyncFunctionDef | ast.ClassDef)}
    targets = [target for node in nodes if isinstance(node, ast.Assign) for target in node.targets]
    targets += [node.target for node in nodes if isinstance(node, ast.AnnAssign)]
    foreign = any(not isinstance(one, Defined) and _trainer_of(one) is None for one in bases(made))
    return named | {one.id for one in targets if isinstance(one, ast.Name)} | ({"*"} if foreign else set())


def _uses_torch(node: ast.AST, module: Module) -> bool:
    scope = module.scopes.get(node, module.top)
    return any(
        isinstance(meaning, Imported) and _package(meaning.path) == "torch"
        for one in ast.walk(node)
        if isinstance(one, ast.Name)
        for meaning in meanings(one, scope)
    )


@lru_cache
def _attributes(trainer: type) -> frozenset[str]:
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


def _follow_trainers(modules: list[Module]) -> None:
    """Let the parameters that a trainer is passed to mean that trainer: of rollout functions, and of functions that
    they call."""
    calls = [call for module in modules for call in module.calls]
    for call in calls:
        for meaning in meanings(call.node.func, call.scope):
            if (names := _trainer_of(meaning)) is None:
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
            if _trainer_of(trainer) is None:
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
            method, place = _methods(function).get("__init__"), place + 1
        case Made(by=Defined(node=ast.ClassDef())):
            function, method, place = function.by, _methods(function.by).get("__call__"), place + 1
        case Method(of=(Made(by=Defined(node=ast.ClassDef())) | Self())):
            owner = function.of.by if isinstance(function.of, Made) else function.of.of
            function, method, place = owner, _methods(owner).get(function.name), place + 1
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


# Arguments of trainers


def _of_argument(line: int, what: str, trainer: type, name: str, given: Argument) -> list[Finding]:
    """Findings on an argument of a trainer whose value is refused, or cannot be judged."""
    if given.value is None:
        return []
    found: list[Finding] = []
    refused_here = inspect.signature(trainer.__init__).parameters[name].annotation == "None"
    for meaning in dict.fromkeys(meanings(given.node, given.scope)):
        text, kind = None, "refused"
        if refused_here:
            text = f"{name} is not supported by {trainer.__name__}: leave it out."
        elif name == "data_collator":
            kind, text = _of_collator(meaning, trainer)
        elif name == "optimizers":
            text = _OPTAX if _has_torch_optimizer(given) else None
        elif name == "model":
            text = _of_model(meaning, trainer)
        elif name == "reward_funcs":
            found += _of_rewards(line, meaning)
        if text is not None:
            found.append(Finding(line, what, kind, text))
        if refused_here:
            break
    return found


def _of_collator(meaning: Meaning, trainer: type) -> tuple[str, str | None]:
    own = {kind.__name__ for kind in (trainer._collator_class, trainer._vision_collator) if kind is not None}
    own |= {kind.__name__ for kind in trainer._older_collators}
    made = meaning.by if isinstance(meaning, Made) else meaning
    if made == Constant(None):
        return "works", None
    if isinstance(made, Defined):
        return "refused", OWN_COLLATOR
    if isinstance(made, Imported) and _package(made.path) in PACKAGES and _short(made) in own:
        return "works", None
    if isinstance(made, Imported):
        return "refused", f"{made.path} is not one of {', '.join(sorted(own)) or 'its collators'}. {OWN_COLLATOR}"
    return "not known", "A collate function is not called; one of TRL's collators is accepted."


def _has_torch_optimizer(given: Argument) -> bool:
    parts = [
        part
        for one in meanings(given.node, given.scope)
        if isinstance(one, Sequence)
        for item in one.items
        for part in meanings(item, one.scope)
    ]
    made = [one.by if isinstance(one, Made) else one for one in parts]
    return any(
        isinstance(one, Imported) and _package(one.path) in ("torch", "bitsandbytes", "transformers") for one in made
    )


def _of_model(meaning: Meaning, trainer: type) -> str | None:
    if not isinstance(meaning, Made):
        return None
    made = meaning.by.of if isinstance(meaning.by, Method) else meaning.by
    if isinstance(made, Defined) and isinstance(made.node, ast.ClassDef):
        roots = [one.path for one in bases(made) if isinstance(one, Imported)]
        if any(_package(root) in ("torch", "transformers", "peft") for root in roots):
            return _OWN_MODEL
    classifier = isinstance(made, Imported) and "ForSequenceClassification.from_pretrained" in made.path
    if classifier and trainer.__name__ == "RewardTrainer":
        labels = arguments_of(meaning.call, meaning.scope, [])[0].get("num_labels")
        if labels is not None and labels.value is not UNKNOWN and labels.value != 1:
            return _ONE_LABEL
    return None


def _of_rewards(line: int, meaning: Meaning) -> list[Finding]:
    """Reward functions that cannot be called with what TRL passes to them."""
    if isinstance(meaning, Sequence):
        return [
            found for item in meaning.items for one in meanings(item, meaning.scope) for found in _of_rewards(line, one)
        ]
    if not isinstance(meaning, Defined) or not isinstance(meaning.node, ast.FunctionDef):
        return []
    given = meaning.node.args
    named = {one.arg for one in (*given.args, *given.kwonlyargs)}
    if given.kwarg is not None or given.posonlyargs or {"prompts", "completions", "completion_ids"} <= named:
        return []
    name = meaning.node.name
    text = "Reward functions get prompts, completions, completion_ids and all columns by name: add **kwargs."
    return [Finding(meaning.node.lineno, f"{name}({', '.join(parameters(meaning.node))})", "refused", text)]


def _of_quantization(call: Call) -> Iterator[Finding]:
    """Models that are loaded in another format than bitsandbytes'."""
    node = next(word.value for word in call.node.keywords if word.arg == "quantization_config")
    for meaning in meanings(node, call.scope):
        made = meaning.by if isinstance(meaning, Made) else None
        if (
            isinstance(made, Imported)
            and _package(made.path) == "transformers"
            and _short(made) != "BitsAndBytesConfig"
        ):
            text = "Use a BitsAndBytesConfig, or load the model without quantization_config."
            yield Finding(call.node.lineno, f"quantization_config={_short(made)}(...)", "refused", text)


# Configs


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


def _of_config(call: Call, meaning: Meaning, config: type) -> Iterator[Finding]:
    """Construct the config once per argument whose value the script spells out, then with all of them together."""
    known, config = config, _alone(config)
    own = _own_names(meaning) if isinstance(meaning, Defined) else set()
    positional = [field.name for field in fields(known)]
    arguments, others = arguments_of(call.node, call.scope, [] if own else positional)
    line, name = call.node.lineno, _short(meaning)
    if others:
        yield Finding(line, f"{name}(**...)", "not known", "These arguments are made when the script runs.")
    arguments = {key: value for key, value in arguments.items() if key not in own}
    given = {key: one.value for key, one in arguments.items() if one.value is not UNKNOWN}
    fitting: dict[str, Any] = {}
    for argument, value in given.items():
        found = _tried(
            line, f"{name}({show(argument, value)})", partial(config, **{"output_dir": "out", argument: value})
        )
        if found.kind == "refused":
            together = _tried(line, found.what, partial(config, **{"output_dir": "out"} | given))
            found = together if together.kind != "refused" else found
            if found.kind == "changed" and argument not in found.text:  # the warning is about another argument
                found = Finding(line, found.what, "works")
        if found.kind != "refused":
            fitting[argument] = value
        yield found
    for argument in arguments.keys() - given.keys():
        yield _of_unknown_value(line, name, argument, known)
    whole = _tried(line, f"{name}(...)", partial(config, **{"output_dir": "out"} | fitting))
    if whole.kind == "refused" and not others and len(given) == len(arguments):
        yield whole
    elif whole.kind == "refused":
        yield whole._replace(kind="not known", text=f"By the values that are known here: {whole.text}")


def _of_unknown_value(line: int, config_name: str, name: str, config: type) -> Finding:
    """Check the name of an argument whose value is known only when the script runs."""
    what, known = f"{config_name}({name}=...)", {field.name for field in fields(config)}
    if name in RENAMED and name not in known:
        return Finding(line, what, "changed", f"An old name: {RENAMED[name]}")
    if name not in known:
        return Finding(line, what, "refused", f"{config.__name__} has no argument {name!r}: {way_out(name, known)}")
    declared = config.argument_table().get(name)
    if declared is not None and declared.how == "refused":
        return Finding(line, what, "changed", f"Refused unless it has its default value: {declared.why}")
    return Finding(line, what, "works")


def _tried(line: int, what: str, do: Callable[[], Any]) -> Finding:
    with warnings.catch_warnings(record=True) as told, without_launcher():
        warnings.simplefilter("always")
        try:
            do()
        except Exception as error:  # the script would get the same error, whatever it is
            return Finding(line, what, "refused", " ".join(str(error).split()))
    texts = [" ".join(str(warning.message).split()) for warning in told]
    return Finding(line, what, "changed", " ".join(dict.fromkeys(texts))) if texts else Finding(line, what, "works")
