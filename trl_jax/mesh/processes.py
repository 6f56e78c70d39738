"""Multi-process runs: joining, barriers, which process writes, and accelerate's PartialState and Accelerator."""

from __future__ import annotations

import contextlib
import functools
import os
import pickle
import signal
import socket
import sys
from collections.abc import Callable, Iterator
from types import SimpleNamespace
from typing import Any, NoReturn, Protocol
from weakref import WeakSet

import jax
import numpy as np
from jax.experimental import multihost_utils

from trl_jax.core import signals
from trl_jax.mesh.joining import call_roll
from trl_jax.mesh.watch import Watch

# `args.distributed_state`, with the parts of accelerate's PartialState that scripts use


class ProcessArguments(Protocol):
    """The arguments that describe the processes of a run."""

    device: Any
    world_size: int
    process_index: int

    def main_process_first(self, local: bool = True, desc: str = "work") -> contextlib.AbstractContextManager: ...


class ProcessState:
    """Which process this is, and of how many. `num_processes` counts devices: TRL runs one process per device."""

    local_process_index = 0
    is_local_main_process = True

    def __init__(self, args: ProcessArguments):
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


# Joining, and waiting for each other

HEARTBEAT = 30  # seconds without a heartbeat after which JAX considers a process dead
_SCHEDULERS = {"SLURM_NTASKS": "SLURM", "OMPI_COMM_WORLD_SIZE": "Open MPI"}
_ENVIRONMENT = ("JAX_COORDINATOR_ADDRESS", "JAX_NUM_PROCESSES", "JAX_PROCESS_ID")


@functools.cache
def _watch() -> Watch:
    return Watch()


def join(address: str | None, count: int | None, number: int | None, timeout: int) -> None:
    """Join the other processes of the run, if there are any. Call this before JAX initializes its devices.

    Arguments that are None are read from JAX_COORDINATOR_ADDRESS, JAX_NUM_PROCESSES and JAX_PROCESS_ID. Without an
    address, JAX asks SLURM, Open MPI or Cloud TPU for all three.

    Args:
        address: "host:port" of the first process.
        count: the number of processes.
        number: the number of this process, from 0.
        timeout: seconds to wait for the other processes.

    Raises:
        ValueError: an address without the other two or the reverse, or numbers that do not fit together.
        TimeoutError: not all processes joined in time.
    """
    if jax.distributed.is_initialized():  # by the script itself
        signals.default_in_children(signal.SIGTERM)
        _watch().start()
        return
    variables = [os.environ.get(name) for name in _ENVIRONMENT]
    arguments = (address, count, number)
    address, count, number = (
        variable if argument is None else argument for argument, variable in zip(arguments, variables, strict=True)
    )
    if address is not None:
        if count is None or number is None:
            raise ValueError(
                f"coordinator_address={address!r} also needs num_processes, the number of processes of the run, and "
                "process_id, the number of this process from 0."
            )
        count, number = _to_int("JAX_NUM_PROCESSES", count), _to_int("JAX_PROCESS_ID", number)
        call_roll(address, count, number, timeout)
        _connect(timeout, address, count, number)
    elif any(int(os.environ.get(name, "1")) > 1 for name in _SCHEDULERS) or _tpu_pod():
        _connect(timeout)
    elif arguments[1] not in (None, 1) or arguments[2] not in (None, 0):
        raise ValueError(
            f"num_processes={arguments[1]} and process_id={arguments[2]} also need coordinator_address, 'host:port' of "
            "the first process."
        )


def _to_int(variable: str, value: int | str) -> int:
    if isinstance(value, str) and not value.strip().removeprefix("-").isdecimal():
        raise ValueError(f"{variable} must be a whole number, got {value!r}.")
    return int(value)


def _connect(timeout: int, *address: Any) -> None:
    with _watch().joining(timeout):
        jax.distributed.initialize(*address, initialization_timeout=timeout, heartbeat_timeout_seconds=HEARTBEAT)
    signals.default_in_children(signal.SIGTERM)  # JAX's handler forwards it to other processes, but ends no child


def _tpu_pod() -> bool:
    return len(os.environ.get("TPU_WORKER_HOSTNAMES", "").split(",")) > 1


def several() -> bool:
    """Whether the run has more than one process. Starts JAX's devices if the processes have joined."""
    if not jax.distributed.is_initialized():
        return False
    _watch().start_devices()
    return jax.process_count() > 1


def is_first() -> bool:
    """Whether this process writes files and talks to the Hub."""
    return not several() or jax.process_index() == 0


def announce_end(error: Exception) -> None:
    """Tell the other processes that this process exits because of `error`, which was caught and will not propagate."""
    _watch().announce("ended", error)


@contextlib.contextmanager
def together(name: str) -> Iterator[None]:
    """A block in which the processes wait for each other.

    If a process raises in it or dies, the others exit within GRACE + LAST seconds, with exit code 1 and a line that
    names that process. If a process has not arrived after WAIT seconds, a line names it.

    Args:
        name: of the block, for these lines, such as "training".

    Raises:
        RuntimeError: a collective failed, because a process died (the message names it) or the network failed.
    """
    if not several():
        yield
        return
    with _watch().block(name):
        yield


def reached(name: str) -> None:
    """Note that this process begins a part of a block in which the processes wait for each other, such as a step."""
    if several():
        _watch().reached(name)


def barrier(name: str) -> None:
    """Wait until every process reaches the barrier of this name."""
    with together(name):
        if several():
            multihost_utils.sync_global_devices(name)


@together("exchanging data")
def from_first(data: bytes) -> bytes:
    """The first process's `data`, in all processes. It must have the same length everywhere."""
    if not several():
        return data
    return multihost_utils.process_allgather(np.frombuffer(data, np.uint8))[0].tobytes()


@together("exchanging data")
def from_all(data: bytes) -> list[bytes]:
    """The `data` of every process, in order, in all processes."""
    lengths = multihost_utils.process_allgather(np.asarray(len(data), np.int64)).reshape(-1).tolist()
    padded = np.frombuffer(data.ljust(max(lengths), b"\0"), np.uint8)
    rows = multihost_utils.process_allgather(padded)
    return [row[:length].tobytes() for row, length in zip(rows, lengths, strict=True)]


def of_each_process(function: Callable[[], Any]) -> list[Any]:
    """Call `do` in every process and return all results in order. Results are pickled.

    Raises:
        Exception: what `do` raised in this process.
        RuntimeError: `do` raised in another process, which is named.
    """
    result, error = None, None
    try:
        result = function()
    except Exception as raised:  # re-raised below, once the other processes know
        error = raised
    payload = pickle.dumps((result, error and f"{type(error).__name__}: {error}"))
    results = list(map(pickle.loads, from_all(payload)))
    if error is not None:
        raise error
    for number, (_, text) in enumerate(results):
        if text is not None:
            raise RuntimeError(f"Process {number} of this run raised {text} See its own log for the traceback.")
    return [value for value, _ in results]


@together("comparing arguments and data")
def check_alike(digests: dict[str, int]) -> None:
    """Check that all processes have the same values.

    Args:
        digests: description of a value -> its 32-bit digest.

    Raises:
        ValueError: in every process, naming the processes that differ.
    """
    if not several():
        return
    gathered = multihost_utils.process_allgather(np.asarray(list(digests.values()), np.uint32))
    names = multihost_utils.process_allgather(_encode_host(socket.gethostname()))
    for name, values in zip(digests, gathered.T, strict=True):
        differing = [number for number, value in enumerate(values.tolist()) if value != values[0]]
        if differing:
            hosts = {number: bytes(names[number]).rstrip(bytes(1)).decode() for number in differing}
            listed = ", ".join(f"{number} (on {host})" for number, host in hosts.items())
            raise ValueError(
                f"The processes of this run have different {name}: {listed} from process 0. Start the same script with "
                "the same arguments, data and package versions on each host."
            )


def _encode_host(text: str) -> np.ndarray:
    return np.frombuffer(text.encode()[:64].ljust(64, bytes(1)), np.uint8)


# `trainer.accelerator`: the attributes and methods of accelerate's Accelerator that scripts use

_INSTEAD = {
    "backward": "gradients are taken inside the compiled step; override compute_loss",
    "autocast": "bf16=True in the config computes in bfloat16",
    "clip_grad_norm_": "max_grad_norm in the config clips",
    "accumulate": "gradient_accumulation_steps in the config accumulates",
    "save_state": "trainer.train() writes checkpoints that save everything",
    "load_state": "trainer.train(resume_from_checkpoint=...) takes one up",
}


class Accelerator(ProcessState):
    """The parts of accelerate's Accelerator that make sense here.

    Raises:
        AttributeError: for all other attributes, with what to use instead.
    """

    parallelism_config = None
    sync_gradients = True

    def __init__(self, args: Any, end: Any):
        super().__init__(args)
        self.mixed_precision = "bf16" if args.compute_dtype == "bfloat16" else "no"
        self._end, self._prepared = end, WeakSet()
        process = {name: vars(self)[name] for name in ("num_processes", "process_index", "is_main_process")}
        self.state = SimpleNamespace(deepspeed_plugin=None, fsdp_plugin=None, **process)

    @property
    def gradient_accumulation_steps(self) -> int:
        return self._args.gradient_accumulation_steps

    @gradient_accumulation_steps.setter
    def gradient_accumulation_steps(self, value: int) -> None:
        if value != self.gradient_accumulation_steps:
            raise AttributeError(
                "gradient_accumulation_steps cannot be set on trainer.accelerator. Set it in the config."
            )

    def unwrap_model(self, model: Any, keep_fp32_wrapper: bool = True, keep_torch_compile: bool = True) -> Any:
        return model

    def get_state_dict(self, model: Any, unwrap: bool = True) -> dict[str, Any]:
        return model.state_dict()

    def gather(self, value: Any) -> Any:
        """The value itself: outside of a loss it covers all devices, and inside a loss, the rows that the loss got."""
        return value

    def gather_for_metrics(self, value: Any, use_gather_object: bool = False) -> Any:
        return value

    def pad_across_processes(self, value: Any, dim: int = 0, pad_index: int = 0, pad_first: bool = False) -> Any:
        return value

    def reduce(self, value: Any, reduction: str = "sum", scale: float = 1.0) -> Any:
        array = isinstance(value, jax.Array) or "torch" in type(value).__module__
        return (value if array else np.asarray(value)) * scale

    def prepare(self, *objects: Any, **options: Any) -> Any:
        """Data loaders unchanged: the trainer places their batches.

        Raises:
            AttributeError: something else was passed.
        """
        del options
        torch = sys.modules.get("torch")
        if torch is None or not all(isinstance(item, torch.utils.data.DataLoader) for item in objects):
            raise AttributeError(
                "trainer.accelerator has no prepare, except for data loaders: arrays are where JAX puts them."
            )
        self._prepared.update(objects)
        return objects[0] if len(objects) == 1 else objects

    def has_prepared(self, loader: Any) -> bool:
        return loader in self._prepared

    def log(self, values: dict[str, Any], step: int | None = None, log_kwargs: dict[str, Any] | None = None) -> None:
        """Does nothing, as in TRL, whose trainers start none of accelerate's trackers. `trainer.log(values)` logs."""

    def free_memory(self, *objects: Any) -> tuple:
        return objects

    def end_training(self) -> None:
        self._end()

    def __getattr__(self, name: str) -> NoReturn:
        advice = f": {_INSTEAD[name]}." if name in _INSTEAD else ": trl_jax does not use accelerate."
        raise AttributeError(f"trainer.accelerator has no {name}{advice}")
