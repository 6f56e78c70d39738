"""Attach adapters to models, and merge them into the weights."""

from __future__ import annotations

import logging
import re
from functools import partial
from pathlib import Path
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np

from trl_jax.core.torch_random import TorchGenerator
from trl_jax.hub.modules import current_name
from trl_jax.hub.native_backend import NativeBackend, untied
from trl_jax.hub.peft_adapters import (
    PREFIX,
    AdapterPlan,
    for_tower,
    full_tensors,
    initial,
    is_token_table,
    make_adapter_plan,
    pass_over_towers,
    principal_parts,
    saved_in,
    spared_towers,
    with_carried,
)
from trl_jax.hub.peft_backend import AdaptedBackend, LoraBackend
from trl_jax.hub.peft_config import PISSA, AdapterConfig, LoraConfig, PromptLearningConfig
from trl_jax.hub.prompt_tuning import virtual_backend, with_virtual
from trl_jax.hub.tensor_map import TensorSlice
from trl_jax.hub.vision import vision_families
from trl_jax.mesh.mesh import fetched, owned
from trl_jax.models.adapters import Adapter, Layers

# Attaching an adapter


logger = logging.getLogger(__name__)


def adapt(
    base: NativeBackend,
    arrays: dict[str, Any],
    config: AdapterConfig,
    seed: int | TorchGenerator,
    folder: Path | None = None,
) -> tuple[dict[str, jax.Array], AdaptedBackend, dict[str, Any]]:
    """Attach an adapter to a native model: a new one, initialized as in PEFT, or the one saved in `folder`.

    Returns:
        The trained arrays, the backend, and the frozen arrays.

    Raises:
        ValueError: the config or the saved adapter does not fit the model.
    """
    generator = seed if isinstance(seed, TorchGenerator) else TorchGenerator(seed)
    if isinstance(config, PromptLearningConfig):
        return with_virtual(base, arrays, config, generator, folder)
    plan = _plan_for(base, config, folder)
    if plan.unties:
        base, arrays = untied(base, arrays)
    trained, frozen = _split_trained(plan, arrays)
    shapes = _shapes(plan, trained)
    factors: dict[str, np.ndarray] = {}
    if plan.config.init_lora_weights == PISSA:
        factors, frozen = principal_parts(plan, base, frozen)
    backend = LoraBackend(base, plan, _tables(plan, base, arrays), shapes)
    if folder is not None:
        frozen = frozen | backend.restore_tables(folder, frozen)
        defaults = {} if plan.note is None else _head_tensors(plan, base, trained)
        return backend.load(folder, 0, defaults=defaults), backend, frozen
    carried = {_name_in_peft(base, tensor): pieces for tensor, pieces in base.source.carried.items()}
    carried = partial(pass_over_towers, config, plan, carried, generator)
    drawn = initial(plan, partial(base.weight, arrays | frozen), generator, factors, carried)
    params = {name: owned(array) for name, array in drawn.items()} | trained
    return params, backend, frozen


def _name_in_peft(base: NativeBackend, tensor: str) -> str:
    """The name in transformers' model of a tensor of a vision tower, which may have another name on disk."""
    family = base.source.config.family
    vision = vision_families().get(family.model_type)
    return current_name(tensor, family) if vision is None else vision.module(tensor)


def outline_adapted(
    base: NativeBackend, shapes: dict[str, Any], config: AdapterConfig, folder: Path | None
) -> tuple[dict[str, Any], AdaptedBackend, dict[str, Any]]:
    """What `adapt` would return, with shapes instead of arrays."""
    if isinstance(config, PromptLearningConfig):
        backend = virtual_backend(base, config, folder)
        return backend.shapes, backend, shapes
    plan = _plan_for(base, config, folder)
    if plan.unties:
        base, shapes = untied(base, shapes)
    trained, frozen = jax.eval_shape(partial(_split_trained, plan), shapes)
    outlined = _shapes(plan, trained)
    return outlined, LoraBackend(base, plan, {}, outlined), frozen


def _tables(plan: AdapterPlan, base: NativeBackend, arrays: dict[str, Any]) -> dict[str, np.ndarray]:
    """The arrays of `plan.saved_tables` by path, on the host, in their current dtype."""
    paths = set(plan.saved_tables.values())
    return {path: fetched(arrays[path] if path in arrays else base.weight(arrays, path)) for path in sorted(paths)}


def _plan_for(base: NativeBackend, lora: LoraConfig, folder: Path | None) -> AdapterPlan:
    """The plan of a new adapter, or of the one saved in a folder, which may include token embeddings."""
    source = base.source
    if folder is None:
        plan = make_adapter_plan(lora, source.config, source.drawn, resized=source.resized)
    else:
        plan = make_adapter_plan(lora, source.config, resized=True)
        plan = plan if source.resized else saved_in(folder, plan)
        if source.config.vision_arch is not None:
            owners = (tensor.rpartition(".")[0] for tensor in source.carried)
            plan = for_tower(folder, plan, frozenset(map(source.config.vision.module, owners)))
        elif source.config.family.carried is not None:
            plan = with_carried(folder, plan, re.compile(source.config.family.carried).search)
    plan = spared_towers(plan, (_name_in_peft(base, tensor) for tensor in source.carried))
    if plan.note is not None:
        logger.warning("LoraConfig: %s", plan.note)
    return plan


def _shapes(plan: AdapterPlan, trained: dict[str, Any]) -> dict[str, jax.ShapeDtypeStruct]:
    """Shapes of all trained arrays."""
    return plan.shapes | {name: jax.ShapeDtypeStruct(array.shape, jnp.float32) for name, array in trained.items()}


def _head_tensors(plan: AdapterPlan, base: NativeBackend, trained: dict[str, jax.Array]) -> dict[str, np.ndarray]:
    """The base model's head under the adapter's names, for adapters saved without it: PEFT only saves a head that the
    config names."""
    heads = tuple(PREFIX + prefix for prefix in base.source.config.head.prefixes)
    return {name: tensor for name, tensor in full_tensors(plan, trained).items() if name.startswith(heads)}


def _split_trained(plan: AdapterPlan, arrays: dict[str, Any]) -> tuple[dict[str, jax.Array], dict[str, Any]]:
    """Float32 copies of the base model's own trained parameters, and the remaining arrays unchanged."""
    trained, frozen = {}, dict(arrays)
    for path, layers in plan.full.layers.items():
        if layers is None:
            trained[path] = jnp.array(frozen.pop(path), jnp.float32)
        else:
            trained[Layers(path, layers).name] = jnp.array(arrays[path][jnp.asarray(layers)], jnp.float32)
    return trained, frozen


# Merging


def merged(
    backend: LoraBackend, params: dict[str, jax.Array], frozen: dict[str, Any]
) -> tuple[dict[str, jax.Array], NativeBackend]:
    """Merge an adapter: new float32 arrays that compute the same without it, and their backend.

    If the head is tied to a token embedding with an adapter, it is untied: the adapter does not apply to the head.

    Raises:
        ValueError: the adapter also covers the vision tower, but the model was loaded without it; or it has a bias that
            the layer has not.
    """
    plan, plain = backend.plan, NativeBackend(backend.base.source)
    if plan.carried and plain.source.config.vision_arch is None:
        raise ValueError(
            f"merge_and_unload: the adapter also has {len(plan.carried)} tensors of the vision tower or its connector, "
            f"such as {min(plan.carried)}, and this model was loaded for text only. Save the adapter, load its "
            "folder with AutoModelForImageTextToText.from_pretrained, and merge that model."
        )
    arrays = backend.base.weights(frozen)
    if plain.source.config.is_tied and any(is_token_table(adapters.module) for adapters in plan.modules):
        plain, arrays = untied(plain, arrays)
    for path, layers in plan.full.layers.items():
        if layers is None:
            arrays[path] = jnp.array(params[path])
        else:
            arrays[path] = arrays[path].at[jnp.asarray(layers)].set(params[Layers(path, layers).name])
    for adapters in plan.modules:
        adapter = adapters.adapter
        leaves = {kind: params[path] for kind, path in adapters.paths.items()}
        for path, rows in adapter.parts:
            if adapter.experts:
                arrays[path] = _merged_experts(adapter, rows, leaves, arrays[path])
            elif adapters.module.kind == "embedding":
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
    """The merged weight, and the bias if the adapter has one."""

    def our_rows(array: jax.Array) -> jax.Array:
        if rows is None:
            return array
        return jax.vmap(rows.rows)(array) if adapter.stacked else rows.rows(array)

    scale, weight = _scale(adapter), f"{path}.weight"
    moved = arrays[weight] + scale * our_rows(leaves["b"]) @ leaves["a"]
    changed = {weight: moved}
    if "magnitude" in leaves:
        scaled = (our_rows(leaves["magnitude"]) / jnp.linalg.norm(moved, axis=-1))[..., None] * moved
        exists = jnp.asarray(adapter.exists)[:, None, None] if adapter.stacked else adapter.exists[0]
        changed[weight] = jnp.where(exists, scaled, moved)
    if "bias" in leaves:
        if f"{path}.bias" not in arrays:
            module = adapter.name.rpartition(".")[2]
            raise ValueError(
                f"merge_and_unload: the adapter of {module} has a bias (lora_bias=True), but the layer has none that "
                "could hold it, so PEFT cannot merge it either. Use the model with its adapter."
            )
        of_bias = jnp.squeeze(scale, -1) if adapter.stacked else scale
        changed[f"{path}.bias"] = arrays[f"{path}.bias"] + of_bias * our_rows(leaves["bias"])
    return changed
