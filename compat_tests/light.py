"""Imports for the processes that tests start: transformers' callbacks without PEFT and the torch modules of its models.

`python -m trl_jax` imports them this way, too, which takes 3 CPU seconds instead of 6. A test that is not about imports
starts a module with `python -m compat_tests.light MODULE [ARGUMENTS]` and begins code for `python -c` with `IMPORTS`.
"""

from __future__ import annotations

import runpy
import sys

IMPORTS = "from trl_jax.cli.transformers_patches import import_without_models\nimport_without_models()\n"

if __name__ == "__main__":
    exec(IMPORTS)
    sys.argv = sys.argv[1:]
    runpy.run_module(sys.argv[0], run_name="__main__", alter_sys=True)
