"""TRL's modules `trl.experimental.async_grpo`, `.cpo`, `.distillation`, `.gkd`, `.kto`, `.online_dpo` and `.orpo`.
Except for AsyncGRPO, GKD and online DPO, their names are also in `trl_jax`."""

import sys
from types import ModuleType

from trl_jax.core.trainers import EXPERIMENTAL, lazy_getattr


def _add_module(name: str, where: dict[str, str]) -> None:
    """Add the submodule `name`, which imports its names on first use.

    Args:
        where: name -> the module that defines it.
    """
    module = ModuleType(f"{__name__}.{name}", f"The names of TRL's `trl.experimental.{name}`.")
    module.__path__, module.__all__ = [], list(where)
    module.__getattr__ = lazy_getattr(module.__name__, where)
    sys.modules[module.__name__] = module


for _name, _names in EXPERIMENTAL.items():
    _where = _names.where
    _add_module(_name, _where)
    for _class, _module in _where.items():
        _add_module(f"{_name}.{_module.rpartition('.')[2]}", {_class: _module})
