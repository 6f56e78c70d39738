"""The loss that balances a mixture of experts, beside a task's own: it is of all tokens of a pass."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import jax
import jax.numpy as jnp

from trl_jax.data.example import LossBatch
from trl_jax.data.layout.batch import Batch
from trl_jax.losses.sums import real_examples, summed
from trl_jax.run.state import RunState

AUX_LOSS = "aux_loss"


def with_aux_loss(
    loss: jax.Array, sums: dict[str, jax.Array], aux_loss: jax.Array, batch: Batch | LossBatch, coefficient: float
) -> tuple[jax.Array, dict[str, jax.Array]]:
    """A task's loss with `coefficient` times the mean of passes' load-balancing losses, and its sums with theirs.

    Args:
        aux_loss: `[X]`, for each text that of the pass which computed it.
        batch: its `pass_weight` says what each example counts in that mean.
    """
    of_examples, real = aux_loss[: len(batch.weight)], real_examples(batch.weight, batch.micro_batch)
    sums = sums | {AUX_LOSS: summed(of_examples, real), f"{AUX_LOSS}_examples": summed(1.0, real)}
    return loss + coefficient * jnp.sum(batch.pass_weight * of_examples), sums


def aux_loss_weight(run: RunState, pass_weight: Any) -> Any:
    """The weight of the load-balancing loss of a batch with this share of a step; None where the run adds none."""
    return run.router_aux_loss_coef * pass_weight if run.router_aux_loss_coef else None


def aux_loss_sums(aux_losses: Sequence[jax.Array]) -> dict[str, jax.Array]:
    """The sums for the metric, of batches that were computed alone; nothing where there are none."""
    if not aux_losses:
        return {}
    return {AUX_LOSS: sum(aux_losses), f"{AUX_LOSS}_examples": jnp.float32(len(aux_losses))}
