"""Sets up a script's log and warnings to one line each."""

from __future__ import annotations

import importlib.util
import logging
import warnings


def init_zero_verbose() -> None:
    """Show errors only, each in a line, with rich where it is installed; warnings go to the log.

    This holds for the whole process: a script calls it, and nothing in trl_jax does.
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
