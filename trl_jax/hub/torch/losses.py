"""Losses that a script writes in torch: a model's outputs as tensors that ask for a gradient, and the gradient."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import numpy as np

from trl_jax.hub.torch.bridge import as_tensors


def batch_tensors(arrays: dict[str, Any]) -> dict[str, Any]:
    """A batch as torch's collators give it: token ids, masks and labels are int64."""
    return as_tensors({name: _as_long(np.array(values)) for name, values in arrays.items()})


def _as_long(values: np.ndarray) -> np.ndarray:
    return values.astype(np.int64) if values.dtype.kind in "iu" else values


def asking(outputs: dict[str, Any]) -> tuple[dict[str, Any], dict[str, Any]]:
    """Tensors of these arrays that take up a gradient, and what a script gets of them and may write into."""
    leaves = {name: tensor.requires_grad_() for name, tensor in as_tensors(_copied(outputs)).items()}
    return leaves, {name: leaf.clone() for name, leaf in leaves.items()}


def _copied(outputs: dict[str, Any]) -> dict[str, np.ndarray]:
    return {name: np.array(values) for name, values in outputs.items()}


def gradients(loss: Any, leaves: Sequence[dict[str, Any]]) -> list[dict[str, np.ndarray]]:
    """The derivative of a loss by each of these tensors; zeros where it does not depend on one."""
    loss.backward()
    return [{name: _gradient_of(leaf) for name, leaf in of_call.items()} for of_call in leaves]


def _gradient_of(leaf: Any) -> np.ndarray:
    return np.zeros(leaf.shape, np.float32) if leaf.grad is None else leaf.grad.numpy()


def is_tensor(value: Any) -> bool:
    import torch

    return isinstance(value, torch.Tensor)


def without_gradient() -> Any:
    """A context in which torch keeps nothing for a gradient."""
    import torch

    return torch.no_grad()
