"""`trainer.accelerator`: the attributes and methods of accelerate's Accelerator that scripts use."""

from __future__ import annotations

from types import SimpleNamespace
from typing import Any, NoReturn

import numpy as np

from trl_jax.config.base import BaseConfig
from trl_jax.mesh.processes import ProcessState

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

    def __init__(self, args: BaseConfig, end: Any):
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
