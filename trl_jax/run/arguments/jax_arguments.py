"""transformers' TrainingArguments without torch: devices and processes are JAX's."""

import contextlib
from dataclasses import dataclass
from math import prod
from typing import Any

from transformers import TrainingArguments
from transformers.trainer_utils import SchedulerType
from transformers.training_args import ParallelMode

from trl_jax.core.arguments.parallel import mesh_sizes
from trl_jax.run.arguments.launchers import launcher_aside

# transformers hands these to torch inside __post_init__; here the table of arguments handles them.
TORCH_ONLY = {
    **dict.fromkeys(("torch_compile_backend", "torch_compile_mode", "tf32", "fsdp", "fsdp_config", "deepspeed")),
    "torch_compile": False,
    "parallelism_config": None,
}


@dataclass(frozen=True)
class Device:
    """Stands in for torch.device where scripts read `args.device`. JAX starts its backend when `type` is read."""

    use_cpu: bool

    @property
    def type(self) -> str:
        """One of cpu, cuda (torch's word for a GPU, which scripts compare with) and tpu."""
        if self.use_cpu:
            return "cpu"
        import jax

        backend = jax.default_backend()
        return "cuda" if backend == "gpu" else backend

    @property
    def index(self) -> int | None:
        return None if self.type == "cpu" else 0

    def __str__(self) -> str:
        return self.type if self.index is None else f"{self.type}:{self.index}"


class JaxArguments(TrainingArguments):
    """TrainingArguments whose construction asks torch for nothing, and whose properties answer for JAX."""

    def __post_init__(self):
        aside = {name: getattr(self, name) for name in TORCH_ONLY}
        for name, nothing in TORCH_ONLY.items():
            setattr(self, name, nothing)
        with launcher_aside():
            super().__post_init__()
        for name, value in aside.items():
            setattr(self, name, value)

    def _validate_args(self):
        # With torch installed, transformers asks it for a bfloat16 GPU unless the run is on the CPU; without, it has no
        # schedule that follows a plateau.
        use_cpu, schedule = self.use_cpu, self.lr_scheduler_type
        self.use_cpu, self.lr_scheduler_type = True, SchedulerType.LINEAR
        try:
            super()._validate_args()
        finally:
            self.use_cpu, self.lr_scheduler_type = use_cpu, schedule

    @property
    def device(self) -> Device:
        return Device(use_cpu=self.use_cpu)

    @property
    def n_gpu(self) -> int:
        """1 on an accelerator, as for each of torchrun's processes, however many there are."""
        return 0 if self.device.type == "cpu" else 1

    @property
    def parallel_mode(self) -> ParallelMode:
        return ParallelMode.DISTRIBUTED if self.world_size > 1 else ParallelMode.NOT_PARALLEL

    @property
    def world_size(self) -> int:
        """Devices of the run, over all processes: TRL has a process for each. JAX starts when it is read."""
        return prod(mesh_sizes(self).values())

    @property
    def data_parallel_size(self) -> int:
        """How many devices, or groups of them, have per_device_train_batch_size examples each: data x fsdp."""
        sizes = mesh_sizes(self)
        return sizes.get("data", 1) * sizes.get("fsdp", 1)

    @property
    def process_index(self) -> int:
        import jax

        return jax.process_index() if jax.distributed.is_initialized() else 0

    @property
    def local_process_index(self) -> int:
        """Always 0: a host has one process."""
        return 0

    @contextlib.contextmanager
    def main_process_first(self, local: bool = True, desc: str = "work"):
        """Run the block in the first process before the others, which then find its results in a shared cache."""
        from trl_jax.engine.devices.processes import barrier

        if self.process_index:
            barrier(f"main_process_first: {desc}")
        yield
        if not self.process_index:
            barrier(f"main_process_first: {desc}")

    @property
    def distributed_state(self) -> Any:
        """The part of accelerate's PartialState that scripts use. JAX starts when it is read."""
        from trl_jax.run.process_state import ProcessState

        return ProcessState(self)

    @property
    def should_log(self) -> bool:
        return self.process_index == 0

    @property
    def should_save(self) -> bool:
        return self.process_index == 0

    @property
    def train_batch_size(self) -> int:
        return self.per_device_train_batch_size

    @property
    def eval_batch_size(self) -> int:
        return self.per_device_eval_batch_size
