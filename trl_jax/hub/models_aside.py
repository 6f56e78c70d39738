"""Import transformers' callbacks, trackers and configs without its model code.

Just to be able to recognize a model, they import PEFT, torch's distributed tensors and everything that a torch model
needs, which takes half of a script's import time.
"""

from __future__ import annotations

import sys
from importlib import import_module
from types import ModuleType
from typing import Any

_ACTIVATIONS = "transformers.activations"  # imported by every config class
_SHARDED = (  # torch modules that it imports to recognize and create sharded tensors
    "torch.distributed.tensor", "torch.distributed.tensor._utils", "torch.distributed.tensor.placement_types",
    "torch.distributed.fsdp", "torch.distributed._composable.fsdp",
)  # fmt: skip


class _Elsewhere(type):
    """Stands in for the class `name` of `module`. There are no instances until the module is imported; calling it or
    accessing an attribute imports the module."""

    def __new__(cls, module: str, name: str):
        return super().__new__(cls, name, (), {"__module__": module})

    def __init__(cls, module: str, name: str):
        super().__init__(name, (), {})

    def __instancecheck__(cls, value: Any) -> bool:
        module = sys.modules.get(cls.__module__)
        return module is not None and isinstance(value, vars(module)[cls.__name__])

    def __getattr__(cls, name: str) -> Any:
        return getattr(cls._real(), name)

    def __call__(cls, *args: Any, **options: Any) -> Any:
        return cls._real()(*args, **options)

    def _real(cls) -> Any:
        return getattr(import_module(cls.__module__), cls.__name__)


class _Absent(ModuleType):
    """Stands in for a module; all of its names are imported on demand."""

    def __getattr__(self, name: str) -> Any:
        if name.startswith("__"):
            raise AttributeError(name)
        return _Elsewhere(self.__name__, name)


def leave_models_aside() -> None:
    """Import transformers.trainer_utils, its trackers and what its configs need, unless they or the modules to avoid
    are already imported."""
    utils = import_module("transformers.utils")
    if not {_ACTIVATIONS, *_SHARDED} & sys.modules.keys() and utils.is_torch_distributed_available():
        _import_activations()
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


def _import_activations() -> None:
    """Import it with stand-ins; if another release of transformers needs the real modules at once, import normally."""
    known = set(sys.modules)
    sys.modules.update({name: _Absent(name) for name in _SHARDED})
    try:
        import_module(_ACTIVATIONS)
    except Exception:  # transformers' own errors will be raised again by the normal import
        for name in sys.modules.keys() - known:
            if name.startswith("transformers."):
                del sys.modules[name]
    finally:
        for name in _SHARDED:
            del sys.modules[name]
