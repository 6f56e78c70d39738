"""The commands of `trl-jax` and the parts they share.

`trl_jax.scripts.sft`, `trl_jax.scripts.dpo` and so on can be imported and run with `python -m`, as in TRL. There is no
file for each: the import system loads training_script.py under these names.
"""

from __future__ import annotations

import importlib.util
import sys
from importlib.abc import MetaPathFinder
from importlib.machinery import ModuleSpec
from pathlib import Path
from typing import Any

from trl_jax.core.trainers import TRAINERS, lazy_getattr

_WHERE = {
    "DatasetMixtureConfig": "trl_jax.scripts.data",
    "ScriptArguments": "trl_jax.scripts.utils",
    "TrlParser": "trl_jax.scripts.utils",
    "get_dataset": "trl_jax.scripts.data",
    "init_zero_verbose": "trl_jax.scripts.utils",
}
__getattr__ = lazy_getattr(__name__, _WHERE)


class _TrainingScripts(MetaPathFinder):
    """Finds `trl_jax.scripts.<command>` for each trainer."""

    def find_spec(self, fullname: str, path: Any = None, target: Any = None) -> ModuleSpec | None:
        package, _, command = fullname.rpartition(".")
        if package != __name__ or command not in TRAINERS:
            return None
        return importlib.util.spec_from_file_location(fullname, Path(__file__).with_name("training_script.py"))


sys.meta_path.append(_TrainingScripts())
