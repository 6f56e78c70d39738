"""Scripts that run as commands, and the parts they share."""

from __future__ import annotations

from trl_jax.core.trainers import fetching

_WHERE = {
    "DatasetMixtureConfig": "trl_jax.scripts.data",
    "ScriptArguments": "trl_jax.scripts.utils",
    "TrlParser": "trl_jax.scripts.utils",
    "get_dataset": "trl_jax.scripts.data",
    "init_zero_verbose": "trl_jax.scripts.utils",
}
__getattr__ = fetching(__name__, _WHERE)
