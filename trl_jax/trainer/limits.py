"""More memory than the machine has: what takes how much, and how to take less."""

from __future__ import annotations

import contextlib
from collections.abc import Iterator
from math import prod
from typing import TYPE_CHECKING

import jax

if TYPE_CHECKING:
    from trl_jax.trainer.task import Task


@contextlib.contextmanager
def told_of_memory(trainer: Task) -> Iterator[None]:
    """An allocation that fails becomes a MemoryError with what the run holds and how to hold less."""
    try:
        yield
    except jax.errors.JaxRuntimeError as error:
        if "RESOURCE_EXHAUSTED" not in str(error):
            raise
        raise MemoryError(f"{_plan(trainer)} XLA says: {str(error).strip().splitlines()[0]}") from error


def _plan(trainer: Task) -> str:
    args, (weights, gradients) = trainer.args, _held(trainer)
    rows = 2 * args.per_device_train_batch_size
    levers = [
        f"per_device_train_batch_size={args.per_device_train_batch_size} (with gradient_accumulation_steps raised to "
        "match, the steps stay the same)",
        "max_length" + ("" if args.max_length is None else f"={args.max_length}"),
    ]
    lower = f"Lower {' or '.join(levers)}"
    if not args.gradient_checkpointing:
        lower += ", or set gradient_checkpointing=True"
    if trainer.division is not None and trainer.division.size("fsdp") == 1:
        lower += ", or divide the model as well, with fsdp='full_shard'"
    return (
        f"Step {trainer.state.global_step + 1} does not fit into memory. Float32 weights take {_bytes(weights)}, "
        f"AdamW's moments {_bytes(2 * gradients)}, gradients {_bytes(gradients)}; the rest is activations of {rows} "
        f"answers. {lower}."
    )


def _held(trainer: Task) -> tuple[int, int]:
    """Bytes of weights and of gradients, those of one device where there are several."""
    params, division = trainer.model.params, trainer.division
    if division is None:
        return (4 * trainer.model.num_parameters(),) * 2
    places = division.params(params), division.gradients(params)
    weights, gradients = (
        sum(4 * prod(place[path].shard_shape(array.shape)) for path, array in params.items()) for place in places
    )
    return weights, gradients


def _bytes(count: int) -> str:
    return f"{count / 1e9:,.2f} GB"
