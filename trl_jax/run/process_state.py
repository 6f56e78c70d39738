"""`args.distributed_state`: the attributes and methods of accelerate's PartialState that scripts use."""

from __future__ import annotations

import contextlib
from collections.abc import Callable, Iterator
from typing import Any, Protocol

import jax

from trl_jax.engine.devices.processes import barrier


class Places(Protocol):
    """The arguments that say where a run is."""

    device: Any
    world_size: int
    process_index: int

    def main_process_first(self, local: bool = True, desc: str = "work") -> contextlib.AbstractContextManager: ...


class ProcessState:
    """Which process of how many this is. `num_processes` counts devices: TRL has a process for each."""

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
        """Wait until every process has come here."""
        barrier("wait_for_everyone")

    @contextlib.contextmanager
    def main_process_first(self) -> Iterator[None]:
        """Run the block in the first process before the others."""
        with self._args.main_process_first(desc="a script's own"):
            yield

    local_main_process_first = main_process_first

    def on_main_process(self, function: Callable[..., Any]) -> Callable[..., Any]:
        """Decorate a function that the other processes pass over."""
        return function if self.is_main_process else _nothing

    on_local_main_process = on_main_process


def _nothing(*values: Any, **options: Any) -> None:
    """Do nothing."""
