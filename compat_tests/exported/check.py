"""Exports one model_type and compares scores and every gradient with transformers."""

from __future__ import annotations

from dataclasses import dataclass
from pathlib import Path

import jax
import jax.numpy as jnp
import numpy as np

from compat_tests.exported import configs
from trl_jax.core.outputs import reads_of_rows
from trl_jax.exported.program import load_exported
from trl_jax.models.model import merge

QUICKLY = {"xla_backend_optimization_level": 0}  # compiles in a third of the time with the same result
PULL = np.linspace(-1.0, 1.5, 4, dtype=np.float32)


@dataclass(frozen=True)
class Apart:
    """Differences from transformers, relative to the largest score and to each parameter's largest gradient."""

    scores: float
    gradients: float
    parameter: str


def compare(folder: Path, length: int = 24) -> Apart:
    """Compares a weighted sum of the scores of padded rows, forward and backward."""
    ids, mask = configs.rows(length)
    theirs = configs.reference(folder)
    wanted = configs.scores(theirs, ids, mask)
    (wanted * _tensor(PULL)).sum().backward()
    found, gradients = _ours(folder, ids, mask)
    wanted = wanted.detach().numpy()
    named = {name: _gradient(parameter) for name, parameter in theirs.named_parameters()}
    assert named.keys() == gradients.keys()
    # A gradient that a softmax cancels is rounding noise: no parameter's scale is smaller than this.
    least = 1e-2 * max(np.abs(gradient).max() for gradient in named.values())
    far = {
        name: np.abs(gradients[name] - gradient).max() / max(np.abs(gradient).max(), least)
        for name, gradient in named.items()
    }
    worst = max(far, key=far.get)
    return Apart(np.abs(found - wanted).max() / np.abs(wanted).max(), float(far[worst]), worst)


def _ours(folder: Path, ids: np.ndarray, mask: np.ndarray) -> tuple[np.ndarray, dict[str, np.ndarray]]:
    params, backend, _ = load_exported(folder, dtype="float32", seed=0, head="score")
    reads = reads_of_rows(np.zeros(len(ids), np.int32), ids.shape[1])

    def pulled(params):
        scores = merge(backend.graph, params)(jnp.asarray(ids), None, reads, valid=jnp.asarray(mask, bool))
        return jnp.sum(scores * PULL), scores

    compiled = jax.jit(jax.grad(pulled, has_aux=True), compiler_options=QUICKLY)
    gradients, scores = compiled(params)
    return np.asarray(scores), {name: np.asarray(gradient) for name, gradient in gradients.items()}


def _gradient(parameter) -> np.ndarray:
    """A parameter that does not affect the scores has no gradient in torch, and zeros in JAX."""
    return np.zeros(parameter.shape, np.float32) if parameter.grad is None else parameter.grad.numpy()


def _tensor(array: np.ndarray):
    import torch

    return torch.tensor(array)
