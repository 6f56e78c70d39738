"""Look up a script's names, attributes and arguments in trl_jax, and report whether they work."""

from __future__ import annotations

import ast
import contextlib
import importlib
import inspect
import re
import sys
import textwrap
import warnings
from collections.abc import Callable, Iterator
from dataclasses import fields
from functools import lru_cache, partial
from pathlib import Path
from typing import Any, Literal, NamedTuple

from trl_jax.cli.reading import (
    UNKNOWN,
    Argument,
    Binding,
    Call,
    CallResult,
    Constant,
    Defined,
    Imported,
    Meaning,
    Method,
    Module,
    Name,
    Self,
    Sequence,
    Unknown,
    arguments_of,
    bases,
    meanings,
    parameters,
    value_of,
)
from trl_jax.cli.trl_alias import MODULES, public_names, spec_of
from trl_jax.config.devices import without_launcher
from trl_jax.config.renamed import RENAMED, way_out
from trl_jax.config.rules import show
from trl_jax.core.trainers import EXPERIMENTAL, NEAR, TRAINERS, TrainerNames
from trl_jax.trainer.collators import NO_COLLATOR

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


def try_call(line: int, what: str, action: Callable[[], Any]) -> Finding:
    """The finding from calling `action`: "refused" if it raises, "changed" if it warns, otherwise "works"."""
    with warnings.catch_warnings(record=True) as caught, without_launcher():
        warnings.simplefilter("always")
        try:
            action()
        except Exception as error:  # the script would get the same error, whatever it is
            return Finding(line, what, "refused", " ".join(str(error).split()))
    texts = [" ".join(str(warning.message).split()) for warning in caught]
    return Finding(line, what, "changed", " ".join(dict.fromkeys(texts))) if texts else Finding(line, what, "works")


# What names mean


_KNOWN = (*TRAINERS.values(), *EXPERIMENTAL.values())
BY_TRAINER = {names.trainer: names for names in _KNOWN}
BY_CONFIG = {names.config: names for names in _KNOWN}


def package_of(path: str) -> str:
    return path.partition(".")[0]


def prefixes(path: str) -> Iterator[str]:
    """`a`, `a.b` and `a.b.c` for `a.b.c`."""
    parts = path.split(".")
    return (".".join(parts[:length]) for length in range(1, len(parts) + 1))


def short_name(meaning: Meaning | None) -> str:
    """The name of a class, without its module."""
    match meaning:
        case Imported():
            return meaning.path.rpartition(".")[2]
        case Defined(node=ast.ClassDef()):
            return meaning.node.name
    return ""


def split_path(path: str, line: int) -> Name:
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


def is_provided(module: str, name: str) -> bool:
    """Whether a name of trl, or of trl_jax, is trl_jax's own."""
    if package_of(module) == "trl":
        return f"{module}.{name}" in MODULES or name in provided_names(module)
    if name in NEAR or not module_exists(module):
        return False
    if f"{module}.{name}" in _REPLACING:
        return True
    try:
        return hasattr(importlib.import_module(module), name)  # our modules load names when they are asked for
    except ImportError:  # the module only exists under trl's name
        return False


_REPLACING = {ours for of_module in MODULES.values() for ours in of_module}


def provided_names(module: str) -> set[str]:
    """The names in a module of trl that trl_jax provides."""
    return {name for ours in MODULES.get(module, ()) for name in public_names(importlib.import_module(ours))}


def public_api() -> list[str]:
    """The public names of trl_jax."""
    return [name for module in MODULES["trl"] for name in importlib.import_module(module).__all__]


def trainer_of(meaning: Meaning | None) -> TrainerNames | None:
    """The trainer of trl_jax that a class is, or derives from."""
    return _lookup(meaning, BY_TRAINER)


def config_of(meaning: Meaning | None) -> type | None:
    names = _lookup(meaning, BY_CONFIG)
    return None if names is None else names.load_config()


def _lookup(meaning: Meaning | None, table: dict[str, TrainerNames]) -> TrainerNames | None:
    match meaning:
        case Imported() if package_of(meaning.path) in PACKAGES:
            module, _, name = meaning.path.rpartition(".")
            return table.get(name) if is_provided(module, name) else None
        case Defined(node=ast.ClassDef()):
            imported = (_lookup(base, table) for base in bases(meaning) if isinstance(base, Imported))
            return next(filter(None, imported), None)
    return None


def methods(definition: Defined) -> dict[str, ast.FunctionDef]:
    return {node.name: node for node in definition.node.body if isinstance(node, ast.FunctionDef)}


def defined_names(definition: Defined) -> set[str]:
    """The names that a class of the script and its bases in the script define, and "*" if another base may define
    more."""
    classes = [definition, *(base for base in bases(definition) if isinstance(base, Defined))]
    nodes = [node for cls in classes for node in cls.node.body]
    names = {node.name for node in nodes if isinstance(node, ast.FunctionDef | ast.AsyncFunctionDef | ast.ClassDef)}
    targets = [target for node in nodes if isinstance(node, ast.Assign) for target in node.targets]
    targets += [node.target for node in nodes if isinstance(node, ast.AnnAssign)]
    foreign = any(not isinstance(base, Defined) and trainer_of(base) is None for base in bases(definition))
    return names | {target.id for target in targets if isinstance(target, ast.Name)} | ({"*"} if foreign else set())


@lru_cache
def attributes_of(trainer: type) -> frozenset[str]:
    """The attributes of a trainer: class attributes, and instance attributes that its methods set."""
    names = set(dir(trainer))
    for cls in trainer.__mro__:
        if cls.__module__.startswith("trl_jax"):
            names |= vars(cls).get("__annotations__", {}).keys()
            tree = ast.parse(textwrap.dedent(inspect.getsource(cls)))
            names |= {
                node.attr
                for node in ast.walk(tree)
                if isinstance(node, ast.Attribute)
                and isinstance(node.ctx, ast.Store)
                and isinstance(node.value, ast.Name)
                and node.value.id == "self"
            }
    return frozenset(names - trainer._traits.refused.never_there.keys())


def bind_trainers(modules: list[Module]) -> None:
    """Bind parameters that receive a trainer to that trainer, in rollout functions and in what they call."""
    calls = [call for module in modules for call in module.calls]
    for call in calls:
        for meaning in meanings(call.node.func, call.scope):
            if (names := trainer_of(meaning)) is None:
                continue
            trainer = CallResult(meaning, call.node, call.scope)
            signature = inspect.signature(names.load_trainer().__init__)
            arguments, _ = arguments_of(call.node, call.scope, list(signature.parameters)[1:])
            if (argument := arguments.get("rollout_func")) is not None:
                for function in meanings(argument.node, argument.scope):
                    _bind_parameter(function, 1, "trainer", trainer)
    for _ in range(3):  # functions that call functions
        for call in calls:
            _bind_passed_trainers(call)


def _bind_passed_trainers(call: Call) -> None:
    """If a call passes a trainer, bind the parameter of the called function to it."""
    arguments: list[tuple[int, str, ast.expr]] = [(index, "", node) for index, node in enumerate(call.node.args)]
    arguments += [(-1, keyword.arg, keyword.value) for keyword in call.node.keywords if keyword.arg]
    for index, name, node in arguments:
        if not isinstance(node, ast.Name):
            continue
        for passed in meanings(node, call.scope):
            if isinstance(passed, Self):
                passed = CallResult(passed.owner, call.node, call.scope)
            if not isinstance(passed, CallResult) or trainer_of(passed.callee) is None:
                continue
            for function in meanings(call.node.func, call.scope):
                _bind_parameter(function, index, name, passed)


def _bind_parameter(function: Meaning, index: int, name: str, value: CallResult) -> None:
    """Bind a parameter of a function of the script to `value`.

    Args:
        index: its index among the positional arguments; -1 if it is passed by name.
    """
    match function:
        case Defined(node=ast.ClassDef()):
            method, index = methods(function).get("__init__"), index + 1
        case CallResult(callee=Defined(node=ast.ClassDef())):
            function, method, index = function.callee, methods(function.callee).get("__call__"), index + 1
        case Method(owner=(CallResult(callee=Defined(node=ast.ClassDef())) | Self())):
            owner = function.owner.callee if isinstance(function.owner, CallResult) else function.owner.owner
            function, method, index = owner, methods(owner).get(function.name), index + 1
        case Defined():
            method = function.node
        case _:
            return
    scope = None if method is None else function.scope.module.scopes.get(method)
    if scope is None:
        return
    positional = parameters(method)
    if name not in scope.bindings and 0 <= index < len(positional):
        name = positional[index]
    if not scope.bindings.get(name) or not isinstance(scope.bindings[name][0].value, Unknown):
        return
    scope.bindings[name][0] = Binding(0, value, scope, False)


# What installed packages contain, read from their source without importing them


def is_installed(module: str) -> bool:
    """Whether a module can be found. It is not imported."""
    package = module.partition(".")[0]
    return package in sys.stdlib_module_names or package in sys.builtin_module_names or spec_of(module) is not None


@lru_cache
def module_names(module: str) -> frozenset[str] | None:
    """The names that a module defines or imports; None if its source is not available or does not determine them."""
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
                children = [child for target in node.targets for child in ast.walk(target)]
                names |= {child.id for child in children if isinstance(child, ast.Name)}
            case ast.AnnAssign() if isinstance(node.target, ast.Name):
                names.add(node.target.id)
            case ast.If() | ast.Try() | ast.TryStar() | ast.With() | ast.For() | ast.ExceptHandler():
                pending += ast.iter_child_nodes(node)
    return frozenset(names)


def has_name(module: str, name: str) -> bool | None:
    """Whether a module has this name or a submodule of this name; None if its source does not determine it."""
    if spec_of(f"{module}.{name}") is not None:
        return True
    names = module_names(module)
    return None if names is None else name in names


def _source(module: str) -> ast.Module | None:
    spec = spec_of(module)
    if spec is None or spec.origin is None or not spec.origin.endswith(".py"):
        return None
    return ast.parse(Path(spec.origin).read_text(encoding="utf-8"))


_OWN_MODEL_CLASS = (
    "A model class of the script's own is not supported. Use one of transformers' classes, and put the difference into "
    "compute_loss."
)
_ONE_LABEL = "A reward model gives one score per text: load it with num_labels=1, or pass its name."
_ON_ONE_DEVICE = "On one device:"
_OPTAX = (
    "Pass an optax transformation, torch's AdamW, Adam or SGD with the parameters of the torch model that is passed, "
    "or name the optimizer in the arguments: optim='adamw_torch'."
)
_IMAGE_WORDS = re.compile("image|pixel|vision|processor")
TORCH_OPTIMIZERS = ("AdamW", "Adam", "SGD")

# Arguments of trainers


def argument_findings(line: int, what: str, trainer: type, name: str, argument: Argument) -> list[Finding]:
    """Findings on an argument of a trainer whose value is refused, or cannot be judged."""
    if argument.value is None:
        return []
    if argument.value is ...:
        return [Finding(line, what, "refused", "The script leaves it open: it passes `...`.")]
    findings: list[Finding] = []
    refused_here = inspect.signature(trainer.__init__).parameters[name].annotation == "None"
    idle_arguments = trainer._traits.idle_arguments
    if name in idle_arguments and argument.value is UNKNOWN:
        return [Finding(line, what, "changed", idle_arguments[name])]
    for meaning in dict.fromkeys(meanings(argument.node, argument.scope)):
        text, kind = None, "refused"
        if refused_here:
            text = f"{name} is not supported by {trainer.__name__}: leave it out."
        elif name == "data_collator":
            kind, text = _collator_verdict(meaning, trainer)
        elif name == "optimizers":
            text = _OPTAX if _has_other_optimizer(argument) else None
        elif name == "model":
            text = _model_refusal(meaning, trainer)
        elif name == "reward_funcs":
            findings += _reward_function_findings(line, meaning)
        if text is not None:
            findings.append(Finding(line, what, kind, text))
        if refused_here:
            break
    return findings


def _collator_verdict(meaning: Meaning, trainer: type) -> tuple[str, str | None]:
    collators = trainer._traits.collators
    accepted = {cls.__name__ for cls in collators.classes} | {*collators.older}
    collator = meaning.callee if isinstance(meaning, CallResult) else meaning
    if collator == Constant(None):
        return "works", None
    from_script = isinstance(collator, Defined) and not _IMAGE_WORDS.search(ast.unparse(collator.node))
    from_transformers = isinstance(collator, Imported) and package_of(collator.path) == "transformers"
    converted = short_name(collator) == "DataCollatorForSeq2Seq"
    if collators.calls_others and (from_script or (from_transformers and not converted)):
        return "changed", (
            "It is called for each row on its own, before training, and returns input_ids, labels and attention_mask. "
            "The run stops at once if a row's ids or labels depend on other rows or on chance, as with mlm=True."
        )
    if isinstance(collator, Defined):
        return "refused", NO_COLLATOR
    packages = {"transformers"} if converted else PACKAGES
    if isinstance(collator, Imported) and package_of(collator.path) in packages and short_name(collator) in accepted:
        return "works", None
    if isinstance(collator, Imported):
        names = ", ".join(sorted(accepted)) or "its collators"
        return "refused", f"{collator.path} is not one of {names}. {NO_COLLATOR}"
    return "not known", "One of TRL's collators is accepted."


def _has_other_optimizer(argument: Argument) -> bool:
    """Whether `optimizers` has one of torch's or transformers' that is not accepted."""
    parts = [
        part
        for sequence in meanings(argument.node, argument.scope)
        if isinstance(sequence, Sequence)
        for item in sequence.items
        for part in meanings(item, sequence.scope)
    ]
    callees = [part.callee if isinstance(part, CallResult) else part for part in parts]
    return any(
        isinstance(callee, Imported)
        and package_of(callee.path) in ("torch", "bitsandbytes", "transformers")
        and not (callee.path.startswith("torch.optim.") and short_name(callee) in TORCH_OPTIMIZERS)
        and not short_name(callee).startswith("get_")  # a schedule
        and not callee.path.startswith("torch.optim.lr_scheduler.")
        for callee in callees
    )


def _model_refusal(meaning: Meaning, trainer: type) -> str | None:
    if not isinstance(meaning, CallResult):
        return None
    callee = meaning.callee.owner if isinstance(meaning.callee, Method) else meaning.callee
    if isinstance(callee, Defined) and isinstance(callee.node, ast.ClassDef):
        roots = [base.path for base in bases(callee) if isinstance(base, Imported)]
        if any(package_of(root) in ("torch", "transformers", "peft") for root in roots):
            return _OWN_MODEL_CLASS
    classifier = isinstance(callee, Imported) and "ForSequenceClassification.from_pretrained" in callee.path
    if classifier and trainer.__name__ == "RewardTrainer":
        labels = arguments_of(meaning.call, meaning.scope, [])[0].get("num_labels")
        if labels is not None and labels.value is not UNKNOWN and labels.value != 1:
            return _ONE_LABEL
    return None


def _reward_function_findings(line: int, meaning: Meaning) -> list[Finding]:
    """Reward functions that cannot be called with what TRL passes to them."""
    if isinstance(meaning, Sequence):
        functions = [function for item in meaning.items for function in meanings(item, meaning.scope)]
        return [finding for function in functions for finding in _reward_function_findings(line, function)]
    if not isinstance(meaning, Defined) or not isinstance(meaning.node, ast.FunctionDef):
        return []
    arguments = meaning.node.args
    names = {parameter.arg for parameter in (*arguments.args, *arguments.kwonlyargs)}
    if arguments.kwarg is not None or arguments.posonlyargs or {"prompts", "completions", "completion_ids"} <= names:
        return []
    name = meaning.node.name
    text = "Reward functions get prompts, completions, completion_ids and all columns by name: add **kwargs."
    return [Finding(meaning.node.lineno, f"{name}({', '.join(parameters(meaning.node))})", "refused", text)]


def quantization_findings(call: Call) -> Iterator[Finding]:
    """Models that are loaded in a format that cannot be trained: all but bitsandbytes' and dequantized MXFP4."""
    node = next(keyword.value for keyword in call.node.keywords if keyword.arg == "quantization_config")
    for meaning in meanings(node, call.scope):
        callee = meaning.callee if isinstance(meaning, CallResult) else None
        name = short_name(callee)
        if (
            not isinstance(callee, Imported)
            or package_of(callee.path) != "transformers"
            or name in ("BitsAndBytesConfig", "")
        ):
            continue
        kind, text = "refused", "Use a BitsAndBytesConfig, or load the model without quantization_config."
        if name == "Mxfp4Config":
            dequantize = [keyword.value for keyword in meaning.call.keywords if keyword.arg == "dequantize"]
            value = value_of(dequantize[0], meaning.scope) if dequantize else False
            if value is True:
                continue
            kind, text = "not known" if value is UNKNOWN else "refused", "Training requires dequantize=True."
        yield Finding(call.node.lineno, f"quantization_config={name}(...)", kind, text)


# Configs


_SIZES = frozenset(
    "num_generations num_generations_eval generation_batch_size steps_per_generation per_device_train_batch_size "
    "per_device_eval_batch_size gradient_accumulation_steps".split()
)


def _deviceless(config: type, *, sized: bool) -> type:
    """The same config class, except that it neither joins other processes nor asks JAX for devices.

    The number of devices is not known here. Batch sizes that depend on it are refused only if they fit neither one
    device nor num_generations devices.

    Args:
        sized: whether all sizes that the script passes are known; if not, they are not compared.
    """

    def resolve_sizes(self: Any) -> None:
        attributes = dict(vars(self))
        try:
            config.resolve_sizes(self)
        except ValueError as error:
            if not sized:
                vars(self).update(attributes)
                return
            if "num_generations" not in attributes:
                raise
            devices = self.num_generations
            vars(self).update(attributes, _devices=devices)
            with contextlib.suppress(ValueError):
                config.resolve_sizes(self)
                warnings.warn(f"{_ON_ONE_DEVICE} {error} It fits {devices} devices.", stacklevel=2)
                return
            raise

    overrides = {
        "join_processes": lambda self: None,
        "resolve_sizes": resolve_sizes,
        "_devices": 1,
        "data_parallel_size": property(lambda self: self._devices),
    }
    return type(config.__name__, (config,), overrides)


def config_findings(call: Call, meaning: Meaning, config: type) -> Iterator[Finding]:
    """Construct the config once per argument whose value the script spells out, then with all of them together."""
    defined = defined_names(meaning) if isinstance(meaning, Defined) else set()
    positional = [field.name for field in fields(config)]
    arguments, has_unknown = arguments_of(call.node, call.scope, [] if defined else positional)
    line, name = call.node.lineno, short_name(meaning)
    open_sizes = has_unknown or any(item.value is UNKNOWN for key, item in arguments.items() if key in _SIZES)
    deviceless = _deviceless(config, sized=not open_sizes)
    if has_unknown:
        yield Finding(line, f"{name}(**...)", "not known", "These arguments are made when the script runs.")
    arguments = {key: value for key, value in arguments.items() if key not in defined}
    known_values = {key: item.value for key, item in arguments.items() if item.value is not UNKNOWN}
    accepted: dict[str, Any] = {}
    for argument, value in known_values.items():
        finding = try_call(
            line, f"{name}({show(argument, value)})", partial(deviceless, **{"output_dir": "out", argument: value})
        )
        if finding.kind == "refused" or _ON_ONE_DEVICE in finding.text:
            together = try_call(line, finding.what, partial(deviceless, **{"output_dir": "out"} | known_values))
            finding = together if together.kind != "refused" else finding
            if finding.kind == "changed" and argument not in finding.text:  # the warning is about another argument
                finding = Finding(line, finding.what, "works")
        if finding.kind != "refused":
            accepted[argument] = value
        yield finding._replace(kind="works", text="") if _ON_ONE_DEVICE in finding.text else finding
    for argument in [name for name in arguments if name not in known_values]:  # in the order of the script
        yield _unknown_value_finding(line, name, argument, config)
    combined = try_call(line, f"{name}(...)", partial(deviceless, **{"output_dir": "out"} | accepted))
    if _ON_ONE_DEVICE in combined.text:
        yield combined._replace(kind="not known", text=combined.text[combined.text.index(_ON_ONE_DEVICE) :])
    elif combined.kind == "refused" and not has_unknown and len(known_values) == len(arguments):
        yield combined
    elif combined.kind == "refused":
        yield combined._replace(kind="not known", text=f"By the values that are known here: {combined.text}")


def _unknown_value_finding(line: int, config_name: str, name: str, config: type) -> Finding:
    """Check the name of an argument whose value is known only when the script runs."""
    what, names = f"{config_name}({name}=...)", {field.name for field in fields(config)}
    if name in RENAMED and name not in names:
        return Finding(line, what, "changed", f"An old name: {RENAMED[name]}")
    if name not in names:
        return Finding(line, what, "refused", f"{config.__name__} has no argument {name!r}: {way_out(name, names)}")
    declared = config.argument_table().get(name)
    if declared is not None and declared.how == "refused":
        return Finding(line, what, "changed", f"Refused unless it has its default value: {declared.why}")
    return Finding(line, what, "works")
