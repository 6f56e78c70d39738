"""Fields that TRL's RLOOConfig had up to 0.21, whose meaning needs more than another name."""

from __future__ import annotations

import warnings
from dataclasses import field
from typing import Any, Protocol


class OldArguments(Protocol):
    """The arguments that these fields are settled with."""

    missing_eos_penalty: float | None
    total_episodes: int | None
    max_steps: int
    num_iterations: int
    generation_batch_size: int
    steps_per_generation: int
    gradient_accumulation_steps: int


def missing_eos_penalty() -> Any:
    text = "Deprecated: what a completion without an end loses of its reward. Unset, nothing."
    return field(default=None, kw_only=True, metadata={"help": text})


def total_episodes() -> Any:
    text = "Deprecated: completions that are written in all, from which max_steps is made."
    return field(default=None, kw_only=True, metadata={"help": text})


def path(of: str) -> Any:
    text = f"Deprecated: where a script finds {of}; the trainer does not read it."
    return field(default=None, kw_only=True, metadata={"help": text})


def sanity_check() -> Any:
    text = "Deprecated: whether a script takes few rows; the trainer does not read it."
    return field(default=False, kw_only=True, metadata={"help": text})


def warn(args: OldArguments, stacklevel: int) -> None:
    """Warn of those that are set.

    Args:
        stacklevel: of the line that made the config, counted from the caller of this function.
    """
    if args.missing_eos_penalty is not None:
        text = (
            f"missing_eos_penalty={args.missing_eos_penalty:g} is of TRL up to 0.21, and honoured: a reward function "
            "takes it off where a completion has no end of text. Write such a function."
        )
        warnings.warn(text, FutureWarning, stacklevel=stacklevel + 1)
    if args.total_episodes is not None:
        text = (
            f"total_episodes={args.total_episodes} is of TRL up to 0.21, and honoured: so many completions are "
            "written, and max_steps follows from it. Use max_steps, or num_train_epochs."
        )
        warnings.warn(text, FutureWarning, stacklevel=stacklevel + 1)


def settle_steps(args: OldArguments) -> None:
    """Set max_steps by the completions that are written in all: each generation is as many steps as it is cut into,
    times num_iterations."""
    if args.total_episodes is None:
        return
    generations = -(-args.total_episodes // args.generation_batch_size)
    micro_batches = generations * args.steps_per_generation * args.num_iterations
    args.max_steps = -(-micro_batches // args.gradient_accumulation_steps)
