"""An adapter on a model: which arrays train, and what they are called on disk."""

from __future__ import annotations

import math
from dataclasses import dataclass, replace
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np

from trl_jax.hub.checkpoint.saving import read_tensor
from trl_jax.hub.checkpoint.tensor_map import TensorEntry
from trl_jax.hub.peft.lora_config import LoraConfig, refuse_beyond
from trl_jax.hub.peft.modules import Module, modules_of
from trl_jax.hub.peft.target_parameters import targeted_parameters, with_parameters
from trl_jax.hub.peft.targets import (
    Places,
    rank_and_alpha,
    saved_whole,
    settled,
    targeted,
    with_drawn,
    with_head,
)
from trl_jax.models.adapted import Adapter, Layers, leaf

PREFIX = "base_model.model."
_SUFFIX = {"a": "lora_A.weight", "b": "lora_B.weight", "magnitude": "lora_magnitude_vector", "bias": "lora_B.bias"}
_SAVED_TABLE = "embed_tokens"  # PEFT saves the base's own table too where it has this name and is named by it
_OF_TABLES = {"a": "lora_embedding_A", "b": "lora_embedding_B"}


@dataclass(frozen=True)
class Placed:
    """The adapters of one kind of module: one a layer, `ranks` 0 where there is none, `names` those on disk."""

    module: Module
    adapter: Adapter
    ranks: tuple[int, ...]
    names: tuple[str, ...]

    @property
    def rank(self) -> int:
        return max(self.ranks)

    def shapes(self) -> dict[str, tuple[int, ...]]:
        """Kind -> shape of the array of all layers."""
        module, lead = self.module, (self.module.layers,) if self.module.stacked else ()
        rank = self.rank * max(module.experts, 1)
        each = {"a": (rank, module.inputs), "b": (module.outputs, rank)}
        each |= dict.fromkeys(("magnitude", "bias"), (module.outputs,))
        return {kind: (*lead, *each[kind]) for kind in ("a", "b", *self.adapter.has)}

    def sizes(self) -> dict[str, int]:
        """Kind -> how many numbers it has, without what only fills an array where ranks are smaller."""
        ranks, layers = sum(self.ranks) * max(self.module.experts, 1), sum(rank > 0 for rank in self.ranks)
        each = {"a": ranks * self.module.inputs, "b": ranks * self.module.outputs}
        each |= dict.fromkeys(("magnitude", "bias"), layers * self.module.outputs)
        return {kind: each[kind] for kind in ("a", "b", *self.adapter.has)}

    def at(self, layer: int) -> dict[str, tuple]:
        """Kind -> where in the array of all layers that of one lies: experts' A are padded each for itself."""
        rank, experts = self.ranks[layer], max(self.module.experts, 1)
        rows = slice(rank * experts)
        if experts > 1 and 0 < rank < self.rank:
            rows = (np.arange(experts)[:, None] * self.rank + np.arange(rank)).reshape(-1)
        inner = {"a": (rows,), "b": (slice(None), slice(rank * experts))}
        lead = (layer,) if self.module.stacked else ()
        return {kind: (*lead, *inner.get(kind, ())) for kind in (("a", "b", *self.adapter.has) if rank else ())}

    def tensors(self) -> list[tuple[str, str, tuple]]:
        """(name on disk, kind, place in the array of all layers) of each layer's."""
        suffixes = _SUFFIX | (_OF_TABLES if self.module.kind == "embedding" else {})
        return [
            (f"{PREFIX}{name}.{suffixes[kind]}", kind, at)
            for layer, name in enumerate(self.names)
            for kind, at in self.at(layer).items()
        ]


@dataclass(frozen=True)
class Whole:
    """Parameters of the model itself that train: path -> the layers of it that do; `tensors` as they are saved,
    each with the wires that have a part in it and its layer in our array."""

    layers: dict[str, tuple[int, ...] | None]
    tensors: dict[str, list[tuple[TensorEntry, tuple[int, ...]]]]

    def parts(self) -> tuple[Layers, ...]:
        return tuple(Layers(path, where) for path, where in self.layers.items() if where is not None)


@dataclass(frozen=True)
class Plan:
    """A LoraConfig on a model, resolved. `order` is PEFT's: (layer, its number in `placed`), modules before parameters.
    `added` is a line on what it lacked of a reward model's; None for nothing.
    """

    config: LoraConfig
    placed: tuple[Placed, ...]
    order: tuple[tuple[int, int], ...]
    whole: Whole
    kept: dict[str, str]
    added: str | None

    @property
    def shapes(self) -> dict[str, jax.ShapeDtypeStruct]:
        """Of the adapters' arrays."""
        return {
            leaf(placed.adapter.name, kind): jax.ShapeDtypeStruct(shape, jnp.float32)
            for placed in self.placed
            for kind, shape in placed.shapes().items()
        }


def make_plan(config: LoraConfig, family: Any, arch: Any, drawn: tuple[str, ...] = ()) -> Plan:
    """What a config means on a model of the native engine; `drawn` are tensors that no file has: they train whole.

    Raises:
        ValueError: what it asks for is not there, or not in this release; by name.
    """
    refuse_beyond(config)
    modules = modules_of(family, arch)
    config, added = with_head(config, modules)
    config, more = with_drawn(config, modules, drawn)
    added = " ".join(line for line in (added, more) if line) or None
    config, places, parameters = resolved(config, modules, family.model_type)
    if config.task_type is None:
        config = replace(config, auto_mapping=_class_of(family))
    saved = saved_whole(config, modules)
    _check_apart(places, parameters, saved)
    given = {module: among for among in (places, parameters) for _, module, _ in among}
    placed = tuple(_placed(config, module, among) for module, among in given.items())
    number = {module: at for at, module in enumerate(given)}
    order = tuple((layer, number[module]) for _, module, layer in (*places, *parameters))
    tables = [module for module in dict.fromkeys(m for _, m, _ in places) if module.kind == "embedding"]
    for name in ("use_dora", "lora_bias"):
        if tables and vars(config)[name]:
            raise ValueError(f"LoraConfig: {name}=True does not go with the table {tables[0].name}. Leave one out.")
    told = [table for table in tables if _SAVED_TABLE in config.target_modules and table.name.endswith(_SAVED_TABLE)]
    kept = {f"{PREFIX}{module.name}.base_layer.weight": module.parts[0][0] + ".weight" for module in told}
    adapted = {name for name, _, _ in places} | {_owner(name) for name, _, _ in parameters}
    return Plan(config, placed, order, _whole(config, modules, adapted, saved), kept, added)


def resolved(config: LoraConfig, modules: list[Module], model_type: str) -> tuple[LoraConfig, Places, Places]:
    """The config as PEFT would write it, the modules that get adapters and the parameters that do.

    Raises:
        ValueError: it means nothing, or what cannot have one.
    """
    config = settled(with_parameters(config, modules, model_type), modules, model_type)
    places = targeted(config, modules)
    return config, places, targeted_parameters(config, modules, alone=not places)


def _class_of(family: Any) -> dict[str, str]:
    """What PEFT writes where no task says which class the model is of."""
    from transformers.models.auto.configuration_auto import model_type_to_module_name

    module = model_type_to_module_name(family.model_type)
    return {
        "base_model_class": family.architecture, "parent_library": f"transformers.models.{module}.modeling_{module}",
    }  # fmt: skip


def _owner(name: str) -> str:
    """The module that a parameter is one of."""
    return name.rpartition(".")[0]


def _check_apart(places: Places, parameters: Places, saved: Places) -> None:
    whole = {name for name, _, _ in saved}
    both = sorted(whole & ({name for name, _, _ in places} | {_owner(name) for name, _, _ in parameters}))
    if both:
        raise ValueError(
            f"LoraConfig: {both[0]} would get an adapter and train whole, too, for modules_to_save go by the ends of "
            f"names. PEFT refuses that as well: pass exclude_modules=[{both[0].rpartition('.')[2]!r}], or leave it out "
            "of target_parameters."
        )
    modules = {module for _, module, _ in places}
    twice = sorted(name for name, module, _ in parameters if module in modules)
    if twice:
        raise ValueError(
            f"LoraConfig: target_parameters means {twice[0]}, and target_modules its module, in this layer or another. "
            "Name it in one of the two."
        )


def _placed(config: LoraConfig, module: Module, places: Places) -> Placed:
    here = {layer: rank_and_alpha(config, name) for name, found, layer in places if found is module}
    told = [here.get(layer, (0, 0.0)) for layer in range(module.layers)]
    roots = [math.sqrt(rank) if config.use_rslora else rank for rank, _ in told]
    scales = tuple(alpha / root if root else 0.0 for (_, alpha), root in zip(told, roots, strict=True))
    has = ("magnitude",) * config.use_dora + ("bias",) * (config.lora_bias and module.kind != "embedding")
    there = tuple(rank > 0 for rank, _ in told)
    adapter = Adapter(module.name, module.parts, scales, there, module.stacked, has, module.experts)
    names = _wrapped_names(module, places) if module.experts else module.names()
    return Placed(module, adapter, tuple(rank for rank, _ in told), tuple(names))


def _wrapped_names(module: Module, places: Places) -> list[str]:
    """Parameters of one module are wrapped one around the other: the last one's adapter has the module's own name."""
    meant = [name for name, _, _ in places]
    found = []
    for name in module.names():
        beside = [one for one in meant if _owner(one) == _owner(name)]
        later = beside[beside.index(name) + 1 :] if name in beside else []
        found.append(_owner(name) + ".base_layer" * len(later))
    return found


def _whole(config: LoraConfig, modules: list[Module], adapted: set[str], saved: Places) -> Whole:
    """`modules_to_save`, and the biases that train; those of `adapted` modules lie deeper."""
    chosen = [(name, module, layer, entry) for name, module, layer in saved for entry in module.tensor_map]
    if config.bias != "none":
        done = {name for name, _, _ in saved}
        everything = [
            (name, module, layer)
            for module in modules
            for layer, name in enumerate(module.names())
            if name not in done and (config.bias == "all" or name in adapted)
        ]
        chosen += [(n, m, at, entry) for n, m, at in everything for entry in m.tensor_map if "bias" in entry.tensor]
    tensors: dict[str, list] = {}
    layers: dict[str, set[int]] = {}
    for name, module, layer, entry in chosen:
        inner = ".base_layer" if name in adapted else ""
        tensor = f"{PREFIX}{name}{inner}.{entry.tensor.rpartition('.')[2]}"
        if entry.stacked > 1:
            raise ValueError(f"LoraConfig: {name} holds experts, which do not train whole beside an adapter here.")
        tensors.setdefault(tensor, []).append((entry, (layer,) if module.stacked else ()))
        layers.setdefault(entry.path, set()).add(layer)
    counts = {entry.path: module.layers for _, module, _, entry in chosen}
    where = {path: None if len(at) == counts[path] else tuple(sorted(at)) for path, at in layers.items()}
    return Whole(where, tensors)


def tensors_of(plan: Plan, params: dict[str, Any], kept: dict[str, Any]) -> dict[str, np.ndarray]:
    """What adapter_model.safetensors holds, by name; float32. `kept` has the arrays of `plan.kept`, by path."""
    found = {
        name: np.asarray(params[leaf(placed.adapter.name, kind)][at], np.float32)
        for placed in plan.placed
        for name, kind, at in placed.tensors()
    }
    found |= {name: np.asarray(kept[path], np.float32) for name, path in plan.kept.items()}
    return found | whole_tensors(plan, params)


def whole_tensors(plan: Plan, params: dict[str, Any]) -> dict[str, np.ndarray]:
    """Those of them that are no adapter's: what trains whole."""
    found = {}
    for name, places in plan.whole.tensors.items():
        view, moved = {}, []
        for entry, at in places:
            where = plan.whole.layers[entry.path]
            view[entry.path] = params[entry.path if where is None else Layers(entry.path, where).name]
            moved.append((entry, at if where is None else (where.index(at[0]),)))
        found[name] = read_tensor(view, moved)
    return found


def arrays_of(plan: Plan, tensors: dict[str, np.ndarray], like: dict[str, Any]) -> dict[str, jax.Array]:
    """The inverse: arrays that train, from tensors by name; `like` has their shapes."""
    arrays = {name: np.zeros(leaf_.shape, np.float32) for name, leaf_ in like.items()}
    for placed in plan.placed:
        for name, kind, at in placed.tensors():
            arrays[leaf(placed.adapter.name, kind)][at] = tensors[name]
    for name, places in plan.whole.tensors.items():
        for entry, at in places:
            where = plan.whole.layers[entry.path]
            key = entry.path if where is None else Layers(entry.path, where).name
            place = at if where is None else (where.index(at[0]),)
            arrays[key][place] = entry.take(np.asarray(tensors[name], np.float32))
    return {name: jnp.array(array) for name, array in arrays.items()}


def wanted_shapes(plan: Plan, like: dict[str, Any]) -> dict[str, tuple[int, ...]]:
    """Name on disk -> shape, of all that an adapter's file must hold."""
    found = {
        name: np.empty(like[leaf(placed.adapter.name, kind)].shape, np.bool_)[at].shape
        for placed in plan.placed
        for name, kind, at in placed.tensors()
    }
    for name, places in plan.whole.tensors.items():
        entry = places[0][0]
        where = plan.whole.layers[entry.path]
        key = entry.path if where is None else Layers(entry.path, where).name
        found[name] = entry.shape_on_disk(like[key].shape)
    return found
