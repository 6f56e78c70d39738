"""Per-token losses against NumPy and through the gradients of logits."""

from __future__ import annotations

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from trl_jax.core.outputs import TokenOutputs
from trl_jax.losses.supervised import dynamic_fine_tuning, negative_log_likelihood

LOGITS = np.random.default_rng(0).normal(size=(4, 7)).astype(np.float32) * 2
TARGETS = np.array([3, 0, 6, 3])


def outputs(logits):
    log_p = jax.nn.log_softmax(jnp.asarray(logits))
    at = log_p[jnp.arange(len(TARGETS)), TARGETS]
    zeros = jnp.zeros(len(TARGETS))
    return TokenOutputs(at, zeros, jnp.mean(log_p, axis=1), zeros)


def log_softmax(logits):
    shifted = logits.astype(np.float64) - logits.max(axis=1, keepdims=True)
    return shifted - np.log(np.exp(shifted).sum(axis=1, keepdims=True))


@pytest.mark.parametrize("factor", [0.0, 0.1, 1.0])
def test_likelihood_and_its_smoothing(factor):
    log_p = log_softmax(LOGITS)
    target = np.full((4, 7), factor / 7)
    target[np.arange(4), TARGETS] += 1 - factor
    found = negative_log_likelihood(outputs(LOGITS), factor)
    assert np.allclose(found, -(target * log_p).sum(axis=1), rtol=1e-6)


def test_dynamic_fine_tuning_is_weighted_by_a_probability_without_gradient():
    log_p = log_softmax(LOGITS)
    chosen = log_p[np.arange(4), TARGETS]
    assert np.allclose(dynamic_fine_tuning(outputs(LOGITS)), -np.exp(chosen) * chosen, rtol=1e-6)
    found = jax.grad(lambda logits: dynamic_fine_tuning(outputs(logits)).sum())(LOGITS)
    likelihood = np.exp(log_p) - np.eye(7)[TARGETS]  # the gradient of -log p
    assert np.allclose(found, np.exp(chosen)[:, None] * likelihood, atol=1e-6)


@pytest.mark.parametrize("loss", [negative_log_likelihood, dynamic_fine_tuning])
def test_a_read_without_a_target_costs_nothing(loss):
    assert not np.any(loss(TokenOutputs(*[jnp.zeros(3)] * 4)))
