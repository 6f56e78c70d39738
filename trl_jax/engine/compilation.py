"""Compiled programs: kept on disk for the next run, and counted by the shapes they are for."""

from __future__ import annotations

import logging
import os
from collections.abc import Callable
from pathlib import Path
from typing import Any

import jax
from jax.experimental.compilation_cache import compilation_cache

logger = logging.getLogger(__name__)

_MOST_BYTES = 4 << 30  # the least recently used give way


def keep_compilations() -> None:
    """Let JAX keep what takes it more than a second to compile under `~/.cache/trl_jax/compiled`.

    What the user has settled stands: JAX_COMPILATION_CACHE_DIR names another place, JAX_ENABLE_COMPILATION_CACHE=false
    turns it off. (`XDG_CACHE_HOME` moves it, as it moves all of `~/.cache`.)
    """
    if jax.config.jax_compilation_cache_dir is not None or not jax.config.jax_enable_compilation_cache:
        return
    home = Path(os.environ.get("XDG_CACHE_HOME") or Path.home() / ".cache")
    jax.config.update("jax_compilation_cache_dir", str(home / "trl_jax" / "compiled"))
    if jax.config.jax_compilation_cache_max_size == -1:
        jax.config.update("jax_compilation_cache_max_size", _MOST_BYTES)
    compilation_cache.reset_cache()  # JAX asks once, and may have asked before


def counted(step: Callable, name: str) -> Callable:
    """The step, with a line in the log for each new shape of its batch, which is the third argument."""
    seen = set()

    def run(params: Any, opt_state: Any, batch: Any, *others: Any) -> Any:
        shapes = tuple(leaf.shape for leaf in jax.tree.leaves(batch))
        if shapes not in seen:
            seen.add(shapes)
            logger.info("%s compiles for shape %d: tokens %s.", name, len(seen), "x".join(map(str, shapes[0])))
        return step(params, opt_state, batch, *others)

    return run
