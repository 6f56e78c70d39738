"""transformers' callbacks and trackers without its models: only to know one when it meets it, it imports PEFT and all
that a torch model needs. That is half of what a script's imports take."""

from __future__ import annotations

import sys
from importlib import import_module
from typing import Any


class _Elsewhere(type):
    """Whose instances are those of a class `name` of `module`. There are none until somebody has imported it."""

    def __new__(cls, module: str, name: str):
        return super().__new__(cls, name, (), {"__module__": module})

    def __init__(cls, module: str, name: str):
        super().__init__(name, (), {})

    def __instancecheck__(cls, value: Any) -> bool:
        module = sys.modules.get(cls.__module__)
        return module is not None and isinstance(value, vars(module)[cls.__name__])


def leave_models_aside() -> None:
    """Import transformers.trainer_utils and its trackers, unless that has been done or what they need is there."""
    utils = import_module("transformers.utils")
    if "transformers.trainer_utils" not in sys.modules and "peft" not in sys.modules and utils.is_peft_available():
        _import_trainer_utils(utils)
    trackers = "transformers.integrations.integration_utils"
    if not {trackers, "transformers.modeling_utils"} & sys.modules.keys() and utils.is_torch_available():
        _import_trackers(trackers)


def _import_trainer_utils(utils: Any) -> None:
    asked, utils.is_peft_available = utils.is_peft_available, lambda: False
    try:
        module = import_module("transformers.trainer_utils")
    finally:
        utils.is_peft_available = asked
    module.is_peft_available = asked
    module.PeftMixedModel, module.PeftModel = (_Elsewhere("peft", name) for name in ("PeftMixedModel", "PeftModel"))


def _import_trackers(name: str) -> None:
    transformers = import_module("transformers")
    transformers.PreTrainedModel = _Elsewhere("transformers.modeling_utils", "PreTrainedModel")
    try:
        import_module(name)
    finally:
        del transformers.PreTrainedModel
