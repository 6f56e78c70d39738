"""A run's programs, made beside its steps where the host has nothing better to do."""

from __future__ import annotations

import contextlib
from dataclasses import replace
from itertools import islice
from typing import TYPE_CHECKING, Any

import jax
import numpy as np
from datasets import IterableDataset

from trl_jax.data.layout.plan import EARLY
from trl_jax.engine.compilation import Programs, compile_ahead
from trl_jax.engine.progress import Progress
from trl_jax.run.rng import run_key

if TYPE_CHECKING:
    from trl_jax.trainer.base_trainer import BaseTrainer


AT_ONCE = 4  # programs in the making


def compiles_ahead(device: str) -> bool:
    """On TPUs. A CPU computes the steps itself, and XLA for GPUs tries kernels out on the device."""
    return device == "tpu"


def compiling_ahead(
    trainer: BaseTrainer, step: Any, steps: Any, progress: Progress
) -> contextlib.AbstractContextManager:
    """Meanwhile threads compile `step` for the shapes of the early ones of `steps`, a loader, from `progress` on: those
    that fit them best, whichever serve until then."""
    known = isinstance(step, Programs) and not isinstance(steps.dataset, IterableDataset)
    if not known or not compiles_ahead(trainer.args.device.type):
        return contextlib.nullcontext()
    coming = replace(steps, buckets=replace(steps.buckets, ready=()))
    coming.set_epoch(progress.epoch + progress.epoch_over, 0 if progress.epoch_over else progress.pairs)
    model, state = trainer.model, trainer._optimizer_state
    params, state, frozen = (_shapes(trainer, arrays) for arrays in (model.params, state, model.frozen))
    key = run_key(trainer.args)

    def make(batch: Any) -> None:
        with trainer._on_device():
            step.program_for(params, state, batch, np.float32(0), key, frozen)

    left = trainer.state.max_steps - trainer.state.global_step
    return compile_ahead(make, (trainer._place(batch).arrays for batch in islice(coming, min(EARLY, left))), AT_ONCE)


def _shapes(trainer: BaseTrainer, arrays: Any) -> Any:
    """Arrays without their numbers: a step takes those away."""
    divided = trainer.sharding_plan is not None
    return jax.tree.map(
        lambda a: jax.ShapeDtypeStruct(a.shape, a.dtype, sharding=a.sharding if divided else None), arrays
    )
