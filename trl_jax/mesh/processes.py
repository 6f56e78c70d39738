"""Multi-process runs: joining, barriers, which process writes, and accelerate's PartialState and Accelerator."""

from __future__ import annotations

import atexit
import contextlib
import os
import pickle
import socket
import sys
import threading
from collections.abc import Callable, Iterator
from types import SimpleNamespace
from typing import Any, NoReturn, Protocol

import jax
import numpy as np
from jax.experimental import multihost_utils

from trl_jax.core.text import say

# `args.distributed_state`, with the parts of accelerate's PartialState that scripts use


class Places(Protocol):
    """The arguments that describe the processes of a run."""

    device: Any
    world_size: int
    process_index: int

    def main_process_first(self, local: bool = True, desc: str = "work") -> contextlib.AbstractContextManager: ...


class ProcessState:
    """Which process this is, and of how many. `num_processes` counts devices: TRL runs one process per device."""

    local_process_index = 0
    is_local_main_process = True

    def __init__(self, args: Places):
        self._args, self.device = args, args.device
        self.num_processes, self.process_index = args.world_size, args.process_index
        self.is_main_process, self.use_distributed = self.process_index == 0, self.num_processes > 1
        self.is_last_process = self.process_index == jax.process_count() - 1
        self.distributed_type = "MULTI_DEVICE" if self.use_distributed else "NO"

    def print(self, *values: Any, **options: Any) -> None:
        if self.is_main_process:
            print(*values, **options)

    def wait_for_everyone(self) -> None:
        """Wait until every process gets here."""
        barrier("wait_for_everyone")

    @contextlib.contextmanager
    def main_process_first(self) -> Iterator[None]:
        """Run the block in the first process before the others run it."""
        with self._args.main_process_first(desc="a script's own"):
            yield

    local_main_process_first = main_process_first

    def on_main_process(self, function: Callable[..., Any]) -> Callable[..., Any]:
        """Decorate a function so that only the first process runs it."""
        return function if self.is_main_process else _do_nothing

    on_local_main_process = on_main_process


def _do_nothing(*values: Any, **options: Any) -> None:
    """Stand-in for a function that only the first process runs."""


# Joining, and detecting processes that died

HEARTBEAT = 30  # seconds without a heartbeat after which a process is considered dead
GRACE = 8  # seconds this process gets to raise the exception by itself after another process raised it
LAST = 15  # seconds to wait for the other processes when exiting
_SCHEDULERS = {"SLURM_NTASKS": "SLURM", "OMPI_COMM_WORLD_SIZE": "Open MPI"}
_ENVIRONMENT = ("JAX_COORDINATOR_ADDRESS", "JAX_NUM_PROCESSES", "JAX_PROCESS_ID")


def join(address: str | None, count: int | None, number: int | None) -> None:
    """Join the other processes of the run, if there are any. Call this before JAX initializes its devices.

    Arguments that are None are read from JAX_COORDINATOR_ADDRESS, JAX_NUM_PROCESSES and JAX_PROCESS_ID. Without an
    address, JAX asks SLURM, Open MPI or Cloud TPU for all three.

    Args:
        address: "host:port" of the first process.
        count: the number of processes.
        number: the number of this process, from 0.

    Raises:
        ValueError: an address without the other two.
    """
    if jax.distributed.is_initialized():  # by the script itself
        _watch.start()
        return
    variables = [os.environ.get(name) for name in _ENVIRONMENT]
    arguments = (address, count, number)
    address, count, number = (
        variable if argument is None else argument for argument, variable in zip(arguments, variables, strict=True)
    )
    options: dict[str, Any] = {"heartbeat_timeout_seconds": HEARTBEAT}
    if address is not None:
        if count is None or number is None:
            raise ValueError(
                f"coordinator_address={address!r} also needs num_processes, the number of processes of the run, and "
                "process_id, the number of this process from 0."
            )
        jax.distributed.initialize(address, int(count), int(number), **options)
    elif any(int(os.environ.get(name, "1")) > 1 for name in _SCHEDULERS) or _tpu_pod():
        jax.distributed.initialize(**options)
    if jax.distributed.is_initialized():
        _watch.start()


def _tpu_pod() -> bool:
    return len(os.environ.get("TPU_WORKER_HOSTNAMES", "").split(",")) > 1


def several() -> bool:
    """Whether the run has more than one process."""
    return jax.distributed.is_initialized() and jax.process_count() > 1


def is_first() -> bool:
    """Whether this process writes files and talks to the Hub."""
    return not several() or jax.process_index() == 0


class AgreedExit(SystemExit):
    """All processes exit after the same step; this is not a failure."""


class _Watch:
    """Exits this process if another one raised an exception in a block of `together`, or exited.

    Such a process never reaches the collective in which this one waits, and Python code cannot interrupt that wait.
    A background thread therefore polls what the processes announce through JAX's coordination service. All processes
    run the same code, so they number their blocks alike. A process that raises the same exception within GRACE seconds
    is left alone.
    """

    def __init__(self) -> None:
        self.blocks: list[int] = []  # numbers of the blocks this process is in
        self.raising = False  # whether an exception is propagating out of them
        self._client: Any = None
        self._thread: threading.Thread | None = None  # started with the first block: until then, scripts may fork
        self._count, self._over = 0, threading.Event()

    def start(self) -> None:
        if self._client is None:
            self._client = _client()
            atexit.register(self._stop)  # runs before JAX's own exit handler waits for all processes

    @contextlib.contextmanager
    def block(self) -> Iterator[None]:
        if self._thread is None:
            self.start()
            self._thread = threading.Thread(target=self._look, name="trl_jax-processes", daemon=True)
            self._thread.start()
        self._count += 1
        number, self.raising = self._count, False
        self.blocks.append(number)
        try:
            yield
        except AgreedExit:
            raise
        except BaseException as error:  # re-raised
            self.raising = True
            self.announce(f"left/{number}", error)
            raise
        finally:
            self.blocks.remove(number)

    def announce(self, what: str, error: BaseException) -> None:
        if self._client is None:
            return
        with contextlib.suppress(jax.errors.JaxRuntimeError):  # the first process, which hosts the service, is gone
            key = f"trl_jax/{what}/{jax.process_index()}"
            self._client.key_value_set(key, type(error).__name__, allow_overwrite=True)

    def _look(self) -> None:
        found, seconds = None, 0
        while not self._over.wait(1):
            try:
                now = self._announced()
            except jax.errors.JaxRuntimeError:  # the first process is gone: JAX ends this one
                return
            seconds = seconds + 1 if now == found and now is not None else 0
            found = now
            if found is not None and seconds >= GRACE:
                _exit_process(*found[1:])

    def _announced(self) -> tuple[int, str, str] | None:
        """The block in which another process failed, that process, and its exception."""
        for number in [] if self.raising else tuple(self.blocks):
            for what in (f"left/{number}", "ended"):
                for key, name in self._client.key_value_dir_get(f"trl_jax/{what}/"):
                    process = key.rpartition("/")[2]
                    if process != str(jax.process_index()):
                        return number, process, name
        return None

    def _stop(self) -> None:
        self._over.set()
        if self._thread is not None:
            self._thread.join(2)
        if "last_value" in vars(sys):  # an unhandled exception, which Python has printed, ends this process
            self.announce("ended", sys.last_value)


_watch = _Watch()


def announce_end(error: Exception) -> None:
    """Tell the other processes that this process exits because of `error`, which was caught and will not propagate."""
    _watch.announce("ended", error)


@contextlib.contextmanager
def together() -> Iterator[None]:
    """A block in which the processes wait for each other. If one process raises in it, the others exit within
    GRACE + LAST seconds, with exit code 1 and a line that names the failed process."""
    if not several():
        yield
        return
    with _watch.block():
        yield


def _exit_process(process: str, error: str) -> None:
    say(
        f"Process {process} of {jax.process_count()} ended with {error} (see its own log), so this process, number "
        f"{jax.process_index()}, exits too. Checkpoints are never partial: restart all processes with "
        "resume_from_checkpoint=True."
    )
    for stream in (sys.stdout, sys.stderr):
        with contextlib.suppress(OSError, ValueError):  # closed
            stream.flush()
    # Processes wait for each other here. If this one just exited, JAX would abort the others.
    last = threading.Thread(target=jax.distributed.shutdown, daemon=True)
    last.start()
    last.join(LAST)
    os._exit(1)  # the main thread is stuck in a collective


@together()
def barrier(name: str) -> None:
    """Wait until every process reaches the barrier of this name."""
    if several():
        multihost_utils.sync_global_devices(name)


@together()
def from_first(data: bytes) -> bytes:
    """The first process's `data`, in all processes. It must have the same length everywhere."""
    if not several():
        return data
    return multihost_utils.process_allgather(np.frombuffer(data, np.uint8))[0].tobytes()


@together()
def from_all(data: bytes) -> list[bytes]:
    """The `data` of every process, in order, in all processes."""
    lengths = multihost_utils.process_allgather(np.asarray(len(data), np.int64)).reshape(-1).tolist()
    padded = np.frombuffer(data.ljust(max(lengths), b"\0"), np.uint8)
    found = multihost_utils.process_allgather(padded)
    return [row[:length].tobytes() for row, length in zip(found, lengths, strict=True)]


def of_each_process(do: Callable[[], Any]) -> list[Any]:
    """Call `do` in every process and return all results in order. Results are pickled.

    Raises:
        Exception: what `do` raised in this process.
        RuntimeError: `do` raised in another process, which is named.
    """
    mine, error = None, None
    try:
        mine = do()
    except Exception as raised:  # re-raised below, once the other processes know
        error = raised
    found = [pickle.loads(one) for one in from_all(pickle.dumps((mine, error and f"{type(error).__name__}: {error}")))]
    if error is not None:
        raise error
    for number, (_, text) in enumerate(found):
        if text is not None:
            raise RuntimeError(f"Process {number} of this run raised {text} See its own log for the traceback.")
    return [value for value, _ in found]


@together()
def check_alike(facts: dict[str, int]) -> None:
    """Check that all processes have the same values.

    Args:
        facts: description of a value -> its 32-bit digest.

    Raises:
        ValueError: in every process, naming the processes that differ.
    """
    if not several():
        return
    gathered = multihost_utils.process_allgather(np.asarray(list(facts.values()), np.uint32))
    names = multihost_utils.process_allgather(_encoded(socket.gethostname()))
    for name, values in zip(facts, gathered.T, strict=True):
        others = [number for number, value in enumerate(values.tolist()) if value != values[0]]
        if others:
            shown = ", ".join(f"{number} (on {bytes(names[number]).rstrip(bytes(1)).decode()})" for number in others)
            raise ValueError(
                f"The processes of this run have different {name}: {shown} from process 0. Start the same script with "
                "the same arguments, data and package versions on each host."
            )


@contextlib.contextmanager
def naming_lost_processes() -> Iterator[None]:
    """Explain a collective that failed because another process died, within HEARTBEAT seconds of the failure.

    Raises:
        RuntimeError: naming the processes that died. If a collective hangs instead of failing, JAX ends this process
            after HEARTBEAT seconds.
    """
    try:
        yield
    except jax.errors.JaxRuntimeError as error:
        dead = _dead_processes() if several() else []
        if not dead:
            raise
        raise RuntimeError(
            f"Process {' and '.join(map(str, dead))} of {jax.process_count()} has died (see its own log), so this "
            f"process, number {jax.process_index()}, cannot continue. Checkpoints are never partial: restart all "
            "processes with resume_from_checkpoint=True."
        ) from error


def _client() -> Any:
    from jax._src import distributed  # JAX has no public access to the coordination service

    return distributed.global_state.client


def _dead_processes() -> list[int]:
    every = list(range(jax.process_count()))
    try:
        alive = _client().get_live_nodes(every)
    except jax.errors.JaxRuntimeError:  # the first process, which answers, is gone
        return [] if jax.process_index() == 0 else [0]
    return [number for number in every if number not in alive]


def _encoded(text: str) -> np.ndarray:
    return np.frombuffer(text.encode()[:64].ljust(64, bytes(1)), np.uint8)


# `trainer.accelerator`: the attributes and methods of accelerate's Accelerator that scripts use

_INSTEAD = {
    "backward": "gradients are taken inside the compiled step; override compute_loss",
    "prepare": "arrays are where JAX puts them",
    "autocast": "bf16=True in the config computes in bfloat16",
    "clip_grad_norm_": "max_grad_norm in the config clips",
    "accumulate": "gradient_accumulation_steps in the config accumulates",
    "save_state": "trainer.train() writes checkpoints that save everything",
    "load_state": "trainer.train(resume_from_checkpoint=...) takes one up",
    "get_state_dict": "trainer.model.params is the dict of arrays",
}


class Accelerator(ProcessState):
    """The part of accelerate's Accelerator that has a meaning here.

    Raises:
        AttributeError: for every other attribute, with what to use instead.
    """

    parallelism_config = None
    sync_gradients = True

    def __init__(self, args: Any, end: Any):
        super().__init__(args)
        self.mixed_precision = "bf16" if args.compute_dtype == "bfloat16" else "no"
        self._end = end
        self.state = SimpleNamespace(
            deepspeed_plugin=None,
            fsdp_plugin=None,
            num_processes=self.num_processes,
            process_index=self.process_index,
            is_main_process=self.is_main_process,
        )

    @property
    def gradient_accumulation_steps(self) -> int:
        return self._args.gradient_accumulation_steps

    @gradient_accumulation_steps.setter
    def gradient_accumulation_steps(self, value: int) -> None:
        if value != self.gradient_accumulation_steps:
            raise AttributeError(
                "gradient_accumulation_steps was set on trainer.accelerator, which divides no loss here. Say it in the "
                "config."
            )

    def unwrap_model(self, model: Any, keep_fp32_wrapper: bool = True, keep_torch_compile: bool = True) -> Any:
        return model

    def gather(self, value: Any) -> Any:
        """The value itself: it already covers all devices."""
        return value

    def gather_for_metrics(self, value: Any, use_gather_object: bool = False) -> Any:
        return value

    def reduce(self, value: Any, reduction: str = "sum", scale: float = 1.0) -> Any:
        return np.asarray(value) * scale

    def free_memory(self, *objects: Any) -> tuple:
        return objects

    def end_training(self) -> None:
        self._end()

    def __getattr__(self, name: str) -> NoReturn:
        instead = f": {_INSTEAD[name]}." if name in _INSTEAD else " in trl_jax, whose runs accelerate has no part in."
        raise AttributeError(f"trainer.accelerator has no {name}{instead}")
