"""A model with an adapter: made, saved in PEFT's format, read again, merged into plain weights."""

from __future__ import annotations

import logging
import re
from collections.abc import Iterator, Mapping
from dataclasses import replace
from functools import partial
from pathlib import Path
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from safetensors.numpy import save_file

from trl_jax.core.torch_param_layout import TorchParamLayout
from trl_jax.core.torch_random import TorchGenerator
from trl_jax.hub.backends import Backend, NativeBackend
from trl_jax.hub.checkpoint.sharded_reading import Place, whole_at
from trl_jax.hub.formats.safetensors import open_tensors
from trl_jax.hub.peft.adapters import PREFIX, Plan, arrays_of, make_plan, tensors_of, wanted_shapes, whole_tensors
from trl_jax.hub.peft.initial_values import initial
from trl_jax.hub.peft.lora_config import PICKLED, PISSA, WEIGHTS, LoraConfig, no_adapter
from trl_jax.hub.peft.pissa import divided
from trl_jax.models.adapted import AdaptedGraph, Layers, adapted_graph, leaf

_SINGLE = re.compile(r"\.experts\.\d+\.")
logger = logging.getLogger(__name__)


class AdaptedBackend(Backend):
    """A native engine beside whose frozen arrays those of `plan` train; it writes and reads adapters alone.

    `base` is the engine without the adapter, `frozen` what trains not, where something of it is in its files.
    """

    log_level, undecayed, saves_aside, can_resize, holds_still = logging.INFO, frozenset(), True, False, False

    def __init__(self, base: NativeBackend, plan: Plan, frozen: dict[str, Any], shapes: dict[str, Any]):
        self.base, self.plan, self.frozen, self._shapes = base, plan, frozen, shapes
        self.name = f"{base.name} (with an adapter)"
        self.vocab_size, self.max_positions, self.embeddings = base.vocab_size, base.max_positions, base.embeddings
        self.infers_lengths, self.ignores_types = base.infers_lengths, base.ignores_types
        self.takes_packed, self.takes_noise, self.batch_invariant = (
            base.takes_packed,
            base.takes_noise,
            base.batch_invariant,
        )
        self.causal, self.window = base.causal, base.window
        self.heads = base.heads
        self.drops_out = base.drops_out or plan.config.lora_dropout > 0
        self.graph = graph_of(base, plan)
        self.tensors = {name: _decay_name(plan, name, base) for name in shapes}
        self.dtypes = dict.fromkeys(wanted_shapes(plan, shapes), "float32")
        self._sizes = {leaf(one.adapter.name, kind): size for one in plan.placed for kind, size in one.sizes().items()}

    def torch_param_layout(self) -> TorchParamLayout:
        whole, paths = self.base.torch_param_layout(), {name: name.removesuffix("@trained") for name in self.tensors}
        joined = {name: whole.joined[path] for name, path in paths.items() if path in whole.joined}
        adapters = (placed.adapter for placed in self.plan.placed if placed.module.stacked)
        own = {leaf(adapter.name, kind) for adapter in adapters for kind in ("a", "b", *adapter.has)}
        return TorchParamLayout(
            frozenset(own | {name for name, path in paths.items() if path in whole.stacked}), joined
        )

    @property
    def axes(self) -> Mapping[str, tuple[str, ...]]:
        axes, names = self.base.axes, {name: name.removesuffix("@trained") for name in self.tensors}
        return axes | {name: axes[path] for name, path in names.items() if path in axes}

    def places(self, params: dict[str, jax.Array]) -> dict[str, list[tuple[str, tuple[int, ...]]]]:
        """Names alone: nothing of an adapter can be held still."""
        return dict.fromkeys(self.dtypes, [])

    def size_of(self, path: str, array: jax.Array) -> int:
        return self._sizes[path] if path in self._sizes else self.base.size_of(path, array)

    def numbers(self, path: str, array: jax.Array) -> jax.Array:
        return self.base.numbers(path, array)

    def weight(self, arrays: dict[str, jax.Array], path: str) -> jax.Array:
        return self.base.weight(arrays, path)

    def save(self, folder: Path, params: dict[str, jax.Array], config: Any, *, writes: bool = True) -> None:
        """Write adapter_model.safetensors and adapter_config.json, as PEFT does."""
        del config  # the base model's own, which stays where it is
        tensors = dict(self.on_disk(params))
        if not writes:
            return
        folder.mkdir(parents=True, exist_ok=True)
        save_file(tensors, folder / WEIGHTS, metadata={"format": "pt"})
        replace(self.plan.config, inference_mode=True).save_pretrained(folder)

    def load(
        self, folder: Path, seed: int, place: Place | None = None, instead: dict[str, np.ndarray] | None = None
    ) -> dict[str, jax.Array]:
        """`instead` has tensors, by their names in the file, for what that lacks."""
        arrays = arrays_of(self.plan, read_tensors(folder, self.plan, self._shapes, instead), self._shapes)
        axes = {} if place is None else self.axes
        return arrays if place is None else {n: whole_at(place, axes.get(n, ()), array) for n, array in arrays.items()}

    def resized(self, rows: int) -> Backend:
        raise ValueError(
            f"A model with an adapter embeds {self.vocab_size} tokens, wanted {rows}: adapters belong to tables of one "
            "size. Resize the model first, or call merge_and_unload()."
        )

    def on_disk(self, params: dict[str, jax.Array]) -> Iterator[tuple[str, np.ndarray]]:
        kept = {path: self.base.weight(self.frozen, path) for path in self.plan.kept.values()}
        found = tensors_of(self.plan, params, kept)
        return ((name, np.ascontiguousarray(found[name])) for name in sorted(found))


def graph_of(base: NativeBackend, plan: Plan) -> AdaptedGraph:
    adapters = tuple(placed.adapter for placed in plan.placed)
    make, layers = base.make, plan.whole.parts()
    return adapted_graph(make, adapters, plan.shapes, layers, plan.config.lora_dropout)


def _decay_name(plan: Plan, name: str, base: NativeBackend) -> str:
    """A name that tells whether it decays: that of an adapter, or of the parameter itself."""
    return base.tensors.get(name.removesuffix("@trained"), name)


def adapt(
    base: NativeBackend,
    arrays: dict[str, Any],
    config: LoraConfig,
    seed: int | TorchGenerator,
    folder: Path | None = None,
) -> tuple[dict[str, jax.Array], AdaptedBackend, dict[str, Any]]:
    """What trains, the engine, and what is frozen: a new adapter, drawn as PEFT draws it, or the one in `folder`.

    Raises:
        ValueError: the config or the folder does not go with the model.
    """
    plan = _plan_for(base, config, new=folder is None)
    trained, frozen = _divided(plan, arrays)
    shapes = _shapes(plan, trained)
    begun: dict[str, np.ndarray] = {}
    if plan.config.init_lora_weights == PISSA:
        begun, frozen = divided(plan, base, frozen)
    backend = AdaptedBackend(base, plan, frozen if plan.kept else {}, shapes)
    if folder is not None:
        instead = {} if plan.added is None else _own_head(plan, base, trained)
        return backend.load(folder, 0, instead=instead), backend, frozen
    generator = seed if isinstance(seed, TorchGenerator) else TorchGenerator(seed)
    drawn = initial(plan, partial(base.weight, arrays | frozen), generator, begun)
    params = {name: jnp.array(array) for name, array in drawn.items()} | trained
    return params, backend, frozen


def outlined(
    base: NativeBackend, shapes: dict[str, Any], config: LoraConfig, *, new: bool
) -> tuple[dict[str, Any], AdaptedBackend, dict[str, Any]]:
    """What `adapt` gives, of shapes: those of a `new` adapter, or of one that a folder has."""
    plan = _plan_for(base, config, new=new)
    trained, frozen = jax.eval_shape(partial(_divided, plan), shapes)
    found = _shapes(plan, trained)
    return found, AdaptedBackend(base, plan, frozen if plan.kept else {}, found), frozen


def _plan_for(base: NativeBackend, config: LoraConfig, *, new: bool) -> Plan:
    source = base.source
    plan = make_plan(config, source.family, source.arch, source.drawn if new else ())
    if plan.added is not None:
        logger.warning("LoraConfig: %s", plan.added)
    return plan


def _shapes(plan: Plan, trained: dict[str, Any]) -> dict[str, jax.ShapeDtypeStruct]:
    """Of all that trains."""
    return plan.shapes | {name: jax.ShapeDtypeStruct(array.shape, jnp.float32) for name, array in trained.items()}


def _own_head(plan: Plan, base: NativeBackend, trained: dict[str, jax.Array]) -> dict[str, np.ndarray]:
    """The base's head as an adapter would save it: PEFT leaves it out where its config does not name it."""
    heads = tuple(PREFIX + head for head in base.source.family.heads)
    return {name: tensor for name, tensor in whole_tensors(plan, trained).items() if name.startswith(heads)}


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


def read_tensors(
    folder: Path, plan: Plan, shapes: dict[str, Any], instead: dict[str, np.ndarray] | None = None
) -> dict[str, np.ndarray]:
    """The tensors of an adapter's file that the plan asks for; from `instead` those that it lacks.

    Raises:
        FileNotFoundError, ValueError: there is no such file, or it is of another model; by name and shape.
    """
    path = folder / WEIGHTS
    if not path.is_file():
        raise no_adapter(str(folder), (folder / PICKLED).exists())
    found, wanted = open_tensors(path), wanted_shapes(plan, shapes)
    lacking = sorted(set(instead or {}) - set(found))
    if lacking:
        logger.warning("%s has no %s: the base model's own is taken, and trains from there.", path, _some(lacking))
    found = (instead or {}) | found
    missing = sorted(set(wanted) - set(found))
    strange = sorted(name for name in set(found) - set(wanted) - set(plan.kept) if ".base_layer.weight" not in name)
    if any(_SINGLE.search(name) for name in strange):
        raise ValueError(
            f"{path} has an adapter for each expert, as transformers 4 had them; today all lie in one parameter. PEFT "
            "converts it: PeftModel.from_pretrained(base, folder).save_pretrained(new_folder)."
        )
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


def merged(backend: AdaptedBackend, params: dict[str, jax.Array], frozen: dict[str, Any]) -> dict[str, jax.Array]:
    """Arrays of the base engine that compute what it computes with the adapter; float32, all of them new."""
    plan = backend.plan
    arrays = backend.base.weights(frozen)
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
    if adapter.experts:
        a, b = adapter.matrices(held["a"], held["b"])
        own = b if part is None else jnp.moveaxis(part.rows(jnp.moveaxis(b, -2, 0)), 0, -2)
        scales = jnp.asarray(adapter.scales).reshape(-1, *[1] * (own.ndim - 1))
        return {path: arrays[path] + scales * own @ a}

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
