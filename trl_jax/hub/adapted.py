"""A model with an adapter: made, saved in PEFT's format, read again, merged into plain weights."""

from __future__ import annotations

import logging
from collections.abc import Iterator
from dataclasses import replace
from functools import partial
from pathlib import Path
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from safetensors.numpy import save_file

from trl_jax.core.torch_random import TorchGenerator
from trl_jax.hub.adapters import Plan, arrays_of, initial, make_plan, tensors_of, wanted_shapes
from trl_jax.hub.engines import Engine, NativeEngine
from trl_jax.hub.files import open_tensors
from trl_jax.hub.lora_config import PICKLED, WEIGHTS, LoraConfig
from trl_jax.hub.parts import Place, whole_at
from trl_jax.models.adapted import AdaptedGraph, Layers, adapted_graph, leaf

logger = logging.getLogger(__name__)


class AdaptedEngine(Engine):
    """A native engine beside whose frozen arrays those of `plan` train; it writes and reads adapters alone.

    `base` is the engine without the adapter, `frozen` what stands beside it in its files.
    """

    log_level, undecayed, saves_aside, grows = logging.INFO, frozenset(), True, False

    def __init__(self, base: NativeEngine, plan: Plan, frozen: dict[str, Any], shapes: dict[str, Any]):
        self.base, self.plan, self.frozen, self._shapes = base, plan, frozen, shapes
        self.name = f"{base.name} (with an adapter)"
        self.vocab_size, self.most_tokens, self.embeddings = base.vocab_size, base.most_tokens, base.embeddings
        self.finds_end, self.ignores_types = base.finds_end, base.ignores_types
        self.takes_streams, self.takes_noise, self.sortable = base.takes_streams, base.takes_noise, base.sortable
        self.causal = base.causal
        self.heads = base.heads
        self.drops_out = base.drops_out or plan.config.lora_dropout > 0
        self.graph = graph_of(base, plan)
        self.tensors = {name: _decay_name(plan, name, base) for name in shapes}
        self.dtypes = dict.fromkeys(wanted_shapes(plan, shapes), "float32")

    def size_of(self, path: str, array: jax.Array) -> int:
        return self.base.size_of(path, array)

    def save(self, folder: Path, params: dict[str, jax.Array], config: Any, *, writes: bool = True) -> None:
        """Write adapter_model.safetensors and adapter_config.json, as PEFT does."""
        del config  # the base model's own, which stays where it is
        tensors = dict(self.on_disk(params))
        if not writes:
            return
        folder.mkdir(parents=True, exist_ok=True)
        save_file(tensors, folder / WEIGHTS, metadata={"format": "pt"})
        replace(self.plan.config, inference_mode=True).save_pretrained(folder)

    def load(self, folder: Path, seed: int, place: Place | None = None) -> dict[str, jax.Array]:
        arrays = arrays_of(self.plan, read_tensors(folder, self.plan, self._shapes), self._shapes)
        return arrays if place is None else {path: whole_at(place, path, array) for path, array in arrays.items()}

    def resized(self, rows: int) -> Engine:
        raise ValueError(
            f"A model with an adapter embeds {self.vocab_size} tokens, wanted {rows}: adapters belong to tables of one "
            "size. Resize the model first, or call merge_and_unload()."
        )

    def on_disk(self, params: dict[str, jax.Array]) -> Iterator[tuple[str, np.ndarray]]:
        found = tensors_of(self.plan, params, self.frozen)
        return ((name, np.ascontiguousarray(found[name])) for name in sorted(found))


def graph_of(base: NativeEngine, plan: Plan) -> AdaptedGraph:
    adapters = tuple(placed.adapter for placed in plan.placed)
    make, layers = base.make, plan.whole.parts()
    return adapted_graph(make, adapters, plan.shapes, layers, plan.config.lora_dropout)


def _decay_name(plan: Plan, name: str, base: NativeEngine) -> str:
    """A name that tells whether it decays: that of an adapter, or of the parameter itself."""
    return base.tensors.get(name.removesuffix("@trained"), name)


def adapt(
    base: NativeEngine,
    arrays: dict[str, Any],
    config: LoraConfig,
    seed: int | TorchGenerator,
    folder: Path | None = None,
) -> tuple[dict[str, jax.Array], AdaptedEngine, dict[str, Any]]:
    """What trains, the engine, and what is frozen: a new adapter, drawn as PEFT draws it, or the one in `folder`.

    Raises:
        ValueError: the config or the folder does not go with the model.
    """
    source = base.source
    plan = make_plan(config, source.family, source.arch, () if folder is not None else source.drawn)
    if plan.added is not None:
        logger.warning("LoraConfig: %s", plan.added)
    trained, frozen = _divided(plan, arrays)
    shapes = plan.shapes | {name: jax.ShapeDtypeStruct(array.shape, jnp.float32) for name, array in trained.items()}
    engine = AdaptedEngine(base, plan, {path: frozen[path] for path in plan.kept.values()}, shapes)
    if folder is not None:
        return engine.load(folder, 0), engine, frozen
    generator = seed if isinstance(seed, TorchGenerator) else TorchGenerator(seed)
    drawn = initial(plan, partial(base.weight, arrays), generator)
    params = {name: jnp.array(array) for name, array in drawn.items()} | trained
    return params, engine, frozen


def _divided(plan: Plan, arrays: dict[str, Any]) -> tuple[dict[str, jax.Array], dict[str, Any]]:
    """Copies of the model's own parameters that train, float32, and the others as they are."""
    trained, frozen = {}, dict(arrays)
    for path, where in plan.whole.layers.items():
        if where is None:
            trained[path] = jnp.array(frozen.pop(path), jnp.float32)
        else:
            part = Layers(path, where)
            trained[part.name] = jnp.array(arrays[path][jnp.asarray(where)], jnp.float32)
    return trained, frozen


def read_tensors(folder: Path, plan: Plan, shapes: dict[str, Any]) -> dict[str, np.ndarray]:
    """The tensors of an adapter's file that the plan asks for.

    Raises:
        FileNotFoundError, ValueError: there is no such file, or it is of another model; by name and shape.
    """
    path = folder / WEIGHTS
    if not path.is_file():
        pickled = f" It has {PICKLED}, a pickle, which is not read: save it with safe_serialization=True."
        raise FileNotFoundError(f"{folder} has no {WEIGHTS}.{pickled if (folder / PICKLED).exists() else ''}")
    found, wanted = open_tensors(path), wanted_shapes(plan, shapes)
    missing = sorted(set(wanted) - set(found))
    strange = sorted(name for name in set(found) - set(wanted) - set(plan.kept) if ".base_layer.weight" not in name)
    if missing or strange:
        raise ValueError(
            f"{path} does not fit its config and this base model. Missing: {_some(missing)}. Unexpected: "
            f"{_some(strange)}. Pass the base model that it was trained on."
        )
    for name, shape in wanted.items():
        if tuple(found[name].shape) != tuple(shape):
            raise ValueError(
                f"{path}: {name} is {list(found[name].shape)}, this base model asks for {list(shape)}: the adapter is "
                "another model's. Pass the base model that it was trained on."
            )
    return {name: found[name] for name in wanted}


def _some(names: list[str]) -> str:
    return "; ".join(names[:4]) + (f"; and {len(names) - 4} more" if len(names) > 4 else "") if names else "none"


def merged(engine: AdaptedEngine, params: dict[str, jax.Array], frozen: dict[str, Any]) -> dict[str, jax.Array]:
    """Arrays of the base engine that compute what it computes with the adapter; float32, all of them new."""
    plan = engine.plan
    arrays = engine.base.weights(frozen)
    for path, where in plan.whole.layers.items():
        if where is None:
            arrays[path] = jnp.array(params[path])
        else:
            part = Layers(path, where)
            arrays[path] = arrays[path].at[jnp.asarray(where)].set(params[part.name])
    for placed in plan.placed:
        adapter = placed.adapter
        held = {kind: params[leaf(adapter.name, kind)] for kind in ("a", "b", *adapter.has)}
        for path, part in adapter.parts:
            arrays |= _merged_part(adapter, path, part, held, arrays, placed.module.kind == "embedding")
    return arrays


def _merged_part(adapter: Any, path: str, part: Any, held: dict, arrays: dict, table: bool) -> dict[str, jax.Array]:
    stacked = adapter.stacked

    def cut(array: jax.Array) -> jax.Array:
        rows = (lambda x: x) if part is None else part.rows
        return jax.vmap(rows)(array) if stacked else rows(array)

    scale = jnp.asarray(adapter.scales)[:, None, None] if stacked else adapter.scales[0]
    weight = f"{path}.weight"
    if table:
        return {weight: arrays[weight] + scale * (held["b"] @ held["a"]).swapaxes(-1, -2)}
    moved = arrays[weight] + scale * cut(held["b"]) @ held["a"]
    found = {weight: moved}
    if "magnitude" in held:
        lengths = (cut(held["magnitude"]) / jnp.linalg.norm(moved, axis=-1))[..., None] * moved
        there = jnp.asarray(adapter.there)[:, None, None] if stacked else adapter.there[0]
        found[weight] = jnp.where(there, lengths, moved)
    if "bias" in held:
        found[f"{path}.bias"] = arrays[f"{path}.bias"] + jnp.squeeze(scale, -1) * cut(held["bias"]) if stacked else (
            arrays[f"{path}.bias"] + scale * cut(held["bias"])
        )
    return found
