"""Check the arguments that a script passes to trainers and configs."""

from __future__ import annotations

import ast
import contextlib
import inspect
import warnings
from collections.abc import Iterator
from dataclasses import fields
from functools import partial
from typing import Any

from trl_jax.cli.check_names import PACKAGES, Finding, own_names, package_of, short, tried
from trl_jax.cli.following import UNKNOWN, Argument, arguments_of, bases, meanings
from trl_jax.cli.reading import Call, Constant, Defined, Imported, Made, Meaning, Method, Sequence, parameters
from trl_jax.config.renamed import RENAMED, way_out
from trl_jax.config.rules import show
from trl_jax.trainer.overrides import OWN_COLLATOR

_OWN_MODEL = (
    "A model class of the script's own is not supported. Use one of transformers' classes, and put the difference into "
    "compute_loss."
)
_ONE_LABEL = "A reward model gives one score per text: load it with num_labels=1, or pass its name."
_ON_ONE_DEVICE = "On one device:"
_OPTAX = "Pass an optax transformation, or name the optimizer in the arguments: optim='adamw_torch'."

# Arguments of trainers


def of_argument(line: int, what: str, trainer: type, name: str, given: Argument) -> list[Finding]:
    """Findings on an argument of a trainer whose value is refused, or cannot be judged."""
    if given.value is None:
        return []
    if given.value is ...:
        return [Finding(line, what, "refused", "The script leaves it open: it passes `...`.")]
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
    if isinstance(made, Imported) and package_of(made.path) in PACKAGES and short(made) in own:
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
        isinstance(one, Imported) and package_of(one.path) in ("torch", "bitsandbytes", "transformers") for one in made
    )


def _of_model(meaning: Meaning, trainer: type) -> str | None:
    if not isinstance(meaning, Made):
        return None
    made = meaning.by.of if isinstance(meaning.by, Method) else meaning.by
    if isinstance(made, Defined) and isinstance(made.node, ast.ClassDef):
        roots = [one.path for one in bases(made) if isinstance(one, Imported)]
        if any(package_of(root) in ("torch", "transformers", "peft") for root in roots):
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


def of_quantization(call: Call) -> Iterator[Finding]:
    """Models that are loaded in another format than bitsandbytes'."""
    node = next(word.value for word in call.node.keywords if word.arg == "quantization_config")
    for meaning in meanings(node, call.scope):
        made = meaning.by if isinstance(meaning, Made) else None
        if (
            isinstance(made, Imported)
            and package_of(made.path) == "transformers"
            and short(made) != "BitsAndBytesConfig"
        ):
            text = "Use a BitsAndBytesConfig, or load the model without quantization_config."
            yield Finding(call.node.lineno, f"quantization_config={short(made)}(...)", "refused", text)


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
        except ValueError as error:
            if "num_generations" not in given:
                raise
            devices = self.num_generations
            vars(self).update(given, _devices=devices)
            with contextlib.suppress(ValueError):
                config.settle_sizes(self)
                warnings.warn(f"{_ON_ONE_DEVICE} {error} It fits {devices} devices.", stacklevel=2)
                return
            raise

    own = {
        "join_processes": lambda self: None,
        "settle_sizes": settle_sizes,
        "_devices": 1,
        "data_parallel_size": property(lambda self: self._devices),
    }
    return type(config.__name__, (config,), own)


def of_config(call: Call, meaning: Meaning, config: type) -> Iterator[Finding]:
    """Construct the config once per argument whose value the script spells out, then with all of them together."""
    known, config = config, _alone(config)
    own = own_names(meaning) if isinstance(meaning, Defined) else set()
    positional = [field.name for field in fields(known)]
    arguments, others = arguments_of(call.node, call.scope, [] if own else positional)
    line, name = call.node.lineno, short(meaning)
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
