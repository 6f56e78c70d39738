"""Python runs this in child processes of `python -m trl_jax`, so that `import trl` finds trl_jax there too."""

import importlib.machinery
import importlib.util
import sys
from pathlib import Path

from trl_jax.cli.trl_alias import install

install()

# Run another sitecustomize that comes later on the path.
_here = str(Path(__file__).parent)
_others = [path for path in sys.path if path != _here]
_spec = importlib.machinery.PathFinder.find_spec("sitecustomize", _others)
if _spec is not None:
    _spec.loader.exec_module(importlib.util.module_from_spec(_spec))
