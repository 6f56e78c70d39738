"""Compiled programs: cached on disk for the next run, and one for each shape of a batch."""

from __future__ import annotations

import contextlib
import ctypes
import functools
import logging
import os
import sys
import threading
from collections.abc import Callable, Iterable, Iterator
from concurrent.futures import Future, ThreadPoolExecutor
from pathlib import Path
from typing import Any

import jax
from jax.experimental.compilation_cache import compilation_cache

from trl_jax.engine.devices.own_folder import own_folder

logger = logging.getLogger(__name__)

_YNN, _DOTS_ALONE = "xla_cpu_experimental_ynn_fusion_type", "LIBRARY_FUSION_TYPE_INDIVIDUAL_DOT"
_CACHE_BYTES = 4 << 30  # beyond it, the least recently used programs are removed


def keep_compilations() -> None:
    """Let JAX cache programs that take it more than a second to compile under `~/.cache/trl_jax/compiled`.

    This holds for the whole process, which has one such cache. The user's own settings stay: JAX_COMPILATION_CACHE_DIR
    names another place, JAX_ENABLE_COMPILATION_CACHE=false turns it off. (`XDG_CACHE_HOME` moves it, as it moves all of
    `~/.cache`.) The cache contains machine code that this process runs, so a folder where others can write is neither
    read nor written, and the log says so; call this before JAX compiles anything. A bucket's address is not checked.
    """
    if not jax.config.jax_enable_compilation_cache:
        return
    named = jax.config.jax_compilation_cache_dir
    if named is not None and "://" in named.removeprefix("file://"):
        return
    try:
        folder = own_folder(_compiled() if named is None else named.removeprefix("file://"))
    except OSError as error:
        logger.warning(
            "Compiled programs are not kept: %s JAX_COMPILATION_CACHE_DIR names another folder, "
            "JAX_ENABLE_COMPILATION_CACHE=false asks for none.", error,
        )  # fmt: skip
        jax.config.update("jax_enable_compilation_cache", False)
        compilation_cache.reset_cache()
        return
    if named is None and jax.config.jax_compilation_cache_max_size == -1:
        jax.config.update("jax_compilation_cache_max_size", _CACHE_BYTES)
    if named != str(folder):
        jax.config.update("jax_compilation_cache_dir", str(folder))
        compilation_cache.reset_cache()  # JAX reads the setting once, and may have done so before


def _compiled() -> Path:
    return Path(os.environ.get("XDG_CACHE_HOME") or Path.home() / ".cache") / "trl_jax" / "compiled"


def compiler_options(device: str, several: bool) -> dict[str, Any]:
    """XLA's options for a step on one "cpu", "cuda" or "tpu" device, or on several."""
    if device == "cuda" and several:
        return {"xla_gpu_enable_latency_hiding_scheduler": True}  # collectives run beside products; on TPUs they do
    if device == "cpu" and _YNN not in os.environ.get("XLA_FLAGS", "") and _takes_dots_alone():
        return {_YNN: _DOTS_ALONE}
    return {}


@functools.cache
def _takes_dots_alone() -> bool:
    """Whether this XLA has the option that sends products alone to YNNPACK. In jaxlib 0.10 sums go there too, which
    makes a long step a sixth slower."""
    try:
        jax.jit(lambda: 0, compiler_options={_YNN: _DOTS_ALONE}).lower().compile()
    except jax.errors.JaxRuntimeError:
        return False
    return True


class Programs:
    """A step's program for each shape of its batch, which is the third argument; the log has a line for each.

    Any thread may ask for a program; the first one compiles it, and the others wait.

    Args:
        compile: the step's arguments, or their shapes -> its program.
        name: of the step, for the log.
    """

    def __init__(self, compile: Callable[..., Callable], name: str):
        self._compile, self._name = compile, name
        self._programs: dict[tuple, Future] = {}
        self._lock = threading.Lock()

    def __call__(self, *arguments: Any) -> Any:
        return self.program_for(*arguments).result()(*arguments)

    def program_for(self, *arguments: Any) -> Future:
        """The program for arguments of these shapes, compiled here unless a thread has done so or is at it."""
        shapes = shapes_of(arguments[2])
        with self._lock:
            if shapes in self._programs:
                return self._programs[shapes]
            future = self._programs[shapes] = Future()
            logger.info("%s compiles for shape %d: tokens %s.", self._name, len(self._programs), _times(shapes[0]))
        try:
            program = self._compile(*arguments)
            return_freed_memory()
            future.set_result(program)
        except BaseException as error:  # raised where the program is wanted
            future.set_exception(error)
        return future


def return_freed_memory() -> None:
    """Return freed memory to the system: glibc keeps 0.2 GB of what the compiler took for a step."""
    if (trim := _malloc_trim()) is not None:
        trim(0)


@functools.cache
def _malloc_trim() -> Callable[[int], int] | None:
    """glibc's function; other systems have none, nor has Linux with musl."""
    if sys.platform != "linux":
        return None
    try:
        return ctypes.CDLL(None).malloc_trim
    except AttributeError:
        return None


def shapes_of(batch: Any) -> tuple[tuple[int, ...], ...]:
    return tuple(leaf.shape for leaf in jax.tree.leaves(batch))


def _times(shape: tuple[int, ...]) -> str:
    return "x".join(map(str, shape))


@contextlib.contextmanager
def compile_ahead(compile: Callable[[Any], Any], batches: Iterable[Any], threads: int) -> Iterator[None]:
    """Within the block, threads call `compile` with the first of `batches` of each shape, in their order.

    For a device that computes while the host compiles. A call that has begun when the block ends still finishes.
    """
    pool = ThreadPoolExecutor(threads, thread_name_prefix="trl_jax-compile")
    over = threading.Event()

    def walk() -> None:
        submitted = set()
        for batch in batches:
            if over.is_set():
                return
            if (shapes := shapes_of(batch)) not in submitted:
                submitted.add(shapes)
                pool.submit(compile, batch)

    pool.submit(walk)
    try:
        yield
    finally:
        over.set()
        pool.shutdown(wait=False, cancel_futures=True)
