"""Out-of-memory errors: explain what takes how much and how to take less, or retry with smaller batches."""

from __future__ import annotations

import contextlib
import gc
import logging
from collections.abc import Callable, Iterator
from math import prod
from typing import TYPE_CHECKING, TypeVar

import jax

if TYPE_CHECKING:
    from trl_jax.run.state import RunState

logger = logging.getLogger(__name__)

T = TypeVar("T")


class StepTooLarge(MemoryError):
    """A training step did not fit; one of fewer examples may."""


def retried(run: Callable[[], T], size: Callable[[], int], again: Callable[[int], None]) -> T:
    """Return `run()`, retried with fewer examples while a step does not fit into memory.

    Each time with 0.9 times the examples, rounded down, as accelerate's `find_executable_batch_size`.

    Args:
        size: returns the examples of a micro-batch now.
        again: resets the run to begin with this many.

    Raises:
        StepTooLarge: not even one example fits.
    """
    while True:
        try:
            return run()
        except StepTooLarge as error:
            smaller = int(0.9 * size())
            if smaller == 0:
                raise
            reason = str(error).partition(".")[0]
        logger.warning("%s with per_device_train_batch_size=%d: starting again with %d.", reason, size(), smaller)
        gc.collect()  # frees the arrays of the failed run
        again(smaller)


@contextlib.contextmanager
def explain_memory(run: RunState) -> Iterator[None]:
    """Turn a failed allocation into a StepTooLarge that lists the run's memory and the ways to need less."""
    try:
        yield
    except jax.errors.JaxRuntimeError as error:
        if "RESOURCE_EXHAUSTED" not in str(error):
            raise
        raise StepTooLarge(f"{_explanation(run)} XLA says: {str(error).strip().splitlines()[0]}") from error


@contextlib.contextmanager
def explain_evaluation_memory(run: RunState) -> Iterator[None]:
    """Turn a failed allocation of an evaluation during training into a MemoryError: smaller steps would not help."""
    jax.block_until_ready(run.model.params)  # a step that did not fit may say so only now
    try:
        yield
    except jax.errors.JaxRuntimeError as error:
        if "RESOURCE_EXHAUSTED" not in str(error):
            raise
        raise MemoryError(
            f"The evaluation after step {run.state.global_step} does not fit into memory. Lower "
            f"per_device_eval_batch_size={run.args.per_device_eval_batch_size}, which auto_find_batch_size leaves "
            f"alone. XLA says: {str(error).strip().splitlines()[0]}"
        ) from error


def _explanation(run: RunState) -> str:
    args, size, (weights, gradients) = run.args, run.train_batch_size, _on_device(run)
    rows = len(run.task.columns.texts) * size
    settings = [
        f"per_device_train_batch_size={size} (with gradient_accumulation_steps raised to "
        "match, the steps stay the same)",
        "max_length" + ("" if args.max_length is None else f"={args.max_length}"),
    ]
    lower = f"Lower {' or '.join(settings)}"
    if not args.gradient_checkpointing:
        lower += ", or set gradient_checkpointing=True"
    if run.sharding_plan is not None and run.sharding_plan.size("fsdp") == 1:
        lower += ", or divide the model as well, with fsdp='full_shard'"
    return (
        f"Step {run.state.global_step + 1} does not fit into memory. Weights take {_bytes(weights)}, "
        f"AdamW's moments {_bytes(2 * gradients)}, gradients {_bytes(gradients)}; the rest is activations of {rows} "
        f"texts. {lower}."
    )


def _on_device(run: RunState) -> tuple[int, int]:
    """Bytes of weights, frozen ones too, and of gradients; those of one device where there are several."""
    model, sharding_plan = run.model, run.sharding_plan
    if sharding_plan is None:
        return sum(array.nbytes for array in run.arrays.values()), 4 * model.num_parameters(only_trainable=True)

    def on_device(arrays: dict, places: dict) -> int:
        return sum(array.dtype.itemsize * prod(places[path].shard_shape(array.shape)) for path, array in arrays.items())

    return on_device(model.arrays, sharding_plan.params(model.arrays)), on_device(
        model.params, sharding_plan.gradients(model.params)
    )


def _bytes(count: int) -> str:
    return f"{count / 1e9:,.2f} GB"
