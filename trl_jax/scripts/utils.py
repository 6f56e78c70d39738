"""TrlParser and ScriptArguments: TRL's flags and YAML files, the text of --help, and logging."""

from __future__ import annotations

import argparse
import copy
import importlib.util
import logging
import os
import sys
import warnings
from collections.abc import Callable, Iterable, Mapping
from dataclasses import Field, dataclass, field
from typing import Any, NoReturn, get_args, get_origin

from transformers import HfArgumentParser
from transformers.hf_argparser import string_to_bool

from trl_jax.config.renamed import OldNames, translate_old_names, way_out
from trl_jax.config.rules import read_bools
from trl_jax.core.secrets import cleaned, learn, learn_flags, masked, scrubbed, shown
from trl_jax.core.trainers import TRAINERS
from trl_jax.legacy.arguments import has_training_arguments, modern_flags
from trl_jax.scripts.data import DatasetConfig, DatasetMixtureConfig, get_dataset

__all__ = [
    "DPOScriptArguments",
    "DatasetConfig",
    "DatasetMixtureConfig",
    "SFTScriptArguments",
    "ScriptArguments",
    "TrlParser",
    "get_dataset",
    "init_zero_verbose",
    "strtobool",
]

WORDS: dict[str, str] = {"int": "INT", "float": "NUMBER", "string_to_bool": "BOOL"}  # for values in --help
_MAX_VALUES = 100_000  # of a YAML file, with aliases expanded


@dataclass
class ScriptArguments:
    """The dataset of a script: TRL's fields, defaults and order."""

    _argument_group_name = "data"

    dataset_name: str | None = field(
        default=None,
        metadata={"help": "Hub id, local folder, or a jsonl, json, parquet or csv file."},
    )
    dataset_config: str | None = field(
        default=None, metadata={"help": "Configuration of the dataset, if it has several."}
    )
    dataset_train_split: str = field(default="train", metadata={"help": "Split to train on."})
    dataset_test_split: str = field(default="test", metadata={"help": "Split to evaluate on."})
    dataset_streaming: bool = field(
        default=False, metadata={"help": "Stream the dataset instead of loading it into memory."}
    )
    ignore_bias_buffers: bool = field(
        default=False, metadata={"help": "Accepted without effect: there are no buffers to synchronize."}
    )

    def __post_init__(self):
        read_bools(self)


def allow_bare_booleans(actions: Iterable[argparse.Action]) -> None:
    """Allow optional booleans without a value, as in `--bf16`, which then means True.

    argparse allows it only if the default is False, which it was in earlier releases of transformers.
    """
    for action in actions:
        if action.type is string_to_bool and action.nargs is None:
            action.nargs, action.const = "?", True


class _FewerFlags(OldNames):
    """Metaclass of a config class with fewer flags; calling the class returns an instance of the original."""

    def __call__(cls, *args: Any, **kwargs: Any) -> Any:
        return cls.__base__(*args, **kwargs)


def drop_duplicate_fields(types: Iterable[type]) -> list[type]:
    """The dataclasses of a parser without duplicate names.

    A script's own dataclass may have a field with the name of an argument that only our configs have. Those arguments
    are keyword-only; here they give way to the script's field.
    """
    types = list(types)
    return [
        _drop_fields(cls, {name for other in types if other is not cls for name in other.__dataclass_fields__})
        if isinstance(cls, OldNames) else cls
        for cls in types
    ]  # fmt: skip


def _drop_fields(cls: type, names: set[str]) -> type:
    fields = {name: field for name, field in cls.__dataclass_fields__.items() if not (field.kw_only and name in names)}
    if len(fields) == len(cls.__dataclass_fields__):
        return cls
    return _FewerFlags(cls.__name__, (cls,), {"__dataclass_fields__": fields})


class TrlParser(HfArgumentParser):
    """Parses flags and a YAML file to dataclasses: `TrlParser((A, B)).parse_args_and_config()` returns (a, b).

    The keys of --config FILE.yaml are flags. The command line takes precedence, and the file's `env` block sets
    environment variables. The words None and null mean None for optional values that are not text.
    """

    def __init__(self, dataclass_types: type | Iterable[type] | None = None, **kwargs: Any):
        if dataclass_types is None:
            dataclass_types = ()
        elif isinstance(dataclass_types, type):
            dataclass_types = (dataclass_types,)
        dataclass_types = drop_duplicate_fields(dataclass_types)
        for cls in dataclass_types:
            if "config" in cls.__dataclass_fields__:
                raise ValueError(
                    f"{cls.__name__} has a field named 'config', but --config names the YAML file. Rename it."
                )
        kwargs.setdefault("formatter_class", HelpFormatter)
        super().__init__(dataclass_types=dataclass_types, **kwargs)

    @staticmethod
    def _parse_dataclass_field(parser: argparse.ArgumentParser, field: Field) -> None:
        takes_none = type(None) in get_args(field.type)
        resolved = copy.copy(field)  # transformers writes the resolved type into the field
        HfArgumentParser._parse_dataclass_field(parser, resolved)
        action = parser._option_string_actions[f"--{field.name}"]
        allow_bare_booleans((action,))
        if get_origin(resolved.type) is tuple:  # transformers would split a word into letters
            types = get_args(resolved.type)
            action.type, action.nargs = types[0], len(types)
        elif takes_none and action.type is resolved.type and action.type is not str:
            action.type = _optional(action.type)

    def parse_args_and_config(
        self,
        args: Iterable[str] | None = None,
        return_remaining_strings: bool = False,
        fail_with_unknown_args: bool = True,
        separate_remaining_strings: bool = False,
    ) -> tuple[Any, ...]:
        """Parse to dataclass instances and, with `return_remaining_strings`, the remaining strings, those of the YAML
        file first.

        Raises:
            ValueError: an unknown flag, or an unknown key unless fail_with_unknown_args is False.
        """
        flags, path = take_config(list(sys.argv[1:] if args is None else args))
        learn_flags(flags)
        config = {} if path is None else read_config(path)
        flags, config = self._translate_old_names(flags, config)
        from_config = self.set_defaults_with_config(**config)
        if from_config and fail_with_unknown_args and not return_remaining_strings:
            keys = [flag[2:] for flag in from_config[::2]]
            raise ValueError("\n".join(f"{path}: unknown key {key}: {way_out(key, self._names())}" for key in keys))
        *parsed, from_flags = self.parse_args_into_dataclasses(args=flags, return_remaining_strings=True)
        if separate_remaining_strings and return_remaining_strings:
            return (*parsed, from_config, from_flags)
        if return_remaining_strings:
            return (*parsed, from_config + from_flags)
        if from_flags:
            raise ValueError(_unknown_flags(from_flags, self._names()))
        return tuple(parsed)

    def _translate_old_names(self, flags: list[str], config: dict[str, Any]) -> tuple[list[str], dict[str, Any]]:
        """Translate old names of flags and YAML keys, with a warning for each."""
        names = self._names()
        if not has_training_arguments(names):
            return flags, config
        flags, environment, notes = modern_flags(flags, names)
        config, config_environment, config_notes = translate_old_names(config, names)
        os.environ.update(environment | config_environment)
        for note in notes + config_notes:
            warnings.warn(note, FutureWarning, stacklevel=3)
        return flags, config

    def error(self, message: str) -> NoReturn:
        super().error(cleaned(message))

    def format_help(self) -> str:
        return scrubbed(super().format_help())  # the defaults include values of the YAML file, which may be secrets

    def set_defaults_with_config(self, **config: Any) -> list[str]:
        """Make these values the defaults, in subparsers too. Return the unknown keys as ["--key", "value", ...]."""
        used = _set_defaults(self, config)
        return [text for key, value in config.items() if key not in used for text in (f"--{key}", str(value))]

    def _names(self) -> set[str]:
        return {action.dest for action in self._actions}


def _unknown_flags(strings: list[str], valid: Iterable[str]) -> str:
    names = [text[2:].partition("=")[0].replace("-", "_") for text in strings if text.startswith("--")]
    if not names and "trainer" in valid and strings[0] in TRAINERS:
        return f"unexpected {strings[0]!r}: the trainer is the flag --trainer {strings[0]}."
    if not names:
        return f"unexpected {masked(strings[0])!r}: a value must follow its flag, as in --max_steps 10."
    return "\n".join(f"unknown argument --{name}: {way_out(name, valid)}" for name in names)


def _optional(inner: Callable[[str], Any]) -> Callable[[str], Any]:
    def parse(text: str) -> Any:
        return None if text.lower() in ("none", "null") else inner(text)

    parse.__name__ = inner.__name__  # for argparse's message "invalid int value"
    return parse


def take_config(args: list[str]) -> tuple[list[str], str | None]:
    """Split off --config: the other arguments, and the path."""
    for i, arg in enumerate(args):
        if arg.startswith("--config="):
            return args[:i] + args[i + 1 :], arg.partition("=")[2]
        if arg == "--config":
            if i + 1 == len(args):
                raise ValueError("--config has no value: write --config FILE.yaml.")
            return args[:i] + args[i + 2 :], args[i + 1]
    return args, None


def read_config(path: str) -> dict[str, Any]:
    """Read a YAML file, and set environment variables from its `env` block."""
    import yaml

    try:
        with open(path, encoding="utf-8") as file:  # may be a pipe, as in --config <(envsubst < dpo.yaml)
            config = yaml.safe_load(file)
    except (FileNotFoundError, IsADirectoryError):
        raise FileNotFoundError(f"--config {path}: there is no such file.") from None
    except (yaml.YAMLError, UnicodeDecodeError) as error:
        raise ValueError(f"{path} is not valid YAML: {_yaml_error_text(error)}") from None
    if not isinstance(config, dict):
        raise ValueError(f"{path} must have flags as keys, such as `max_steps: 10`, got a {type(config).__name__}.")
    _check_size(path, config)
    if invalid := [key for key in config if not isinstance(key, str)]:
        raise ValueError(f"{path}: keys must be names of flags, got {invalid}.")
    env = config.pop("env", {})
    if not isinstance(env, dict):
        raise ValueError(f"{path}: `env` field should be a dict in the YAML file. Got {shown('env', env)}.")
    learn(config)
    os.environ.update({str(name): str(value) for name, value in env.items()})
    return config


def _check_size(path: str, config: dict[Any, Any]) -> None:
    """Raise ValueError if a few lines of aliases expand to a huge number of values."""
    pending, count = [config], 0
    while pending:
        value, count = pending.pop(), count + 1
        if count > _MAX_VALUES:
            raise ValueError(f"{path} has more than {_MAX_VALUES:,} values once its aliases (*name) are expanded.")
        pending += value.values() if isinstance(value, dict) else value if isinstance(value, list) else ()


def _yaml_error_text(error: Exception) -> str:
    """The text of a YAML error without the lines of the file that it quotes, which may contain secrets."""
    import yaml

    if not isinstance(error, yaml.MarkedYAMLError) or error.problem_mark is None:
        return scrubbed(str(error))
    mark = error.problem_mark
    return scrubbed(f"{error.problem} in line {mark.line + 1}, column {mark.column + 1}")


def _set_defaults(parser: argparse.ArgumentParser, config: Mapping[str, Any]) -> set[str]:
    used: set[str] = set()
    for action in parser._actions:
        if isinstance(action, argparse._SubParsersAction):
            for subparser in action.choices.values():
                used |= _set_defaults(subparser, config)
        elif action.dest in config:
            value = config[action.dest]
            if action.choices is not None and value is not None and value not in action.choices:
                raise ValueError(
                    f"{action.dest} in the config file must be one of {list(action.choices)}, got "
                    f"{masked(value, action.dest)!r}."
                )
            action.default, action.required = value, False
            used.add(action.dest)
    return used


# Help: parsers have over a hundred flags, so each is listed once, with one short word for its value


class HelpFormatter(argparse.ArgumentDefaultsHelpFormatter):
    def _fill_text(self, text: str, width: int, indent: str) -> str:
        """Wrap each paragraph, except indented ones, which are examples."""
        fill = super()._fill_text
        parts = text.split("\n\n")
        return "\n\n".join(part if part.startswith(" ") else fill(part, width, indent) for part in parts)

    def _format_action_invocation(self, action: argparse.Action) -> str:
        spellings: dict[str, str] = {}  # --max_length and --max-length are the same flag
        for flag in action.option_strings:
            spellings.setdefault(flag.replace("-", "_"), flag)
        flags = ", ".join(spellings.values())
        if not flags or action.nargs == 0:
            return flags or super()._format_action_invocation(action)
        return f"{flags} {_value_word(action)}"

    def _get_help_string(self, action: argparse.Action) -> str | None:
        if action.default is None or action.default is False:
            return action.help
        if masked(action.default, action.dest) != action.default:  # a secret in a YAML file
            return action.help
        return super()._get_help_string(action)


def _value_word(action: argparse.Action) -> str:
    word = action.metavar or _choices(action) or WORDS.get(_type_name(action.type), "TEXT")
    if action.nargs == "?":
        return f"[{word}]"
    return f"{word} ..." if action.nargs == "+" else str(word)


def _choices(action: argparse.Action) -> str | None:
    joined = "{" + ",".join(map(str, action.choices or ())) + "}"
    return joined if 2 < len(joined) <= 40 else None


def _type_name(kind: Callable | None) -> str:
    return "" if kind is None else kind.__name__


# Logging


def init_zero_verbose() -> None:
    """Log errors only, one line each, with rich if it is installed; warnings go to the log.

    This affects the whole process. Nothing in trl_jax calls it; scripts do.
    """
    if importlib.util.find_spec("rich") is not None:
        from rich.logging import RichHandler

        handler: logging.Handler = RichHandler()
    else:
        handler = logging.StreamHandler()
    logging.basicConfig(format="%(message)s", datefmt="[%X]", handlers=[handler], level=logging.ERROR)
    warnings.showwarning = _log_warning


def _log_warning(message, category, filename, lineno, file=None, line=None) -> None:
    logging.warning("%s:%s: %s: %s", filename, lineno, category.__name__, message)


# Names that scripts of 2024 imported from `trl.commands.cli_utils` and `trl.env_utils`

_REENTRANT = {"help": "For gradient_checkpointing_kwargs, which have no effect here."}


@dataclass
class SFTScriptArguments(ScriptArguments):
    """The dataset arguments of an SFT script in TRL 0.8 to 0.11."""

    dataset_name: str | None = field(
        default="timdettmers/openassistant-guanaco",
        metadata={"help": "Hub id, local folder, or jsonl, json, parquet or csv file."},
    )
    gradient_checkpointing_use_reentrant: bool = field(default=False, metadata=_REENTRANT)


@dataclass
class DPOScriptArguments(ScriptArguments):
    """The dataset arguments of a DPO script in TRL 0.8 to 0.11."""

    sanity_check: bool = field(default=False, metadata={"help": "For scripts that then use only a few rows."})
    gradient_checkpointing_use_reentrant: bool = field(default=False, metadata=_REENTRANT)


def strtobool(val: str) -> bool:
    """Parse a boolean.

    Raises:
        ValueError: the text is not a boolean.
    """
    for truth, texts in ((True, "y yes t true on 1"), (False, "n no f false off 0")):
        if val.lower() in texts.split():
            return truth
    raise ValueError(f"A truth value must be yes or no, true or false, on or off, 1 or 0, got {val!r}.")
