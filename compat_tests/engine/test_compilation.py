"""What is compiled is kept on disk unless the user says otherwise, and counted."""

from __future__ import annotations

import logging
import os
import subprocess
import sys

import numpy as np
import pytest

from trl_jax.engine.compilation import counted

SCRIPT = """
import jax
from trl_jax.engine.compilation import keep_compilations
jax.jit(lambda x: x + 1)(1.0)  # before: JAX has looked for a cache already
keep_compilations()
jax.config.update("jax_persistent_cache_min_compile_time_secs", 0.0)
jax.jit(lambda x: x * 3)(1.0)
"""


@pytest.mark.parametrize(
    ("settings", "place"),
    [
        ({}, "home/.cache/trl_jax/compiled"),
        ({"XDG_CACHE_HOME": "{}/moved"}, "moved/trl_jax/compiled"),
        ({"JAX_COMPILATION_CACHE_DIR": "{}/mine"}, "mine"),
        ({"JAX_ENABLE_COMPILATION_CACHE": "false"}, None),
    ],
)
def test_where_compiled_programs_lie(settings, place, tmp_path):
    kept = {name: value for name, value in os.environ.items() if not name.startswith(("JAX_", "XDG_"))}
    given = {name: value.format(tmp_path) for name, value in settings.items()}
    env = kept | {"JAX_PLATFORMS": "cpu", "HOME": str(tmp_path / "home")} | given
    subprocess.run([sys.executable, "-c", SCRIPT], env=env, check=True)
    written = list(tmp_path.rglob("*-cache"))
    assert written if place else not list(tmp_path.rglob("*"))
    assert all(path.parent == tmp_path / place for path in written)


def test_each_shape_is_told_of_once(caplog):
    step = counted(lambda params, state, batch, rate: rate, "The step")
    with caplog.at_level(logging.INFO, "trl_jax"):
        for length in (64, 128, 64, 128):
            assert step(None, None, {"tokens": np.zeros((1, 1, length))}, length) == length
    assert [record.getMessage() for record in caplog.records] == [
        "The step compiles for shape 1: tokens 1x1x64.", "The step compiles for shape 2: tokens 1x1x128.",
    ]  # fmt: skip
