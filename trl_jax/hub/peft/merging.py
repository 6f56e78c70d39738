"""Merges an adapter into plain weights."""

from __future__ import annotations

from typing import Any

import jax
import jax.numpy as jnp

from trl_jax.hub.checkpoint.tensor_slices import TensorSlice
from trl_jax.hub.native_backend import NativeBackend
from trl_jax.hub.peft.backend import LoraBackend
from trl_jax.hub.untied import untied
from trl_jax.models.adapted import Adapter, Layers, leaf


def merged(
    backend: LoraBackend, params: dict[str, jax.Array], frozen: dict[str, Any]
) -> tuple[dict[str, jax.Array], NativeBackend]:
    """Arrays that compute the same without the adapter, float32, all of them new, and their backend. A head that is
    tied to a table with an adapter gets a weight of its own, for it has none of the table's adapter."""
    plan, plain = backend.plan, NativeBackend(backend.base.source)
    arrays = backend.base.weights(frozen)
    if plain.source.config.is_tied and any(one.module.kind == "embedding" for one in plan.modules):
        plain, arrays = untied(plain, arrays)
    for path, layers in plan.full.layers.items():
        if layers is None:
            arrays[path] = jnp.array(params[path])
        else:
            arrays[path] = arrays[path].at[jnp.asarray(layers)].set(params[Layers(path, layers).name])
    for one in plan.modules:
        adapter = one.adapter
        leaves = {kind: params[leaf(adapter.name, kind)] for kind in ("a", "b", *adapter.has)}
        for path, rows in adapter.parts:
            if adapter.experts:
                arrays[path] = _merged_experts(adapter, rows, leaves, arrays[path])
            elif one.module.kind == "embedding":
                arrays[f"{path}.weight"] = _merged_table(adapter, leaves, arrays[f"{path}.weight"])
            else:
                arrays |= _merged_matrix(adapter, path, rows, leaves, arrays)
    return arrays, plain


def _merged_experts(
    adapter: Adapter, rows: TensorSlice | None, leaves: dict[str, jax.Array], weight: jax.Array
) -> jax.Array:
    a, b = adapter.matrices_of(rows, leaves["a"], leaves["b"])
    scales = jnp.asarray(adapter.scales).reshape(-1, *[1] * (b.ndim - 1))
    return weight + scales * b @ a


def _scale(adapter: Adapter) -> jax.Array | float:
    return jnp.asarray(adapter.scales)[:, None, None] if adapter.stacked else adapter.scales[0]


def _merged_table(adapter: Adapter, leaves: dict[str, jax.Array], weight: jax.Array) -> jax.Array:
    return weight + _scale(adapter) * (leaves["b"] @ leaves["a"]).swapaxes(-1, -2)


def _merged_matrix(
    adapter: Adapter,
    path: str,
    rows: TensorSlice | None,
    leaves: dict[str, jax.Array],
    arrays: dict[str, jax.Array],
) -> dict[str, jax.Array]:
    """The weight, and the bias where the adapter has one."""

    def our_rows(array: jax.Array) -> jax.Array:
        if rows is None:
            return array
        return jax.vmap(rows.rows)(array) if adapter.stacked else rows.rows(array)

    scale, weight = _scale(adapter), f"{path}.weight"
    moved = arrays[weight] + scale * our_rows(leaves["b"]) @ leaves["a"]
    changed = {weight: moved}
    if "magnitude" in leaves:
        scaled = (our_rows(leaves["magnitude"]) / jnp.linalg.norm(moved, axis=-1))[..., None] * moved
        there = jnp.asarray(adapter.there)[:, None, None] if adapter.stacked else adapter.there[0]
        changed[weight] = jnp.where(there, scaled, moved)
    if "bias" in leaves:
        of_bias = jnp.squeeze(scale, -1) if adapter.stacked else scale
        changed[f"{path}.bias"] = arrays[f"{path}.bias"] + of_bias * our_rows(leaves["bias"])
    return changed
