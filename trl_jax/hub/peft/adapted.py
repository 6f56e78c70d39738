"""Puts an adapter on a native model: a new one, or one that a folder has. Virtual tokens go before its texts."""

from __future__ import annotations

import logging
from functools import partial
from pathlib import Path
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np

from trl_jax.core.torch_random import TorchGenerator
from trl_jax.hub.native_backend import NativeBackend
from trl_jax.hub.peft.adapter_tensors import full_tensors, saved_in
from trl_jax.hub.peft.adapters import PREFIX, AdapterPlan, make_adapter_plan
from trl_jax.hub.peft.backend import AdaptedBackend, LoraBackend
from trl_jax.hub.peft.configs import AdapterConfig
from trl_jax.hub.peft.initial_values import initial, pass_over_towers
from trl_jax.hub.peft.lora_config import PISSA, LoraConfig
from trl_jax.hub.peft.pissa import principal_parts
from trl_jax.hub.peft.virtual.adapted import virtual_backend, with_virtual
from trl_jax.hub.peft.virtual.config import PromptLearningConfig
from trl_jax.hub.untied import untied
from trl_jax.mesh.arrays import fetched, owned
from trl_jax.models.adapted import Layers

logger = logging.getLogger(__name__)


def adapt(
    base: NativeBackend,
    arrays: dict[str, Any],
    config: AdapterConfig,
    seed: int | TorchGenerator,
    folder: Path | None = None,
) -> tuple[dict[str, jax.Array], AdaptedBackend, dict[str, Any]]:
    """The arrays that train, the backend, and the frozen arrays: with a new adapter, drawn as PEFT draws it, or with
    the one in `folder`.

    Raises:
        ValueError: the config or the folder does not go with the model.
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
    pass_over_towers(config, plan, base.source.carried, generator)
    drawn = initial(plan, partial(base.weight, arrays | frozen), generator, factors)
    params = {name: owned(array) for name, array in drawn.items()} | trained
    return params, backend, frozen


def outline_adapted(
    base: NativeBackend, shapes: dict[str, Any], config: AdapterConfig, folder: Path | None
) -> tuple[dict[str, Any], AdaptedBackend, dict[str, Any]]:
    """The result of `adapt`, of shapes: those of a new adapter, or of the one in `folder`."""
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
    """The arrays of `plan.saved_tables` by path, on the host, in the dtype that they are held in."""
    paths = set(plan.saved_tables.values())
    return {path: fetched(arrays[path] if path in arrays else base.weight(arrays, path)) for path in sorted(paths)}


def _plan_for(base: NativeBackend, lora: LoraConfig, folder: Path | None) -> AdapterPlan:
    """The plan of a new adapter, or of the one in a folder, whose file may have tables of tokens."""
    source = base.source
    if folder is None:
        plan = make_adapter_plan(lora, source.config, source.drawn, resized=source.resized)
    else:
        plan = make_adapter_plan(lora, source.config, resized=True)
        plan = plan if source.resized else saved_in(folder, plan)
    if plan.note is not None:
        logger.warning("LoraConfig: %s", plan.note)
    return plan


def _shapes(plan: AdapterPlan, trained: dict[str, Any]) -> dict[str, jax.ShapeDtypeStruct]:
    """Shapes of all that trains."""
    return plan.shapes | {name: jax.ShapeDtypeStruct(array.shape, jnp.float32) for name, array in trained.items()}


def _head_tensors(plan: AdapterPlan, base: NativeBackend, trained: dict[str, jax.Array]) -> dict[str, np.ndarray]:
    """The base's head as an adapter would save it: PEFT leaves it out where its config does not name it."""
    heads = tuple(PREFIX + prefix for prefix in base.source.config.head.prefixes)
    return {name: tensor for name, tensor in full_tensors(plan, trained).items() if name.startswith(heads)}


def _split_trained(plan: AdapterPlan, arrays: dict[str, Any]) -> tuple[dict[str, jax.Array], dict[str, Any]]:
    """Copies of the model's own parameters that train, float32, and the others as they are."""
    trained, frozen = {}, dict(arrays)
    for path, layers in plan.full.layers.items():
        if layers is None:
            trained[path] = jnp.array(frozen.pop(path), jnp.float32)
        else:
            trained[Layers(path, layers).name] = jnp.array(arrays[path][jnp.asarray(layers)], jnp.float32)
    return trained, frozen
