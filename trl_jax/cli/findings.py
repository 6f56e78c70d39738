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
from trl_jax.core.trainers import EXPERIMENTAL, TRAINERS, TrainerNames
from trl_jax.trainer.overrides import NEAR, NO_COLLATOR

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
    """The finding from calling `do`: "refused" if it raises, "changed" if it warns, otherwise "works"."""
    with warnings.catch_warnings(record=True) as told, without_launcher():
        warnings.simplefilter("always")
        try:
            do()
        except Exception as error:  # the script would get the same error, whatever it is
            return Finding(line, what, "refused", " ".join(str(error).split()))
    texts = [" ".join(str(warning.message).split()) for warning in told]
    return Finding(line, what, "changed", " ".join(dict.fromkeys(texts))) if texts else Finding(line, what, "works")


# What names mean


_KNOWN = (*TRAINERS.values(), *EXPERIMENTAL.values())
OF_TRAINER = {names.trainer: names for names in _KNOWN}
OF_CONFIG = {names.config: names for names in _KNOWN}


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
        return hasattr(importlib.import_module(module), name)  # our modules load names when they are asked for
    except ImportError:  # the module only exists under trl's name
        return False


_REPLACING = {ours for of_module in MODULES.values() for ours in of_module}


def names_of(module: str) -> set[str]:
    """The names in a module of trl that trl_jax provides."""
    return {name for ours in MODULES.get(module, ()) for name in public_names(importlib.import_module(ours))}


def public() -> list[str]:
    """The public names of trl_jax."""
    return [name for module in MODULES["trl"] for name in importlib.import_module(module).__all__]


def trainer_of(meaning: Meaning | None) -> TrainerNames | None:
    """The trainer of trl_jax that a class is, or derives from."""
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


def defined_names(made: Defined) -> set[str]:
    """The names that a class of the script and its bases in the script define, and "*" if another base may define
    more."""
    kinds = [made, *(one for one in bases(made) if isinstance(one, Defined))]
    nodes = [node for kind in kinds for node in kind.node.body]
    named = {node.name for node in nodes if isinstance(node, ast.FunctionDef | ast.AsyncFunctionDef | ast.ClassDef)}
    targets = [target for node in nodes if isinstance(node, ast.Assign) for target in node.targets]
    targets += [node.target for node in nodes if isinstance(node, ast.AnnAssign)]
    foreign = any(not isinstance(one, Defined) and trainer_of(one) is None for one in bases(made))
    return named | {one.id for one in targets if isinstance(one, ast.Name)} | ({"*"} if foreign else set())


@lru_cache
def attributes_of(trainer: type) -> frozenset[str]:
    """The attributes of a trainer: class attributes, and instance attributes that its methods set."""
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
    return frozenset(found - trainer._never_there.keys())


def follow_trainers(modules: list[Module]) -> None:
    """Bind parameters that receive a trainer to that trainer, in rollout functions and in what they call."""
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
    """If a call passes a trainer, bind the parameter of the called function to it."""
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
    """Bind a parameter of a function of the script to `made`.

    Args:
        place: its index among the positional arguments; -1 if it is passed by name.
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


# What installed packages contain, read from their source without importing them


def is_installed(module: str) -> bool:
    """Whether a module can be found. It is not imported."""
    package = module.partition(".")[0]
    return package in sys.stdlib_module_names or package in sys.builtin_module_names or spec_of(module) is not None


@lru_cache
def names_in(module: str) -> frozenset[str] | None:
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
                names |= {one.id for target in node.targets for one in ast.walk(target) if isinstance(one, ast.Name)}
            case ast.AnnAssign() if isinstance(node.target, ast.Name):
                names.add(node.target.id)
            case ast.If() | ast.Try() | ast.TryStar() | ast.With() | ast.For() | ast.ExceptHandler():
                pending += ast.iter_child_nodes(node)
    return frozenset(names)


def has_name(module: str, name: str) -> bool | None:
    """Whether a module has this name or a submodule of this name; None if its source does not determine it."""
    if spec_of(f"{module}.{name}") is not None:
        return True
    names = names_in(module)
    return None if names is None else name in names


def _source(module: str) -> ast.Module | None:
    spec = spec_of(module)
    if spec is None or spec.origin is None or not spec.origin.endswith(".py"):
        return None
    return ast.parse(Path(spec.origin).read_text(encoding="utf-8"))


_FOR_MODELS = (
    "A model class of the script's own is not supported. Use one of transformers' classes, and put the difference into "
    "compute_loss."
)
_ONE_LABEL = "A reward model gives one score per text: load it with num_labels=1, or pass its name."
_ON_ONE_DEVICE = "On one device:"
_OPTAX = (
    "Pass an optax transformation, torch's AdamW, Adam or SGD with the parameters of the torch model that is passed, "
    "or name the optimizer in the arguments: optim='adamw_torch'."
)
_OF_IMAGES = re.compile("image|pixel|vision|processor")
TORCH_OPTIMIZERS = ("AdamW", "Adam", "SGD")

# Arguments of trainers


def of_argument(line: int, what: str, trainer: type, name: str, given: Argument) -> list[Finding]:
    """Findings on an argument of a trainer whose value is refused, or cannot be judged."""
    if given.value is None:
        return []
    if given.value is ...:
        return [Finding(line, what, "refused", "The script leaves it open: it passes `...`.")]
    found: list[Finding] = []
    refused_here = inspect.signature(trainer.__init__).parameters[name].annotation == "None"
    if name in trainer._idle_arguments and given.value is UNKNOWN:
        return [Finding(line, what, "changed", trainer._idle_arguments[name])]
    for meaning in dict.fromkeys(meanings(given.node, given.scope)):
        text, kind = None, "refused"
        if refused_here:
            text = f"{name} is not supported by {trainer.__name__}: leave it out."
        elif name == "data_collator":
            kind, text = _of_collator(meaning, trainer)
        elif name == "optimizers":
            text = _OPTAX if _has_other_optimizer(given) else None
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
    own |= set(trainer._older_collators)
    made = meaning.by if isinstance(meaning, Made) else meaning
    if made == Constant(None):
        return "works", None
    of_script = isinstance(made, Defined) and not _OF_IMAGES.search(ast.unparse(made.node))
    of_transformers = isinstance(made, Imported) and package_of(made.path) == "transformers"
    converted = short(made) == "DataCollatorForSeq2Seq"
    if trainer._may_call_collator and (of_script or (of_transformers and not converted)):
        return "changed", (
            "It is called for each row on its own, before training, and returns input_ids, labels and attention_mask. "
            "The run stops at once if a row's ids or labels depend on other rows or on chance, as with mlm=True."
        )
    if isinstance(made, Defined):
        return "refused", NO_COLLATOR
    homes = {"transformers"} if converted else PACKAGES
    if isinstance(made, Imported) and package_of(made.path) in homes and short(made) in own:
        return "works", None
    if isinstance(made, Imported):
        return "refused", f"{made.path} is not one of {', '.join(sorted(own)) or 'its collators'}. {NO_COLLATOR}"
    return "not known", "One of TRL's collators is accepted."


def _has_other_optimizer(given: Argument) -> bool:
    """Whether `optimizers` has one of torch's or transformers' that is not accepted."""
    parts = [
        part
        for one in meanings(given.node, given.scope)
        if isinstance(one, Sequence)
        for item in one.items
        for part in meanings(item, one.scope)
    ]
    made = [one.by if isinstance(one, Made) else one for one in parts]
    return any(
        isinstance(one, Imported)
        and package_of(one.path) in ("torch", "bitsandbytes", "transformers")
        and not (one.path.startswith("torch.optim.") and short(one) in TORCH_OPTIMIZERS)
        and not short(one).startswith("get_")  # a schedule
        and not one.path.startswith("torch.optim.lr_scheduler.")
        for one in made
    )


def _of_model(meaning: Meaning, trainer: type) -> str | None:
    if not isinstance(meaning, Made):
        return None
    made = meaning.by.of if isinstance(meaning.by, Method) else meaning.by
    if isinstance(made, Defined) and isinstance(made.node, ast.ClassDef):
        roots = [one.path for one in bases(made) if isinstance(one, Imported)]
        if any(package_of(root) in ("torch", "transformers", "peft") for root in roots):
            return _FOR_MODELS
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


def of_quantization(call: Call) -> Iterator[Finding]:
    """Models that are loaded in a format that cannot be trained: all but bitsandbytes' and dequantized MXFP4."""
    node = next(word.value for word in call.node.keywords if word.arg == "quantization_config")
    for meaning in meanings(node, call.scope):
        made = meaning.by if isinstance(meaning, Made) else None
        name = short(made)
        if (
            not isinstance(made, Imported)
            or package_of(made.path) != "transformers"
            or name in ("BitsAndBytesConfig", "")
        ):
            continue
        kind, text = "refused", "Use a BitsAndBytesConfig, or load the model without quantization_config."
        if name == "Mxfp4Config":
            given = [word.value for word in meaning.call.keywords if word.arg == "dequantize"]
            value = value_of(given[0], meaning.scope) if given else False
            if value is True:
                continue
            kind, text = "not known" if value is UNKNOWN else "refused", "Training requires dequantize=True."
        yield Finding(call.node.lineno, f"quantization_config={name}(...)", kind, text)


# Configs


_SIZES = frozenset(
    "num_generations num_generations_eval generation_batch_size steps_per_generation per_device_train_batch_size "
    "per_device_eval_batch_size gradient_accumulation_steps".split()
)


def _without_devices(config: type, *, sized: bool) -> type:
    """The same config class, except that it neither joins other processes nor asks JAX for devices.

    The number of devices is not known here. Batch sizes that depend on it are refused only if they fit neither one
    device nor num_generations devices.

    Args:
        sized: whether all sizes that the script passes are known; if not, they are not compared.
    """

    def resolve_sizes(self: Any) -> None:
        given = dict(vars(self))
        try:
            config.resolve_sizes(self)
        except ValueError as error:
            if not sized:
                vars(self).update(given)
                return
            if "num_generations" not in given:
                raise
            devices = self.num_generations
            vars(self).update(given, _devices=devices)
            with contextlib.suppress(ValueError):
                config.resolve_sizes(self)
                warnings.warn(f"{_ON_ONE_DEVICE} {error} It fits {devices} devices.", stacklevel=2)
                return
            raise

    own = {
        "join_processes": lambda self: None,
        "resolve_sizes": resolve_sizes,
        "_devices": 1,
        "data_parallel_size": property(lambda self: self._devices),
    }
    return type(config.__name__, (config,), own)


def of_config(call: Call, meaning: Meaning, config: type) -> Iterator[Finding]:
    """Construct the config once per argument whose value the script spells out, then with all of them together."""
    own = defined_names(meaning) if isinstance(meaning, Defined) else set()
    positional = [field.name for field in fields(config)]
    arguments, others = arguments_of(call.node, call.scope, [] if own else positional)
    line, name = call.node.lineno, short(meaning)
    open_sizes = others or any(one.value is UNKNOWN for key, one in arguments.items() if key in _SIZES)
    known, config = config, _without_devices(config, sized=not open_sizes)
    if others:
        yield Finding(line, f"{name}(**...)", "not known", "These arguments are made when the script runs.")
    arguments = {key: value for key, value in arguments.items() if key not in own}
    given = {key: one.value for key, one in arguments.items() if one.value is not UNKNOWN}
    fitting: dict[str, Any] = {}
    for argument, value in given.items():
        found = tried(
            line, f"{name}({show(argument, value)})", partial(config, **{"output_dir": "out", argument: value})
        )
        if found.kind == "refused" or _ON_ONE_DEVICE in found.text:
            together = tried(line, found.what, partial(config, **{"output_dir": "out"} | given))
            found = together if together.kind != "refused" else found
            if found.kind == "changed" and argument not in found.text:  # the warning is about another argument
                found = Finding(line, found.what, "works")
        if found.kind != "refused":
            fitting[argument] = value
        yield found._replace(kind="works", text="") if _ON_ONE_DEVICE in found.text else found
    for argument in arguments.keys() - given.keys():
        yield _of_unknown_value(line, name, argument, known)
    whole = tried(line, f"{name}(...)", partial(config, **{"output_dir": "out"} | fitting))
    if _ON_ONE_DEVICE in whole.text:
        yield whole._replace(kind="not known", text=whole.text[whole.text.index(_ON_ONE_DEVICE) :])
    elif whole.kind == "refused" and not others and len(given) == len(arguments):
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
