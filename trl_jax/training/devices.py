"""The devices of a run: how arrays are sharded, compilation (cache, compile ahead, remat), memory limits, and the SPMD
step."""

from __future__ import annotations

import contextlib
import ctypes
import functools
import grp
import logging
import os
import pwd
import stat
import sys
import threading
from collections.abc import Callable, Iterable, Iterator, Sequence
from concurrent.futures import Future, ThreadPoolExecutor
from dataclasses import fields
from functools import partial
from math import prod
from pathlib import Path
from typing import Any, Protocol

import jax
import jax.numpy as jnp
import numpy as np
from jax.experimental import multihost_utils
from jax.experimental.compilation_cache import compilation_cache
from jax.sharding import PartitionSpec

from trl_jax.config.devices import mesh_sizes, requested_mesh
from trl_jax.mesh.mesh import BATCH, SEQUENCE, ShardedParams, ShardingPlan, each_part, make_mesh, only
from trl_jax.mesh.processes import several

logger = logging.getLogger(__name__)

# The devices of a run, and how its arrays are sharded over them.


class DeviceArguments(Protocol):
    """The part of a configuration that determines a run's devices."""

    use_cpu: bool
    per_device_train_batch_size: int
    gradient_accumulation_steps: int
    dataloader_drop_last: bool
    accelerator_config: Any
    activation_offloading: bool
    tf32: bool
    device: Any

    def jax_devices(self) -> list[jax.Device]: ...


def run_devices(args: DeviceArguments) -> list[jax.Device]:
    """All devices that the run may use, in all processes."""
    return args.jax_devices()


def run_device(args: DeviceArguments) -> jax.Device:
    """The first device of this process."""
    run_devices(args)  # joins the processes first
    return jax.local_devices(backend="cpu" if args.use_cpu else None)[0]


@contextlib.contextmanager
def on_device(args: DeviceArguments) -> Iterator[None]:
    """Compute on the run's device. float32 matrix products are as exact as torch's, unless tf32 is set."""
    precision = "tensorfloat32" if args.tf32 and args.device.type == "cuda" else "float32"
    with jax.default_device(run_device(args)), jax.default_matmul_precision(precision):
        yield


def describe(sharding_plan: ShardingPlan, params: dict, state: Any) -> str:
    """One line about the mesh, and each device's share of the weights and of the optimizer state."""
    mesh = ", ".join(f"{axis} {size}" for axis, size in sharding_plan.mesh.shape.items() if size > 1)
    parts = []
    for name, tree in (("weights", params), ("optimizer's state", state)):
        leaves = jax.tree.leaves(tree)
        per_device = sum(prod(leaf.sharding.shard_shape(leaf.shape)) * leaf.dtype.itemsize for leaf in leaves)
        parts.append(f"{_bytes(per_device)} of {_bytes(sum(leaf.nbytes for leaf in leaves))} of the {name}")
    kind = sharding_plan.mesh.devices.flat[0].device_kind
    return f"Mesh {mesh} on {sharding_plan.mesh.size} devices ({kind}): each holds {' and '.join(parts)}."


def _bytes(count: int) -> str:
    unit, name = next(((unit, name) for unit, name in ((1e9, "GB"), (1e6, "MB")) if count >= unit), (1e3, "kB"))
    return f"{count / unit:.1f} {name}"


def sharding_plan_of(args: DeviceArguments) -> ShardingPlan | None:
    """How the run is sharded over devices; None for a single device."""
    sizes = mesh_sizes(args)
    count = prod(sizes.values())
    if count == 1:
        return None
    requested = requested_mesh({f.name: getattr(args, f.name) for f in fields(args)})
    options = {} if requested.whole_below is None else {"whole_below": requested.whole_below}
    mesh = make_mesh(sizes, run_devices(args)[:count])
    return ShardingPlan(mesh, "data" if requested.moments else None, **options)


# Compiled programs: an on-disk cache across runs, and in memory one program per batch shape.


_YNN, _DOTS_ALONE = "xla_cpu_experimental_ynn_fusion_type", "LIBRARY_FUSION_TYPE_INDIVIDUAL_DOT"
PROGRAMS_AT_ONCE = 4  # compiled in parallel while steps run
_CACHE_BYTES = 4 << 30  # beyond this size, JAX evicts the least recently used programs


def enable_compilation_cache() -> None:
    """Enable JAX's persistent compilation cache under `~/.cache/trl_jax/compiled`.

    JAX caches programs that take more than a second to compile. Call this before JAX compiles anything; it applies to
    the whole process. The user's own settings win: JAX_COMPILATION_CACHE_DIR names another folder,
    JAX_ENABLE_COMPILATION_CACHE=false turns the cache off, and XDG_CACHE_HOME moves `~/.cache`. The cache contains
    machine code that this process runs, so if other users can write to the folder, the cache is disabled with a
    warning. Bucket URLs are not checked.
    """
    if not jax.config.jax_enable_compilation_cache:
        return
    named = jax.config.jax_compilation_cache_dir
    if named is not None and "://" in named.removeprefix("file://"):
        return
    try:
        folder = private_folder(_cache_folder() if named is None else named.removeprefix("file://"))
    except OSError as error:
        logger.warning(
            "Compiled programs are not kept: %s JAX_COMPILATION_CACHE_DIR names another folder, "
            "JAX_ENABLE_COMPILATION_CACHE=false turns the cache off.", error,
        )  # fmt: skip
        jax.config.update("jax_enable_compilation_cache", False)
        compilation_cache.reset_cache()
        return
    if named is None and jax.config.jax_compilation_cache_max_size == -1:
        jax.config.update("jax_compilation_cache_max_size", _CACHE_BYTES)
    if named != str(folder):
        jax.config.update("jax_compilation_cache_dir", str(folder))
        compilation_cache.reset_cache()  # JAX reads the setting once and may already have done so


def _cache_folder() -> Path:
    return Path(os.environ.get("XDG_CACHE_HOME") or Path.home() / ".cache") / "trl_jax" / "compiled"


def compiler_options(device: str, several: bool) -> dict[str, Any]:
    """XLA's compiler options for a step on one or several "cpu", "cuda" or "tpu" devices."""
    if device == "cuda" and several:
        return {
            "xla_gpu_enable_latency_hiding_scheduler": True
        }  # overlap collectives with products; on TPUs they overlap by default
    if device == "cpu" and _YNN not in os.environ.get("XLA_FLAGS", "") and _takes_dots_alone():
        return {_YNN: _DOTS_ALONE}
    return {}


@functools.cache
def _takes_dots_alone() -> bool:
    """Whether this XLA has the option that sends only dot products to YNNPACK. By default, jaxlib 0.10 also sends
    reductions there, which makes a long step a sixth slower."""
    try:
        jax.jit(lambda: 0, compiler_options={_YNN: _DOTS_ALONE}).lower().compile()
    except jax.errors.JaxRuntimeError:
        return False
    return True


class Programs:
    """A step's compiled programs, one for each shape of the batch (the third argument); each is logged.

    Thread-safe: the first thread that needs a program compiles it, and the others wait.

    Args:
        compile: maps the step's arguments, or their shapes, to the compiled program.
        name: the step's name in the log.
    """

    def __init__(self, compile: Callable[..., Callable], name: str):
        self._compile, self._name = compile, name
        self._programs: dict[tuple, Future] = {}
        self._lock = threading.Lock()

    def __call__(self, *arguments: Any) -> Any:
        return self.program_for(*arguments).result()(*arguments)

    def program_for(self, *arguments: Any) -> Future:
        """The program for arguments of these shapes. Compiles it in this thread unless another has started to."""
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
        except BaseException as error:  # raised again by result()
            future.set_exception(error)
        return future


def return_freed_memory() -> None:
    """Return freed memory to the system: glibc would keep about 0.2 GB after compiling a step."""
    if (trim := _malloc_trim()) is not None:
        trim(0)


@functools.cache
def _malloc_trim() -> Callable[[int], int] | None:
    """glibc's `malloc_trim`; None on other systems and on Linux with musl."""
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


def compiles_ahead(device: str) -> bool:
    """Whether programs are compiled while steps run. Only on TPUs: a CPU is busy with the steps, and on GPUs XLA's
    autotuning times kernels on the device."""
    return device == "tpu"


@contextlib.contextmanager
def compile_ahead(compile: Callable[[Any], Any], batches: Iterable[Any], threads: int) -> Iterator[None]:
    """Within the block, compile in background threads: call `compile` once for each shape in `batches`, in order.

    For devices that leave the host idle. When the block ends, queued calls are cancelled; running ones finish.
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


# Rematerialization: pick the step that keeps as many activations as fit in memory.


_USABLE_SHARE = 0.95  # of an accelerator's memory; the rest is left for fragmentation


class RematFallback:
    """Compiles the first of several versions of a step that fits in memory.

    A version that did not fit is skipped for batches (the third argument) that are at least as large.

    Args:
        steps: equivalent jitted versions of the step, each using less memory and more time than the one before.
        room: bytes available on a device for a program and its arguments; 0 if unknown, which selects the last version.
    """

    def __init__(self, steps: Sequence[Callable], room: int):
        self._steps, self._room = steps, room
        self._refused: list[tuple[Callable, list[int]]] = []

    def __call__(self, *arguments: Any) -> Any:
        """Compile for these arguments: arrays or `ShapeDtypeStruct`s."""
        sizes = [leaf.size for leaf in jax.tree.leaves(arguments[2])]
        for step in self._steps[:-1] if self._room else ():
            if self._is_refused(step, sizes):
                continue
            program, needed = _compiled_with_size(step, *arguments)
            if program is not None and needed <= self._room:
                return program
            self._refused.append((step, sizes))
            logger.info(
                "gradient_checkpointing recomputes whole layers: saving matrix products would take %s of %.2f GB.",
                "more" if needed is None else f"{needed / 1e9:.2f}",
                self._room / 1e9,
            )
        return self._steps[-1].lower(*arguments).compile()

    def _is_refused(self, step: Callable, sizes: list[int]) -> bool:
        return any(
            refused_step is step and all(least <= size for least, size in zip(smaller, sizes, strict=True))
            for refused_step, smaller in self._refused
        )


def _compiled_with_size(step: Callable, *arguments: Any) -> tuple[Any, int | None]:
    """The program and the bytes it needs with its arguments; (None, None) if the compiler ran out of memory."""
    try:
        program = step.lower(*arguments).compile()
    except jax.errors.JaxRuntimeError as error:
        if "RESOURCE_EXHAUSTED" not in str(error):
            raise
        return None, None
    sizes = program.memory_analysis()
    outside = sizes.argument_size_in_bytes + sizes.output_size_in_bytes - sizes.alias_size_in_bytes
    return program, outside + sizes.temp_size_in_bytes


def device_memory_limit(device: jax.Device) -> int:
    """Device memory in bytes that a step may use: the minimum over all processes.

    It does not depend on current usage, so runs are bitwise reproducible.
    """
    room = local_memory_limit(device)
    return int(multihost_utils.process_allgather(np.asarray(room, np.float64)).min()) if several() else room


def local_memory_limit(device: jax.Device) -> int:
    """`device_memory_limit` for this process alone, without communication.

    On CPUs this is half of the host's memory divided by the number of local devices: data, evaluation and copies that
    are being saved need memory, too. 0 if the system does not report its memory.
    """
    stats = device.memory_stats() or {}
    on_host = "bytes_limit" not in stats
    return host_memory() // (2 * jax.local_device_count()) if on_host else usable_memory(stats["bytes_limit"])


def usable_memory(limit: int) -> int:
    """Bytes that a run may use of an accelerator on which JAX may allocate `limit` bytes."""
    return int(_USABLE_SHARE * limit)


# Host memory, total and available. A container's limit is respected.


GROUP = Path("/sys/fs/cgroup")  # this process's control group (v2), as seen in a container


def host_memory() -> int:
    """Total memory in bytes; 0 if unknown."""
    try:
        installed = os.sysconf("SC_PAGE_SIZE") * os.sysconf("SC_PHYS_PAGES")
    except (AttributeError, ValueError):  # no sysconf (Windows), or it lacks these names
        return 0
    limit = _limit()
    return installed if limit is None else min(installed, limit)


def available_host_memory() -> int | None:
    """Bytes that can still be allocated, as Linux estimates it; None on other systems."""
    meminfo = Path("/proc/meminfo")
    if not meminfo.exists():
        return None
    lines = dict(line.split(":", 1) for line in meminfo.read_text().splitlines())
    free, limit = 1024 * int(lines["MemAvailable"].split()[0]), _limit()
    return free if limit is None else min(free, limit - int((GROUP / "memory.current").read_text()))


def _limit() -> int | None:
    path = GROUP / "memory.max"
    text = path.read_text().strip() if path.exists() else "max"
    return None if text == "max" else int(text)


# A private folder for programs that this process will run.


_WHY = "and this process would execute files placed there. Use a directory that only you can access (chmod 700)."


def private_folder(path: str | Path) -> Path:
    """Resolve `path` to a folder that only this user can write to, creating it and its parents with mode 0700.

    Root is trusted. Parents may be writable by others if, as in /tmp, a sticky bit protects other users' files.

    Raises:
        PermissionError: another user can put files into the folder, or has done so.
        OSError: the folder cannot be created.
    """
    folder = Path(os.path.realpath(path))
    for part in reversed([folder, *folder.parents]):  # top down: below a safe folder, others cannot swap anything
        if not part.exists():
            part.mkdir(mode=0o700, exist_ok=True)
        _check(part, part.lstat(), inside=part == folder)
    for entry in os.scandir(folder):
        with contextlib.suppress(FileNotFoundError):  # another run of this user may be evicting programs
            _check_owner(Path(entry.path), entry.stat(follow_symlinks=False))
    return folder


def _check(folder: Path, status: os.stat_result, inside: bool) -> None:
    """inside: files will be written directly into this folder, so a sticky bit does not protect it."""
    if not stat.S_ISDIR(status.st_mode):
        raise NotADirectoryError(f"{folder} is not a directory.")
    _check_owner(folder, status)
    others = status.st_mode & stat.S_IWOTH or (status.st_mode & stat.S_IWGRP and not _is_own_group(status.st_gid))
    if others and (inside or not status.st_mode & stat.S_ISVTX):
        mode = stat.S_IMODE(status.st_mode)
        raise PermissionError(f"{folder} has mode {mode:04o}, so others can write to it, {_WHY}")


def _check_owner(path: Path, status: os.stat_result) -> None:
    if status.st_uid not in (os.geteuid(), 0):
        raise PermissionError(f"{path} belongs to user {status.st_uid} and not to {os.geteuid()}, {_WHY}")


def _is_own_group(group: int) -> bool:
    """Whether this user is the only member of the group (many systems create such a group for each user)."""
    try:
        user, entry = pwd.getpwuid(os.geteuid()).pw_name, grp.getgrgid(group)
    except KeyError:
        return False
    return entry.gr_name == user and set(entry.gr_mem) <= {user}


# The SPMD step: each device has its own examples; only parameters, gradients and sums are communicated.


class ShardedStep:
    """Maps functions of trained and frozen parameters (flat dicts by path) over the devices of a plan's mesh."""

    def __init__(self, sharding_plan: ShardingPlan, trained: dict[str, Any], frozen: dict[str, Any]):
        shapes = trained | frozen
        self.sharding_plan, self._trained = sharding_plan, trained
        self._axes = tuple(axis for axis in BATCH if sharding_plan.size(axis) > 1)
        self._all_axes = self._axes + ((SEQUENCE,) if sharding_plan.size(SEQUENCE) > 1 else ())
        specs = {path: sharding_plan.spec(path, leaf.shape) for path, leaf in shapes.items()}
        after = {path: place.spec for path, place in sharding_plan.gradients(shapes).items()}
        self._gradients = {path: only(BATCH, spec) for path, spec in after.items()}
        self._parts = ShardedParams(specs, filter(sharding_plan.scanned, shapes))

    def gradients(self, accumulate: Callable, loss: Callable) -> Callable:
        """Map `accumulate(jax.value_and_grad(loss), params, frozen, batch, key)` over the devices.

        The batch's arrays are `[passes, shards, ...]`, or `[passes, ...]` with a single shard. The returned loss is
        summed over shards, gradients are sharded as in `ShardingPlan.gradients`, and metrics are
        `[passes x shards, ...]`.
        """
        grad = jax.value_and_grad(self._parts.with_whole(self._once(loss), parameters=2), has_aux=True)

        def of_shard(params, frozen, batch, keys):
            batch = jax.tree.map(lambda leaf: leaf[:, 0], batch) if self.sharding_plan.shards > 1 else batch
            total, gradients, metrics = accumulate(grad, params, frozen, batch, None if keys is None else keys[0])
            gradients = {path: self._summed(path, gradient) for path, gradient in gradients.items()}
            return self._sum(total, self._all_axes), gradients, jax.tree.map(self._all_metrics, metrics)

        def run(params, frozen, batch, key):
            devices = self.sharding_plan.shards * self.sharding_plan.size(SEQUENCE)
            keys = None if key is None else jax.random.split(key, devices)
            of_batch, of_keys = PartitionSpec(None, self._axes), None if keys is None else PartitionSpec(self._all_axes)
            places = (self._parts.of(params), self._parts.of(frozen), of_batch, of_keys)
            results = (PartitionSpec(), {path: self._gradients[path] for path in params}, PartitionSpec())
            return self._mapped(of_shard, places, results)(params, frozen, batch, keys)

        return run

    def after_step(self, tx: Any) -> tuple:
        """The output shardings of a step: parameters, optimizer state and metrics."""
        state = jax.eval_shape(tx.init, self._trained)
        sharding_plan, shapes = self.sharding_plan, self._trained
        return sharding_plan.params(shapes), sharding_plan.state(state, shapes), sharding_plan.whole

    def scores(self, score: Callable) -> Callable:
        """Map `score(params, batch)` over the devices. The batch's arrays are `[shards, ...]`, one pass per shard; the
        result (an array or a dict of arrays) is also `[shards, ...]`."""

        def of_shard(params, batch):
            return jax.tree.map(partial(self._all, axis=0), self._parts.with_whole(score)(params, batch))

        def run(params, batch):
            places = (self._parts.of(params), PartitionSpec(self._axes))
            return self._mapped(of_shard, places, PartitionSpec())(params, batch)

        return run

    def _once(self, loss: Callable) -> Callable:
        """The loss, zeroed on all but the first device along the sequence axis, which all compute the same value."""
        if SEQUENCE not in self._all_axes:
            return loss

        def counted(*arguments):
            total, metrics = loss(*arguments)
            return jnp.where(jax.lax.axis_index(SEQUENCE) == 0, total, 0), metrics

        return counted

    def _mapped(self, function: Callable, places: Any, results: Any) -> Callable:
        if not self._all_axes:  # a single shard; XLA partitions the matrix products
            return self._named(function)
        # check_vma is off: gradients are taken inside of the shard_map, never through it.
        return jax.shard_map(
            function,
            mesh=self.sharding_plan.mesh,
            in_specs=places,
            out_specs=results,
            axis_names=set(self._all_axes),
            check_vma=False,
        )

    def _named(self, function: Callable) -> Callable:
        def run(*arguments):
            with jax.sharding.use_abstract_mesh(self.sharding_plan.mesh.abstract_mesh):
                return function(*arguments)

        return run

    def _summed(self, path: str, gradient: jax.Array) -> jax.Array:
        """Sum a device's gradient over all devices. Over fsdp, the transpose of the all-gather has already done so."""
        before, after = self._parts.own[path], self._gradients[path]
        left = [axis for axis in self._all_axes if axis not in before]
        for at, axis in enumerate(after):
            if axis is not None and axis in left:
                scatter = partial(jax.lax.psum_scatter, axis_name=axis, scatter_dimension=at, tiled=True)
                gradient = each_part(self._parts.tensor[path], scatter)(gradient)
                left.remove(axis)
        return self._sum(gradient, tuple(left))

    def _sum(self, value: jax.Array, axes: tuple[str, ...]) -> jax.Array:
        return jax.lax.psum(value, axes) if axes else value

    def _all(self, value: jax.Array, axis: int) -> jax.Array:
        """All-gather over the shards, onto a new axis."""
        return jax.lax.all_gather(value, self._axes, axis=axis) if self._axes else jnp.expand_dims(value, axis)

    def _all_metrics(self, metric: jax.Array) -> jax.Array:
        """All-gather `[passes, ...]` of each shard to `[passes x shards, ...]`."""
        return self._all(metric, axis=1).reshape(-1, *metric.shape[1:])
