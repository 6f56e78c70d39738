"""Compiled programs are cached on disk unless the user says otherwise, and compilations are counted."""

from __future__ import annotations

import logging
import os
import subprocess
import sys
import threading

import jax
import numpy as np
import pytest

from trl_jax.training import devices
from trl_jax.training.devices import Programs, compile_ahead, compiler_options

SCRIPT = """
import jax
from trl_jax.training.devices import enable_compilation_cache
jax.jit(lambda x: x + 1)(1.0)  # before: JAX has looked for a cache already
enable_compilation_cache()
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


def batch(length):
    return {"tokens": np.zeros((1, 1, length))}


def test_each_shape_is_made_and_told_of_once(caplog):
    made = []

    def compiled(params, state, batch, rate):
        made.append(batch["tokens"].size)
        return lambda params, state, batch, rate: rate

    step = Programs(compiled, "The step")
    with caplog.at_level(logging.INFO, "trl_jax"):
        for length in (64, 128, 64, 128):
            assert step(None, None, batch(length), length) == length
    assert made == [64, 128]
    assert [record.getMessage() for record in caplog.records] == [
        "The step compiles for shape 1: tokens 1x1x64.", "The step compiles for shape 2: tokens 1x1x128.",
    ]  # fmt: skip


FREED = """
import os
from pathlib import Path
import numpy as np
from trl_jax.training.devices import Programs

def held():
    return int(Path("/proc/self/statm").read_text().split()[1]) * os.sysconf("SC_PAGE_SIZE")

def compiled(*given):
    kept.extend(bytes(1000) for _ in range(100_000))
    del kept[:-1]  # the last stands in the way of those below it
    found.append(held())
    return lambda params, state, batch: None

kept, found = [], []
Programs(compiled, "The step")({}, {}, np.zeros((1, 1)))
assert held() < found[0] - 50e6, (held(), found)
"""


@pytest.mark.skipif(devices._malloc_trim() is None, reason="glibc alone can be asked for it")
def test_what_the_compiler_freed_goes_back_to_the_system():
    """In a separate process: after many tests, freed memory is fragmented."""
    done = subprocess.run([sys.executable, "-c", FREED], capture_output=True, text=True, check=False)
    assert done.returncode == 0, done.stderr[-2000:]


def test_a_program_that_another_thread_is_at_is_waited_for():
    begun, go, made = threading.Event(), threading.Event(), []

    def compiled(*given):
        begun.set()
        go.wait(10)
        made.append(threading.current_thread().name)
        return lambda *given: len(made)

    step = Programs(compiled, "The step")
    other = threading.Thread(target=step.program_for, args=(None, None, batch(8)), name="other")
    other.start()
    assert begun.wait(10)
    threading.Timer(0.1, go.set).start()
    assert step(None, None, batch(8)) == 1 and made == ["other"]
    other.join()


def test_what_goes_wrong_in_a_thread_is_raised_where_the_program_is_wanted():
    def compiled(*given):
        raise jax.errors.JaxRuntimeError("RESOURCE_EXHAUSTED")

    step = Programs(compiled, "The step")
    refused = pytest.raises(jax.errors.JaxRuntimeError, match="RESOURCE_EXHAUSTED")
    with compile_ahead(lambda arrays: step.program_for(None, None, arrays), [batch(8)], 2), refused:
        step(None, None, batch(8))


def test_the_first_batch_of_each_shape_is_made_ahead():
    made, done = [], threading.Event()

    def make(arrays):
        made.append(arrays["tokens"].size)
        if len(made) == 3:
            done.set()

    with compile_ahead(make, map(batch, (64, 8, 64, 64, 8, 16)), threads=1):
        assert done.wait(10)
    assert made == [64, 8, 16]


def test_nothing_more_is_begun_once_the_run_has_ended():
    begun, go, made = threading.Event(), threading.Event(), []

    def make(arrays):
        begun.set()
        go.wait(10)
        made.append(arrays["tokens"].size)

    with compile_ahead(make, map(batch, range(1, 100)), threads=2):
        assert begun.wait(10)
    go.set()
    for thread in threading.enumerate():
        if thread.name.startswith("trl_jax-compile"):
            thread.join(10)
    assert len(made) <= 2


def test_xla_for_a_cpu_is_told_what_it_knows_and_nothing_else(monkeypatch):
    """An unknown option would fail the run."""
    assert jax.jit(lambda x: x + 1, compiler_options=compiler_options("cpu", several=False))(1) == 2
    monkeypatch.setattr(devices, "_YNN", "xla_cpu_that_never_was")
    devices._takes_dots_alone.cache_clear()
    assert compiler_options("cpu", several=False) == {}
    devices._takes_dots_alone.cache_clear()


def test_what_the_user_told_xla_stands(monkeypatch):
    monkeypatch.setenv("XLA_FLAGS", "--xla_cpu_experimental_ynn_fusion_type=")
    assert compiler_options("cpu", several=True) == {}
