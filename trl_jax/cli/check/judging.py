"""Judges a script's names, arguments and methods, by doing on nothing what the script does with them."""

from __future__ import annotations

import contextlib
import importlib
import inspect
import warnings
from collections.abc import Callable, Iterator
from dataclasses import fields
from functools import partial
from importlib.util import find_spec
from typing import Any, Literal, NamedTuple

from trl_jax.cli.check.reading import PACKAGES, UNKNOWN, Call, Name, Subclass, Uses
from trl_jax.cli.front import MODULES
from trl_jax.core.arguments.renamed import RENAMED, way_out
from trl_jax.core.arguments.values import show
from trl_jax.core.trainers import TRAINERS, TrainerNames
from trl_jax.run.arguments.launchers import no_launcher
from trl_jax.trainer.not_built import NEAR


class Finding(NamedTuple):
    """The verdict on one thing. `text`: how it is "changed", or why it is "refused" and what to write."""

    line: int
    what: str
    kind: Literal["works", "changed", "refused"]
    text: str = ""


_OF_TRAINER = {names.trainer: names for names in TRAINERS.values()}
_OF_CONFIG = {names.config: names for names in TRAINERS.values()}
_IN_JAX = "Write it in jax.numpy: it is compiled with the model and its gradient."
_IN_TORCH = "It is in torch, which gets the outputs of each batch and gives their gradient. "


def findings(uses: Uses) -> list[Finding]:
    """All findings, in the order of lines."""
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
        near = f" Near it: {NEAR[name.name]}." if NEAR[name.name] else ""
        kind = "refused" if touched else "changed"
        return Finding(name.line, what, kind, f"It can be imported, but not used: it is not built.{near}")
    own = [name.module] if name.module.partition(".")[0] == "trl_jax" else []
    modules = (*MODULES["trl"], *MODULES.get(name.module, ()), *own)
    if any(hasattr(importlib.import_module(module), name.name) for module in modules if find_spec(module)):
        return Finding(name.line, what, "works")
    if name.module in ("trl", "trl_jax"):
        return Finding(name.line, what, "refused", f"There is no such name: {way_out(name.name, _names())}")
    text = "Not in trl_jax: under python -m trl_jax it is the installed trl's."
    return Finding(name.line, what, "changed", text)


def _names() -> list[str]:
    """The public names."""
    return [name for module in MODULES["trl"] for name in importlib.import_module(module).__all__]


def _alone(config: type) -> type:
    """The same config, which neither joins other processes nor asks JAX for devices.

    How many devices the run has is not known here. Sizes that depend on it are refused only if they fit neither one
    device nor as many as a prompt has completions.
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
    """Construct the config with each argument whose value is written in the script."""
    known, config = config, _alone(config)
    given = {name: value for name, value in call.arguments.items() if value is not UNKNOWN}
    fitting: dict[str, Any] = {}
    for name, value in given.items():
        alone = {"output_dir": "out", name: value}
        found = _tried(call.line, f"{call.name}({show(name, value)})", partial(config, **alone))
        if found.kind == "refused":
            together = _tried(call.line, found.what, partial(config, **{"output_dir": "out"} | given))
            found = together if together.kind != "refused" else found
            if found.kind == "changed" and name not in found.text:  # it is told of another argument
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
    """An argument whose value only a run would know: whether there is one of that name."""
    what, known = f"{call.name}({name}=...)", {field.name for field in fields(config)}
    if name in RENAMED and name not in known:
        return Finding(call.line, what, "changed", f"An old name: {RENAMED[name]}")
    if name not in known:
        text = f"{config.__name__} has no argument {name!r}: {way_out(name, known)}"
        return Finding(call.line, what, "refused", text)
    line = config.argument_table.get(name)
    if line is not None and line.kind == "refused":
        return Finding(call.line, what, "changed", f"Refused, unless it is the default: {line.text}")
    return Finding(call.line, what, "works")


def _of_trainer(call: Call, names: TrainerNames) -> Iterator[Finding]:
    trainer = names.load_trainer()
    known, old = inspect.signature(trainer.__init__).parameters, trainer._old_arguments
    of_config = {field.name for field in fields(names.load_config())}
    for name in call.arguments:
        what = f"{call.name}({name}=...)"
        if name in old:
            yield Finding(call.line, what, "changed", f"An old name: {old[name]}")
        elif name in known:
            yield Finding(call.line, what, "works")
        elif name == "tokenizer":
            yield Finding(call.line, what, "changed", "An old name: pass it as processing_class.")
        elif name in of_config or name in RENAMED:
            text = f"An argument of {names.config} now." if name in of_config else f"An old name: {RENAMED[name]}"
            yield Finding(call.line, what, "changed", text)
        else:
            yield Finding(call.line, what, "refused", f"{call.name} has no argument {name!r}: {way_out(name, known)}")


def _of_subclass(subclass: Subclass, names: TrainerNames) -> Iterator[Finding]:
    """Make a class with each of the methods."""
    trainer = names.load_trainer()
    for method, line in subclass.methods.items():
        what = f"{subclass.name}.{method}"
        found = _tried(line, what, partial(type, subclass.name, (trainer,), {method: lambda self: None}))
        if found.kind == "works" and method in subclass.in_torch and "loss" in method:
            own = method == "compute_loss"
            found = Finding(line, what, "changed" if own else "refused", _IN_TORCH + _IN_JAX if own else _IN_JAX)
        yield found


def _tried(line: int, what: str, do: Callable[[], Any]) -> Finding:
    with warnings.catch_warnings(record=True) as told, no_launcher():
        warnings.simplefilter("always")
        try:
            do()
        except Exception as error:  # whatever it is, the script would get it, too
            return Finding(line, what, "refused", _first(error))
    texts = [" ".join(str(warning.message).split()) for warning in told]
    return Finding(line, what, "changed", " ".join(dict.fromkeys(texts))) if texts else Finding(line, what, "works")


def _first(error: Exception) -> str:
    return " ".join(str(error).split())
