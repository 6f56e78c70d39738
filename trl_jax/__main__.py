"""python -m trl_jax SCRIPT [ARGUMENTS]: run an unchanged TRL script, training on JAX.

In the script, and in Python processes that it starts, `import trl` imports trl_jax, whether trl is installed or not.
Names that trl_jax does not have come from the installed trl; without it, using them raises an error.
"""

from __future__ import annotations

import functools
import os
import runpy
import sys
from collections.abc import Callable
from pathlib import Path
from types import TracebackType

from trl_jax.cli.main import COMMANDS, adding_hints
from trl_jax.core.text import without_launcher

USAGE = "usage: python -m trl_jax SCRIPT.py [ARGUMENTS]\n       python -m trl_jax -m MODULE [ARGUMENTS]"


def main(argv: list[str]) -> int:
    """Run the script as Python would. Returns exit status 2 if there is no script to run."""
    if argv[:1] in ([], ["-h"], ["--help"]):
        print(f"{USAGE}\n\n{__doc__.split(': ', 1)[1]}", file=sys.stderr if not argv else sys.stdout)
        return 0 if argv else 2
    os.environ.setdefault("TRANSFORMERS_NO_ADVISORY_WARNINGS", "1")
    from trl_jax.cli.trl_alias import install

    install()
    sys.excepthook = functools.partial(_show_from_script, sys.excepthook)
    if argv[0] == "-m":
        sys.argv = argv[1:]
        sys.path[0] = os.getcwd()
        with adding_hints():
            runpy.run_module(argv[1], run_name="__main__", alter_sys=True)
        return 0
    script = Path(argv[0])
    if not script.is_file():
        command = f" The command is trl-jax {argv[0]}." if argv[0] in COMMANDS else ""
        print(f"python -m trl_jax: there is no script {argv[0]!r}.{command}\n{USAGE}", file=sys.stderr)
        return 2
    sys.argv, sys.path[0] = argv, str(script.parent.absolute())
    with adding_hints():
        runpy.run_path(str(script), run_name="__main__")
    return 0


def _show_from_script(
    show: Callable, kind: type[BaseException], error: BaseException, traceback: TracebackType | None
) -> None:
    """Show an uncaught error as `python SCRIPT.py` would, with a traceback that starts in the script."""
    if os.environ.get("TRL_JAX_TRACEBACK") != "1":
        error.__traceback__ = traceback = without_launcher(traceback)
    show(kind, error, traceback)


if __name__ == "__main__":
    raise SystemExit(main(sys.argv[1:]))
