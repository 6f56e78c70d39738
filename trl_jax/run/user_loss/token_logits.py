"""A language model's numbers from whole logits: for scripts that ask for those. The step itself never holds them."""

from __future__ import annotations

from types import SimpleNamespace
from typing import Any

import jax
import jax.numpy as jnp

from trl_jax.data.example import IGNORED, LossBatch
from trl_jax.data.extras import Extras
from trl_jax.nn.head.logits import outputs_of_logits
from trl_jax.tasks.task import TokenTask


def pass_of_logits(task: TokenTask, logits: jax.Array, labels: jax.Array) -> dict[str, jax.Array]:
    """`task.of_pass` of rows of a text each.

    Args:
        logits: `[rows, T, V]`.
        labels: transformers', `[rows, T]`.
    """
    rows, length = labels.shape
    targets = jnp.where(labels[:, 1:] == IGNORED, -1, labels[:, 1:]).reshape(-1)
    text = jnp.where(targets < 0, rows, jnp.repeat(jnp.arange(rows), length - 1))
    outputs = outputs_of_logits(logits[:, :-1].reshape(-1, logits.shape[-1]), targets)
    return task.of_pass(outputs, SimpleNamespace(text=text, targets=targets, weight=jnp.ones(rows), extras=Extras()))


def task_loss(task: TokenTask, logits: jax.Array, labels: jax.Array, num_items: Any = None) -> tuple:
    """The task's `(loss, sums)` of rows of a text each, which weigh the same: by token where the task weighs tokens.

    Args:
        logits, labels: as in `pass_of_logits`.
        num_items: what a sum over tokens is divided by; None means the rows' own targets.
    """
    rows, targets = len(labels), jnp.maximum(1, jnp.sum(labels[:, 1:] != IGNORED))
    weight = 1 / (targets if num_items is None else num_items) if task.per_token else 1 / rows
    batch = LossBatch(jnp.full(rows, weight), Extras(), rows)
    return task.loss(pass_of_logits(task, logits, labels), batch)


def mean_loss(logits: jax.Array, labels: jax.Array, num_items: Any = None) -> jax.Array:
    """The cross-entropy of transformers' causal models: the mean over targets, or their sum over `num_items`.

    Args:
        logits: `[rows, T, V]`.
        labels: `[rows, T]`, -100 where nothing is predicted.
    """
    targets = jnp.where(labels[:, 1:] == IGNORED, -1, labels[:, 1:]).reshape(-1)
    outputs = outputs_of_logits(logits[:, :-1].reshape(-1, logits.shape[-1]), targets)
    return -jnp.sum(outputs.logps) / (jnp.sum(targets >= 0) if num_items is None else num_items)
