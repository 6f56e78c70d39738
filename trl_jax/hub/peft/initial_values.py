"""The initial values of an adapter: PEFT's draws on torch's generator."""

from __future__ import annotations

import math
import re
from collections.abc import Callable, Mapping
from typing import Any

import numpy as np

from trl_jax.core.files.tensors_file import Pieces
from trl_jax.core.torch_random import TorchGenerator
from trl_jax.hub.peft.adapters import AdapterPlan, ModuleAdapters
from trl_jax.hub.peft.lora_config import PISSA, LoraConfig
from trl_jax.hub.peft.modules import Module
from trl_jax.hub.peft.targets import is_all, is_meant, rank_and_alpha
from trl_jax.models.adapted import leaf

_NO_MAP = re.compile(r"pos(ition)?_embed|embed_vision|audio")  # tables; and what comes after the text in gemma4


def initial(
    plan: AdapterPlan, weight: Callable[[str], Any], generator: TorchGenerator, factors: dict[str, np.ndarray]
) -> dict[str, np.ndarray]:
    """The adapters' arrays, drawn as PEFT draws them on torch's generator: two linear maps are made for each module,
    then A is drawn anew. `weight` gives the array at a path, `factors` has arrays that are not drawn."""
    arrays = {name: np.zeros(shape.shape, np.float32) for name, shape in plan.shapes.items()} | factors
    for layer, number in plan.order:
        one = plan.modules[number]
        places = one.at(layer)
        for kind, value in _draw(plan.config, one.module, one.ranks[layer], generator).items():
            arrays[leaf(one.adapter.name, kind)][places[kind]] = value
    for one in plan.modules:
        if "magnitude" in one.adapter.has:
            arrays[leaf(one.adapter.name, "magnitude")][...] = _row_norms(one, weight, arrays)
    return arrays


def pass_over_towers(
    config: LoraConfig, plan: AdapterPlan, carried: Mapping[str, Pieces], generator: TorchGenerator
) -> None:
    """Draw what PEFT draws before the text's adapters: it finds linear maps of these names in the towers for images,
    too, which no text trains and we leave as they are.

    Args:
        config: as it was passed. carried: the towers' tensors.
    """
    for tensor, pieces in carried.items():
        name = tensor.removesuffix(".weight")
        if name == tensor or len(pieces.shape) != 2 or _NO_MAP.search(name):
            continue
        if is_all(config.target_modules) or is_meant(plan.config, name):
            outputs, inputs = pieces.shape
            module = Module(name, "linear", (), (), 1, 0, inputs, outputs)
            _draw(plan.config, module, rank_and_alpha(plan.config, name)[0], generator)


def _draw(config: LoraConfig, module: Module, rank: int, generator: TorchGenerator) -> dict[str, np.ndarray]:
    ranks = rank * max(module.experts, 1)
    a, b = (ranks, module.inputs), (module.outputs, ranks)
    if module.kind == "embedding":
        first = {"a": generator.normal(math.prod(a), 1.0).reshape(a)}
        first["b"] = generator.normal(math.prod(b), 1.0).reshape(b)
        return {"b": generator.normal(math.prod(b), 1.0).reshape(b)} if config.init_lora_weights else first

    def linear(shape: tuple[int, int]) -> np.ndarray:
        return generator.uniform(math.prod(shape), shape[1] ** -0.5).reshape(shape)

    first = {"a": linear(a), "b": linear(b)}
    if config.lora_bias:
        first["bias"] = generator.uniform(module.outputs, rank**-0.5)
    if config.init_lora_weights is False:
        return first
    if config.init_lora_weights == PISSA:
        return {}
    if config.init_lora_weights == "gaussian":
        return {"a": generator.normal(math.prod(a), 1 / rank).reshape(a)}
    return {"a": linear(a)}


def _row_norms(one: ModuleAdapters, weight: Callable[[str], Any], arrays: dict[str, np.ndarray]) -> np.ndarray:
    """Norms of the rows of W + scale B A: the initial magnitudes."""
    name, module = one.adapter.name, one.module
    a, b = (arrays[leaf(name, kind)] for kind in "ab")
    lengths = np.zeros(one.shapes()["magnitude"], np.float32)
    for path, rows in module.parts:
        whole = weight(f"{path}.weight")
        for layer in range(module.layers):
            at = (layer,) if module.stacked else ()
            our_b = b[at] if rows is None else rows.rows(b[at])
            norms = np.linalg.norm(np.asarray(whole[at]) + one.adapter.scales[layer] * (our_b @ a[at]), axis=1)
            view = lengths[at] if rows is None else rows.view(lengths[at])
            view[...] = norms.reshape(view.shape)
    return lengths
