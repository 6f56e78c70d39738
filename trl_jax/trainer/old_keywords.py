"""Arguments of trainers by the names they had in earlier releases of TRL."""

from __future__ import annotations

import copy
import functools
import inspect
import warnings
from collections.abc import Callable
from typing import Any

from trl_jax.core.arguments.renamed import way_out
from trl_jax.trainer.reward_config import as_reward_config


def accepting_old_keywords(init: Callable) -> Callable:
    """A trainer's `__init__` that also takes `tokenizer=` and `max_length=`, each with a FutureWarning."""
    accepted = inspect.signature(init).parameters

    @functools.wraps(init)
    def wrapped(self, *args: Any, **kwargs: Any) -> None:
        if "tokenizer" in kwargs:
            if "processing_class" in kwargs:
                raise TypeError("tokenizer and processing_class are one argument. Leave tokenizer out.")
            kwargs["processing_class"] = kwargs.pop("tokenizer")
            _tell("tokenizer is an old name: pass it as processing_class.")
        if "max_length" in kwargs:
            args, kwargs = _with_max_length(args, kwargs)
            _tell("max_length is an argument of RewardConfig now: pass RewardConfig(max_length=...).")
        for name in kwargs.keys() - accepted.keys():
            raise TypeError(f"{type(self).__name__} has no argument {name!r}: {way_out(name, accepted)}")
        init(self, *args, **kwargs)

    return wrapped


def _with_max_length(args: tuple, kwargs: dict[str, Any]) -> tuple[tuple, dict[str, Any]]:
    """The trainer's arguments with a copy of its configuration that has the length; `args` are (model, args, ...)."""
    max_length = kwargs.pop("max_length")
    given = args[1] if len(args) > 1 else kwargs.get("args")
    if given is None:
        raise TypeError(f"max_length={max_length!r} has no configuration to go to: pass RewardConfig(max_length=...).")
    changed = copy.copy(as_reward_config(given))
    changed.max_length = max_length
    if len(args) > 1:
        return (args[0], changed, *args[2:]), kwargs
    return args, kwargs | {"args": changed}


def _tell(text: str) -> None:
    warnings.warn(text, FutureWarning, stacklevel=4)
