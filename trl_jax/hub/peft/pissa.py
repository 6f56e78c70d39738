"""PiSSA (Meng et al. 2024, arXiv:2404.02948): the initial adapter is the principal part of its matrix, the base keeps
the rest."""

from __future__ import annotations

from typing import Any

import numpy as np

from trl_jax.hub.native_backend import NativeBackend
from trl_jax.hub.peft.adapters import AdapterPlan, ModuleAdapters
from trl_jax.models.adapted import leaf


def principal_parts(
    plan: AdapterPlan, base: NativeBackend, frozen: dict[str, Any]
) -> tuple[dict[str, np.ndarray], dict[str, Any]]:
    """(A and B by name, padded like those of `plan`; the frozen arrays with the rest in place of their matrices).

    Raises:
        ValueError: the matrices are quantised, or a rank is larger than its matrix.
    """
    factors, rest = {}, dict(frozen)
    for one in plan.modules:
        if one.module.kind == "embedding":  # tables are drawn as ever
            continue
        leaves = {leaf(one.adapter.name, kind): np.zeros(one.shapes()[kind], np.float32) for kind in "ab"}
        matrices = {path: np.array(base.weight(frozen, f"{path}.weight")) for path, _ in one.module.parts}
        for layer in [layer for layer, rank in enumerate(one.ranks) if rank]:
            for kind, values in _split(one, layer, matrices).items():
                leaves[leaf(one.adapter.name, kind)][one.at(layer)[kind]] = values
        for path, values in matrices.items():
            rest |= base.replaced(frozen, f"{path}.weight", values)
        factors |= leaves
    return factors, rest


def _split(one: ModuleAdapters, layer: int, matrices: dict[str, np.ndarray]) -> dict[str, np.ndarray]:
    """A and B of one layer; the rest of its matrix is put into `matrices`."""
    module, rank, scale = one.module, one.ranks[layer], one.adapter.scales[layer]
    if rank > min(module.inputs, module.outputs):
        raise ValueError(
            f"LoraConfig: init_lora_weights='pissa' has no {rank} principal parts of {module.name}, a matrix of "
            f"{module.outputs} x {module.inputs}. Take a smaller r."
        )
    at = (layer,) if module.stacked else ()
    whole = np.empty((module.outputs, module.inputs), np.float32)
    rows = {path: ... if part is None else part.rows(np.arange(module.outputs)) for path, part in module.parts}
    for path, ours in rows.items():
        whole[ours] = matrices[path][at]
    left, values, right = np.linalg.svd(whole, full_matrices=False)
    roots = np.sqrt(values[:rank] / np.float32(scale))
    a, b = roots[:, None] * right[:rank], left[:, :rank] * roots
    rest = whole - np.float32(scale) * b @ a
    for path, ours in rows.items():
        matrices[path][at] = rest[ours]
    return {"a": a, "b": b}
