"""The loss that a script's own `compute_loss` finds behind `super()`."""

from __future__ import annotations

from typing import Any

import jax
import jax.numpy as jnp

from trl_jax.data.example import LossBatch
from trl_jax.data.extras import Extras
from trl_jax.run.user_loss.token_logits import task_loss
from trl_jax.tasks.task import Task


def default_loss(task: Task, model: Any, inputs: dict[str, jax.Array], num_items: Any) -> tuple[jax.Array, Any]:
    """The task's loss of a batch, and the outputs that the model gave.

    Args:
        model: a `BoundModel`.
        inputs: as `compute_loss` gets them.
        num_items: the targets of the whole step, for a language model; None means the batch's own.
    """
    outputs = model(input_ids=inputs["input_ids"], attention_mask=inputs["attention_mask"])
    if task.head == "lm":
        loss, _ = task_loss(task, outputs.logits, inputs["labels"], num_items)
        return model.balanced(loss, outputs.aux_loss), outputs
    examples = len(outputs.logits) // len(task.columns.texts)
    extras = Extras({name: inputs[name] for name in task.columns.numbers if name in inputs})
    weight = jnp.full(examples, 1.0 / examples)
    return task.loss(outputs.logits[:, 0], LossBatch(weight, extras, examples))[0], outputs
