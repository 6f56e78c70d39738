"""The methods of a trainer that a script may override, as the parts of a run call them."""

from __future__ import annotations

from collections.abc import Callable, Collection
from typing import Any, NamedTuple

from trl_jax.training.checkpoint import LoopProgress
from trl_jax.training.data import Tokens


class Hooks(NamedTuple):
    """Methods of the trainer under their own names, looked up when they are called: a script may set others on the
    trainer at any time. `BaseTrainer._hooks` is the only place that makes them.

    loss: returns the script's own `loss`; None if it has none, and the step calls `Forward.loss` directly.
    own_loss: the script's own loss, in the place of the task's (`script_loss.OwnLoss`); None without one.
    overridden: names that a script's own subclass of the trainer defines.
    prepare_dataset: `(dataset, name, tokens) -> prepared dataset`, for the datasets of the constructor.
    script_values: the numbers and strings that a script has set on its trainer, by name.
    set_by_script: the names of everything that is set on the trainer itself, methods included.
    settle_task: updates the run's task from the arguments and from what was set on the trainer.
    """

    compute_loss: Callable
    create_optimizer: Callable[[], Any]
    evaluate: Callable[[], dict[str, float]]
    get_train_dataloader: Callable[[], Any]
    log: Callable[..., None]
    loss: Callable[[], Callable | None]
    overridden: frozenset[str]
    prediction_step: Callable
    prepare_dataset: Callable[[Any, str, Tokens], Any]
    save_checkpoint: Callable[[LoopProgress], None]
    save_model: Callable[..., None]
    script_values: Callable[[], tuple[tuple[str, Any], ...]]
    set_by_script: Callable[[], Collection[str]]
    settle_task: Callable[[], None]
    own_loss: Any = None
