"""The methods of a trainer that a script may have overridden, as the parts of a run call them."""

from __future__ import annotations

from collections.abc import Callable, Collection
from typing import Any, NamedTuple

from trl_jax.engine.checkpoints.progress import Progress


class TrainerHooks(NamedTuple):
    """Bound methods of the trainer, under their own names.

    settle_task: lets `run.task` be the task by the arguments, and what was set on the trainer, as they are now.
    script_values: the numbers and words that a script put on its trainer, by name.
    set_by_script: the names of all that was set on the trainer itself, methods included.
    """

    compute_loss: Callable
    create_optimizer: Callable[[], Any]
    evaluate: Callable[[], dict[str, float]]
    get_train_dataloader: Callable[[], Any]
    log: Callable[..., None]
    loss: Callable
    settle_task: Callable[[], None]
    prediction_step: Callable
    save_checkpoint: Callable[[Progress], None]
    save_model: Callable[..., None]
    script_values: Callable[[], tuple[tuple[str, Any], ...]]
    set_by_script: Callable[[], Collection[str]]
