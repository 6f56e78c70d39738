"""Compile the programs of a run in threads while its steps run, on devices that leave the host idle."""

from __future__ import annotations

import contextlib
from dataclasses import replace
from itertools import islice
from typing import Any

import jax
import numpy as np
from datasets import IterableDataset

from trl_jax.data.layout.buckets import EARLY
from trl_jax.data.loader import ExampleLoader
from trl_jax.engine.checkpoints.progress import Progress
from trl_jax.engine.devices.compilation import Programs, compile_ahead
from trl_jax.run.devices import PROGRAMS_AT_ONCE, compiles_ahead
from trl_jax.run.state import RunState
from trl_jax.run.step.rng import run_key
from trl_jax.run.step.train_step import TrainStep


def compiling_ahead(
    run: RunState, train_step: TrainStep, step: Any, steps: ExampleLoader, progress: Progress
) -> contextlib.AbstractContextManager:
    """A context in which threads compile `step` for the shapes of the loader's first steps after `progress`.

    They compile the buckets that fit these steps best; longer ones serve until they are ready.
    """
    known = isinstance(steps, ExampleLoader) and isinstance(step, Programs)
    known = known and not isinstance(steps.dataset, IterableDataset)
    if not known or not compiles_ahead(run.args.device.type):
        return contextlib.nullcontext()
    coming = steps.laid_out(buckets=replace(steps.step_layout.buckets, serves_from=()))
    coming.set_epoch(progress.epoch + progress.epoch_over, 0 if progress.epoch_over else progress.examples)
    arrays = run.model.params, run.progress.optimizer_state, run.frozen
    params, state, frozen = (_shapes(part, placed=run.sharding_plan is not None) for part in arrays)
    key = run_key(run.args, run.model.backend)

    def make(batch: Any) -> None:
        with run.on_device():
            step.program_for(params, state, batch, np.float32(0), key, frozen)

    left = run.state.max_steps - run.state.global_step
    return compile_ahead(
        make, (train_step.placed(batch).arrays for batch in islice(coming, min(EARLY, left))), PROGRAMS_AT_ONCE
    )


def _shapes(arrays: Any, *, placed: bool) -> Any:
    """Shapes of arrays: the arrays themselves are donated to the step."""
    return jax.tree.map(
        lambda a: jax.ShapeDtypeStruct(a.shape, a.dtype, sharding=a.sharding if placed else None), arrays
    )
