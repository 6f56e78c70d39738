"""How many completions a generation has, and whether they are whole groups."""

from __future__ import annotations


def generation_sizes(
    generation_batch_size: int | None, steps_per_generation: int | None, *, global_batch_size: int, accumulation: int
) -> tuple[int, int]:
    """(completions of a generation, micro-batches that they are divided into), of which one at most is set.

    Args:
        global_batch_size: completions of a micro-batch, over all devices.
        accumulation: micro-batches of a step.

    Raises:
        ValueError: both are set, or the completions do not make whole micro-batches.
    """
    if generation_batch_size is not None and steps_per_generation is not None:
        raise ValueError(
            "'generation_batch_size' and 'steps_per_generation' can not be both configured at the same time"
        )
    if generation_batch_size is None:
        steps = accumulation if steps_per_generation is None else steps_per_generation
        return global_batch_size * steps, steps
    if generation_batch_size % global_batch_size:
        raise ValueError(
            f"generation_batch_size ({generation_batch_size}) must be divisible by the global batch size "
            f"({global_batch_size})."
        )
    return generation_batch_size, generation_batch_size // global_batch_size


def check_groups(
    algorithm: str, *, generation_batch_size: int, num_generations: int, eval_batch_size: tuple[int, int] | None,
    num_generations_eval: int | None,
) -> None:  # fmt: skip
    """Raise ValueError, in TRL's words, where a batch would have a part of a prompt's completions.

    Args:
        eval_batch_size: completions of an evaluation's batch on a device, and devices; None without evaluation.
    """
    if eval_batch_size is not None:
        per_device, devices = eval_batch_size
        completions = num_generations_eval or num_generations
        if per_device * devices % completions:
            raise ValueError(
                f"The global eval batch size ({per_device} * {devices}) must be divisible by the number of generations "
                f"used for evaluation ({completions})."
            )
    if generation_batch_size % num_generations:
        raise ValueError(
            f"generation_batch_size ({generation_batch_size}) must be divisible by num_generations "
            f"({num_generations}). Raise per_device_train_batch_size, which counts completions, or "
            "gradient_accumulation_steps."
        )
    if num_generations < 2:
        raise ValueError(
            f"{algorithm} requires at least 2 generations per prompt to calculate the advantages. You provided "
            f"{num_generations}, which is less than the minimum required."
        )
