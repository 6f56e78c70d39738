"""The generalized Jensen-Shannon divergence of whole logits, as TRL's GKDTrainer has it."""

from __future__ import annotations

import math
from typing import Any

import jax
import jax.numpy as jnp

IGNORED = -100  # label of a position that does not count, as in transformers


def generalized_jsd_loss(
    student_logits: Any,
    teacher_logits: Any,
    labels: Any = None,
    beta: float = 0.5,
    temperature: float = 1.0,
    reduction: str = "batchmean",
    num_items_in_batch: Any = None,
) -> jax.Array:
    r"""Divergence of a student from a teacher (Agarwal et al. 2023, arXiv:2306.13649, eq. 1), in nats, float32.

    With $m = (1 - \beta) p_s + \beta p_t$ it is $\beta\, KL(p_t \| m) + (1 - \beta)\, KL(p_s \| m)$. At $\beta = 0$ it
    is the forward $KL(p_t \| p_s)$ and at $\beta = 1$ the reverse $KL(p_s \| p_t)$.

    This needs `[rows, T, V]` arrays. Training uses `nn.head.divergences`, which computes the same in chunks of tokens.

    Args:
        student_logits, teacher_logits: `[rows, T, V]`, of the same positions.
        labels: `[rows, T]`, -100 at positions that do not count; None counts all.
        beta: from 0 to 1.
        temperature: divides both logits.
        reduction: "batchmean" divides the sum by the positions that count (without labels by `rows`), "sum" does not
            divide, "mean" averages over positions and the vocabulary. Any other value returns the terms themselves,
            `[positions, V]` with labels and `[rows, T, V]` without.
        num_items_in_batch: divides the sum instead, whatever the reduction.
    """
    own, other = (
        jax.nn.log_softmax(jnp.asarray(logits, jnp.float32) / temperature)
        for logits in (student_logits, teacher_logits)
    )
    if beta in (0, 1):
        terms = _terms(other, own) if beta == 0 else _terms(own, other)
    else:
        mixed = jnp.logaddexp(own + math.log1p(-beta), other + math.log(beta))
        terms = beta * _terms(other, mixed) + (1 - beta) * _terms(own, mixed)
    counts = None if labels is None else jnp.asarray(labels) != IGNORED
    if num_items_in_batch is None and reduction not in ("batchmean", "sum", "mean"):
        return terms if counts is None else terms[counts]
    total = jnp.sum(terms if counts is None else jnp.where(counts[..., None], terms, 0))
    if num_items_in_batch is not None:
        return total / jnp.asarray(num_items_in_batch)
    if reduction == "sum":
        return total
    if reduction == "mean":
        return total / (terms.size if counts is None else jnp.sum(counts) * terms.shape[-1])
    return total / jnp.maximum(1, len(terms) if counts is None else jnp.sum(counts))


def _terms(first: jax.Array, second: jax.Array) -> jax.Array:
    """The terms of KL(first || second), from log-probabilities."""
    return jnp.exp(first) * (first - second)
