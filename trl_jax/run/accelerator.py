"""`trainer.accelerator`: the attributes and methods of accelerate's class that scripts use."""

from __future__ import annotations

from types import SimpleNamespace
from typing import Any, NoReturn

import jax
import numpy as np

from trl_jax.engine.devices.processes import barrier
from trl_jax.run.arguments.base_config import BaseConfig

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


class Accelerator:
    """The part of accelerate's Accelerator that has a meaning here. `num_processes` counts devices: TRL has a process
    for each.

    Raises:
        AttributeError: for every other attribute, with what to use instead.
    """

    local_process_index = 0
    is_local_main_process = True
    parallelism_config = None
    sync_gradients = True

    def __init__(self, args: BaseConfig, end: Any):
        self.device, self.mixed_precision = args.device, "bf16" if args.compute_dtype == "bfloat16" else "no"
        self._args, self._end = args, end
        self.num_processes, self.process_index = args.world_size, args.process_index
        self.is_main_process, self.use_distributed = self.process_index == 0, self.num_processes > 1
        self.is_last_process = self.process_index == jax.process_count() - 1
        self.distributed_type = "MULTI_DEVICE" if self.use_distributed else "NO"
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

    def print(self, *values: Any, **options: Any) -> None:
        if self.is_main_process:
            print(*values, **options)

    def unwrap_model(self, model: Any, keep_fp32_wrapper: bool = True, keep_torch_compile: bool = True) -> Any:
        return model

    def wait_for_everyone(self) -> None:
        """Wait until every process has come here."""
        barrier("accelerator.wait_for_everyone")

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
