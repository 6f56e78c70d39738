"""Compiled programs: kept on disk for the next run, and one for each shape of a batch."""

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

from trl_jax.engine.own_folder import own_folder

logger = logging.getLogger(__name__)

_YNN, _DOTS_ALONE = "xla_cpu_experimental_ynn_fusion_type", "LIBRARY_FUSION_TYPE_INDIVIDUAL_DOT"
_MOST_BYTES = 4 << 30  # the least recently used give way


def keep_compilations() -> None:
    """Let JAX keep what takes it more than a second to compile under `~/.cache/trl_jax/compiled`.

    What the user has settled stands: JAX_COMPILATION_CACHE_DIR names another place, JAX_ENABLE_COMPILATION_CACHE=false
    turns it off. (`XDG_CACHE_HOME` moves it, as it moves all of `~/.cache`.) What lies there is machine code that
    this process runs, so nothing is kept or read where others can write, and the log says so; call this before JAX
    compiles anything. A bucket's address is taken as it is.
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
        jax.config.update("jax_compilation_cache_max_size", _MOST_BYTES)
    if named != str(folder):
        jax.config.update("jax_compilation_cache_dir", str(folder))
        compilation_cache.reset_cache()  # JAX asks once, and may have asked before


def _compiled() -> Path:
    return Path(os.environ.get("XDG_CACHE_HOME") or Path.home() / ".cache") / "trl_jax" / "compiled"


def compiler_options(device: str, several: bool) -> dict[str, Any]:
    """What XLA does not do by itself: for a step on one "cpu", "cuda" or "tpu" device, or on several."""
    if device == "cuda" and several:
        return {"xla_gpu_enable_latency_hiding_scheduler": True}  # collectives run beside products; on TPUs they do
    if device == "cpu" and _YNN not in os.environ.get("XLA_FLAGS", "") and _takes_dots_alone():
        return {_YNN: _DOTS_ALONE}
    return {}


@functools.cache
def _takes_dots_alone() -> bool:
    """Whether this XLA can be told. Sums, too, go to YNNPACK in jaxlib 0.10, a sixth of a long step slower."""
    try:
        jax.jit(lambda: 0, compiler_options={_YNN: _DOTS_ALONE}).lower().compile()
    except jax.errors.JaxRuntimeError:
        return False
    return True


class Programs:
    """A step's program for each shape of its batch, which is the third argument; the log has a line for each.

    `compiled` makes one of what the step would be given. Threads may ask: each program is made once, by the first.
    """

    def __init__(self, compiled: Callable[..., Callable], name: str):
        self._compiled, self._name = compiled, name
        self._made: dict[tuple, Future] = {}
        self._lock = threading.Lock()

    def __call__(self, *given: Any) -> Any:
        return self.made(*given).result()(*given)

    def made(self, *given: Any) -> Future:
        """The program for what has these shapes: made here, unless another thread has it or is at it."""
        shapes = shapes_of(given[2])
        with self._lock:
            found = self._made.get(shapes)
            if found is not None:
                return found
            made = self._made[shapes] = Future()
            logger.info("%s compiles for shape %d: tokens %s.", self._name, len(self._made), _times(shapes[0]))
        try:
            program = self._compiled(*given)
            hand_back()
            made.set_result(program)
        except BaseException as error:  # for whoever asks for it
            made.set_exception(error)
        return made


def hand_back() -> None:
    """Give the system the memory that was freed: glibc keeps 0.2 GB of what the compiler took for a step."""
    if (trim := _malloc_trim()) is not None:
        trim(0)


@functools.cache
def _malloc_trim() -> Callable[[int], int] | None:
    """glibc's; other systems have none, nor has Linux with musl."""
    return getattr(ctypes.CDLL(None), "malloc_trim", None) if sys.platform == "linux" else None


def shapes_of(batch: Any) -> tuple[tuple[int, ...], ...]:
    return tuple(leaf.shape for leaf in jax.tree.leaves(batch))


def _times(shape: tuple[int, ...]) -> str:
    return "x".join(map(str, shape))


@contextlib.contextmanager
def ahead(make: Callable[[Any], Any], batches: Iterable[Any], most: int) -> Iterator[None]:
    """Meanwhile threads, `most` of them, `make` what the first of `batches` of each shape needs, in their order.

    For a device that computes while the host compiles. What a thread has begun when this ends it still finishes.
    """
    pool = ThreadPoolExecutor(most, thread_name_prefix="trl_jax-compile")
    over = threading.Event()

    def walk() -> None:
        seen = set()
        for batch in batches:
            if over.is_set():
                return
            if (shapes := shapes_of(batch)) not in seen:
                seen.add(shapes)
                pool.submit(make, batch)

    pool.submit(walk)
    try:
        yield
    finally:
        over.set()
        pool.shutdown(wait=False, cancel_futures=True)
