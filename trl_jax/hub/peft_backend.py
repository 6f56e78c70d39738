"""Backends of native models with an adapter. They save and load only the adapter, in PEFT's format."""

from __future__ import annotations

import abc
import logging
import math
import re
from collections.abc import Collection, Iterator, Mapping
from dataclasses import replace
from functools import cached_property, lru_cache
from pathlib import Path
from typing import TYPE_CHECKING, Any

import jax
import numpy as np
from safetensors.numpy import save_file

from trl_jax.core.files import as_dtype
from trl_jax.core.torch_random import TorchParamLayout
from trl_jax.hub.backend import Backend, Locations, fixed_values_error
from trl_jax.hub.checkpoint import IndexedEntry, ShardingRule, read_tensor, shard_array
from trl_jax.hub.heads import LM_HEAD
from trl_jax.hub.modules import of_vision, parameter_names, torch_order, torch_tensor_map
from trl_jax.hub.native_backend import NativeBackend
from trl_jax.hub.peft_adapters import (
    PREFIX,
    WRAPPED,
    AdapterPlan,
    arrays_of,
    expected_shapes,
    read_tables,
    read_tensors,
    tensors_of,
    trained_tensors,
)
from trl_jax.hub.peft_config import WEIGHTS
from trl_jax.hub.peft_targets import TENSOR
from trl_jax.models.adapters import AdaptedGraph, adapted_graph
from trl_jax.nn.linear import HALVES

if TYPE_CHECKING:
    from trl_jax.hub.peft_config import AdapterConfig


_LOW_RANK = re.compile(r"\.lora_[AB]\.\w+\.weight$")


class AdaptedBackend(Backend):
    """A native model with frozen weights and a trained adapter.

    `base` is the backend without the adapter, `config` the adapter's config, and `shapes` the shapes of all trained
    arrays. `saved_config` is the config saved with the adapter, for loading it onto the named base model.
    """

    log_level, undecayed, saves_in_background, can_resize, can_freeze = logging.INFO, frozenset(), True, False, False
    prefix = PREFIX  # of the base model's modules in PEFT
    copies_table = False  # whether the head is a frozen copy of the embedding, which is a single parameter in PEFT

    def __init__(self, base: NativeBackend, config: AdapterConfig, shapes: dict[str, Any]):
        self.base, self.config, self.shapes = base, config, shapes
        self.saved_config = config
        self.head, self.traits = base.head, base.traits

    @property
    def buffers(self) -> frozenset[str]:
        return self.base.buffers

    @property
    def main_dtype(self) -> str:
        """The main dtype of the base model."""
        return self.base.main_dtype

    def save_in(self, dtype: str) -> None:
        """Of the base model, once it is merged. The adapter is saved in float32, as it trains."""
        self.base.save_in(dtype)

    def locations(self, params: dict[str, jax.Array]) -> Locations:
        """The names are PEFT's; only trained parameters have locations."""
        del params
        return {name: [] for name in self._names} | self.trained_locations()

    def named(
        self, arrays: dict[str, jax.Array], names: Collection[str] | None = None
    ) -> Iterator[tuple[str, np.ndarray]]:
        """Yield all parameters under PEFT's names and in its order. The original weights of fully trained modules are
        not kept, so they are left out."""

        @lru_cache(maxsize=8)  # all experts of a layer share its arrays
        def weight_of_layer(path: str, layer: int | None) -> jax.Array:
            """The layer as an array of one layer; the whole array if it has no layers."""
            part = () if layer is None else slice(layer, layer + 1)
            return self.base.weight({name: array[part] for name, array in self._stored(arrays, path)}, path)

        wants_trained = names is None or not self.trained_names.keys().isdisjoint(names)
        trained = dict(self.trained(arrays)) if wants_trained else {}
        for name in self._names:
            if names is not None and name not in names:
                continue
            if name in self.trained_names:
                yield name, trained[name]
                continue
            weights, entries = {}, []
            for entry, index in self._frozen_tensors[name]:
                weights[entry.path] = weight_of_layer(entry.path, index[0] if index else None)
                entries.append((entry, (0, *index[1:]) if index else ()))
            yield name, read_tensor(weights, entries)

    @cached_property
    def _names(self) -> list[str]:
        """PEFT's names of all parameters in torch's order. PEFT registers a module before what it adds to it."""
        base = [self.prefix + name for name in parameter_names(self.base.source.config)]
        names = self._frozen_tensors | self.trained_names
        return [name for name in torch_order((*base, *names)) if name in names]

    def _stored(self, arrays: dict[str, Any], path: str) -> list[tuple[str, Any]]:
        """The array at a path, or the arrays that represent it if it is quantized or stored as raw bits."""
        form = self.base.formats.get(path)
        names = [path] if form is None else [f"{path}.{name}" for name in form.leaves()]
        return [(name, arrays[name]) for name in names]

    @cached_property
    def layers(self) -> Mapping[str, str]:
        """As the base model's, which PEFT moves into the adapters of its modules."""
        wrapped = {name.rpartition(".base_layer.")[0] for name in self._names if ".base_layer." in name}
        inside = {f"{self.prefix}{name}": kind for name, kind in self.base.layers.items()}
        return {f"{name}.base_layer" if name in wrapped else name: kind for name, kind in inside.items()} | {
            name.removesuffix(".weight"): "linear" for name in self._names if _LOW_RANK.search(name)
        }

    def is_trained(self, name: str) -> bool:
        return name in self.trained_names

    def with_values(self, arrays: Mapping[str, Any], values: Mapping[str, np.ndarray]) -> dict[str, np.ndarray]:
        raise fixed_values_error(
            "Load the folder of the adapter with AutoPeftModelForCausalLM.from_pretrained, or change model.params"
        )

    @property
    @abc.abstractmethod
    def trained_names(self) -> dict[str, None]:
        """PEFT's names of the trained parameters, in its order within each module."""

    @abc.abstractmethod
    def trained_locations(self) -> Locations:
        """Like `locations`, but only for trained parameters that the model computes with."""

    @abc.abstractmethod
    def trained(self, arrays: dict[str, jax.Array]) -> Iterator[tuple[str, np.ndarray]]:
        """Yield the trained parameters under PEFT's names."""

    @abc.abstractmethod
    def peft_name(self, module: str, parameter: str) -> str | None:
        """PEFT's name of a frozen parameter of the base model; None if it is trained."""

    @cached_property
    def _frozen_tensors(self) -> dict[str, list[IndexedEntry]]:
        """PEFT's name of each frozen parameter -> the entries stored in it."""
        config, tensors = self.base.source.config, {}
        shapes = config.untied().abstract[1]
        for entry in torch_tensor_map(config):
            for tensor, index in entry.tensors(shapes[entry.path].shape):
                module, _, parameter = tensor.rpartition(".")
                name = self.peft_name(module, parameter)
                tied = entry.path == LM_HEAD and self.copies_table
                if name is not None and entry.path not in self.base.buffers and not tied:
                    tensors.setdefault(name, []).append((entry, index))
        return tensors

    @property
    def token_table(self) -> str:
        return self.prefix + self.base.token_table

    @cached_property
    def tied(self) -> Mapping[str, str]:
        """An adapter on the embedding leaves the head's weight as it is, so both share the original table."""
        start = self.token_table.removesuffix("weight")
        tables = [name for name in self._frozen_tensors if name.startswith(start)]
        heads = [self.prefix + name for name in self.base.tied]
        heads += [self.peft_name(self.base.language_head, "weight")] if self.copies_table else []
        return {head: table for head in heads if head is not None for table in tables}

    def size_of(self, path: str, array: jax.Array) -> int:
        return self.base.size_of(path, array)

    def floats(self, path: str, array: jax.Array) -> jax.Array:
        return self.base.floats(path, array)

    def weight(self, arrays: dict[str, jax.Array], path: str) -> jax.Array:
        return self.base.weight(arrays, path)

    def save(
        self, folder: Path | None, params: dict[str, jax.Array], config: Any, max_shard_size: int | str | None = None
    ) -> None:
        """Write adapter_model.safetensors and adapter_config.json, as PEFT does."""
        del config, max_shard_size  # the base model's config is not saved
        tensors = dict(self.on_disk(params))
        if folder is None:
            return
        folder.mkdir(parents=True, exist_ok=True)
        save_file(tensors, folder / WEIGHTS, metadata={"format": "pt"})
        replace(self.saved_config, inference_mode=True).save_pretrained(folder)

    def load(
        self,
        folder: Path,
        seed: int,
        sharding_of: ShardingRule | None = None,
        defaults: dict[str, np.ndarray] | None = None,
    ) -> dict[str, jax.Array]:
        """Read the trained arrays. `defaults` has values for tensors that the file lacks, by their names in the
        file."""
        arrays = self.read(folder, defaults)
        if sharding_of is None:
            return arrays
        axes = self.axes
        return {path: shard_array(sharding_of, axes.get(path, ()), array) for path, array in arrays.items()}

    @abc.abstractmethod
    def read(self, folder: Path, defaults: dict[str, np.ndarray] | None) -> dict[str, jax.Array]:
        """Read the trained arrays from an adapter's folder; `defaults` as in `load`."""

    def resized(self, rows: int) -> Backend:
        raise ValueError(
            f"Cannot resize a model with an adapter from {self.traits.vocab_size} to {rows} tokens, because the "
            "adapter depends on the vocabulary size. Resize the model first, or call merge_and_unload()."
        )


class LoraBackend(AdaptedBackend):
    """A native model with low-rank adapters. `plan` may also train some of the model's own parameters.

    `tables` are the base model's arrays in `plan.saved_tables`, by path, on the host; they are saved with the adapter.
    """

    def __init__(self, base: NativeBackend, plan: AdapterPlan, tables: dict[str, np.ndarray], shapes: dict[str, Any]):
        super().__init__(base, plan.config, shapes)
        self.plan, self.tables = plan, tables
        self.name = f"{base.name} (with an adapter)"
        self.traits = replace(base.traits, drops_out=base.traits.drops_out or plan.config.lora_dropout > 0)
        self.graph = _graph_of(base, plan)
        self._base_paths = {name: name.removesuffix("@trained") for name in shapes}
        self.tensors = {name: base.tensors.get(path, name) for name, path in self._base_paths.items()}
        self._trained_shapes = expected_shapes(plan, shapes)
        self.dtypes = dict.fromkeys(self._trained_shapes, "float32")
        self._wrapped = _wrapped(plan)
        self._sizes = {adapter.paths[kind]: size for adapter in plan.modules for kind, size in adapter.sizes().items()}

    @cached_property
    def trained_names(self) -> dict[str, None]:
        return dict.fromkeys(self._name_in_memory(name) for name in (*self.dtypes, *self.plan.carried))

    @property
    def copies_table(self) -> bool:
        tables = (path for path, layers in self.plan.full.layers.items() if layers is None)
        return self.plan.unties and not any(path.endswith(".embed.weight") for path in tables)

    @property
    def originals(self) -> Mapping[str, int]:
        """Counts a table once if PEFT ties it and we do not (`plan.unties`)."""
        sizes: dict[str, int] = {}
        for name, [(entry, _, _), *_] in self.plan.full.tensors.items():
            if not name.endswith(TENSOR) and self._saved_module(name) != name:
                sizes[entry.path] = sizes.get(entry.path, 0) + math.prod(self._trained_shapes[name])
        if self.plan.unties:
            sizes[LM_HEAD] = sizes.get(LM_HEAD, 0) - math.prod(self.base.source.config.abstract[1][LM_HEAD].shape)
        return sizes

    @property
    def decays_by_name(self) -> frozenset[str]:
        return frozenset(name for name, path in self._base_paths.items() if path in self.base.decays_by_name)

    @property
    def buffers(self) -> frozenset[str]:
        """The base model's buffers, and their copies in fully trained modules."""
        buffers = self.base.buffers
        return buffers | {name for name, path in self._base_paths.items() if path in buffers}

    def _of_base(self, values: Mapping[str, Any]) -> dict[str, Any]:
        """The base model's values, which are by path, for trained arrays of its own parameters."""
        return {name: values[path] for name, path in self._base_paths.items() if path in values}

    def trained_locations(self) -> Locations:
        of_adapters = {name: [(path, at)] for name, path, at in self.plan.tensors()}
        of_model = {name: [(path, at) for _, path, at in parts] for name, parts in self.plan.full.tensors.items()}
        return {self._name_in_memory(name): places for name, places in (of_adapters | of_model).items()}

    def trained(self, arrays: dict[str, jax.Array]) -> Iterator[tuple[str, np.ndarray]]:
        tensors = trained_tensors(self.plan, arrays)
        return ((self._name_in_memory(name), values) for name, values in tensors.items())

    @property
    def file_names(self) -> Mapping[str, str]:
        names = {name: self._name_in_memory(name) for name in (*self.dtypes, *self.plan.carried)}
        # PEFT looks for DoRA's magnitudes under this name before it loads them.
        return names | {
            f"{name}.weight": ours for name, ours in names.items() if name.endswith("lora_magnitude_vector")
        }

    def with_values(self, arrays: Mapping[str, Any], values: Mapping[str, np.ndarray]) -> dict[str, np.ndarray]:
        tensors = trained_tensors(self.plan, dict(arrays))
        changed = {name: np.asarray(values.get(self._name_in_memory(name), value)) for name, value in tensors.items()}
        return {path: np.asarray(array) for path, array in arrays_of(self.plan, changed, self.shapes).items()}

    def peft_name(self, module: str, parameter: str) -> str | None:
        if f"{PREFIX}{module}.{parameter}" in self.dtypes:
            return None
        while module in self._wrapped:  # nested if several parameters of a module have adapters
            module += self._wrapped[module]
        name = f"{PREFIX}{module}.{parameter}"
        return None if name in self.dtypes else name

    def _name_in_memory(self, name: str) -> str:
        """PEFT's name of a parameter in memory, given its name on disk."""
        if name in self.plan.full.tensors and not name.endswith(TENSOR):
            return self._saved_module(name)
        name = _ADAPTER.sub(r"\1.default", name)
        return f"{name}.weight" if name.endswith("lora_magnitude_vector.default") else name

    def _saved_module(self, name: str) -> str:
        """The name in memory of a fully trained parameter: PEFT wraps its module if `modules_to_save` selects it."""
        suffixes, parts = tuple(self.plan.config.modules_to_save or ()), name.split(".")
        for at in range(PREFIX.count(".") + 1, len(parts)):
            if suffixes and ".".join(parts[:at]).endswith(suffixes):
                return ".".join([*parts[:at], "modules_to_save.default", *parts[at:]])
        return name

    def torch_param_layout(self) -> TorchParamLayout:
        base = self.base.torch_param_layout()
        stacked = {path for adapter in self.plan.modules if adapter.module.stacked for path in adapter.paths.values()}
        stacked |= {name for name, path in self._base_paths.items() if path in base.stacked}
        joined, axes, kernels = map(self._of_base, (base.joined, base.axes, base.kernels))
        return TorchParamLayout(frozenset(stacked), joined, axes, kernels)

    @property
    def axes(self) -> Mapping[str, tuple[str, ...]]:
        axes = self.base.axes
        return axes | self._of_base(axes)

    def of_vision(self, params: Collection[str]) -> frozenset[str]:
        adapters = (adapter.paths.values() for adapter in self.plan.modules if of_vision(adapter.module.tensor_map[0]))
        return super().of_vision(params) | {path for paths in adapters for path in paths if path in params}

    def size_of(self, path: str, array: jax.Array) -> int:
        return self._sizes[path] if path in self._sizes else self.base.size_of(path, array)

    def read(self, folder: Path, defaults: dict[str, np.ndarray] | None) -> dict[str, jax.Array]:
        return arrays_of(self.plan, read_tensors(folder, self.plan, self.shapes, defaults), self.shapes)

    def is_as_in_files(self, name: str) -> bool:
        """Whether a frozen array equals the base checkpoint and is not saved with the adapter."""
        path, form = name.removesuffix(".codes"), self.base.formats.get(name.rpartition(".")[0])
        return path not in self.tables and (form is None or form.kind in HALVES)

    def restore_tables(self, folder: Path, arrays: dict[str, Any]) -> dict[str, Any]:
        """Replace the base model's tables with those in an adapter's folder.

        Args:
            arrays: the base model's arrays.

        Returns:
            The replaced arrays, with the sharding of the old ones.
        """
        shapes = {path: table.shape for path, table in self.tables.items()}
        tables = read_tables(folder, self.plan, shapes)
        self.tables, replaced = self.tables | tables, {}
        for path, table in tables.items():
            if path in arrays or f"{path}.codes" in arrays:
                replaced |= self.base.replaced(arrays, path, table)
        return replaced

    def _tables_on_disk(self) -> dict[str, np.ndarray]:
        """The tables in the dtypes of the base checkpoint, if these represent them exactly."""
        source = self.base.source
        kinds = {entry.path: source.dtypes.get(entry.tensor, source.dtype) for entry in source.tensor_map}
        return {path: _narrowed(table, as_dtype(kinds[path])) for path, table in self.tables.items()}

    def on_disk(self, params: dict[str, jax.Array]) -> Iterator[tuple[str, np.ndarray]]:
        tensors = tensors_of(self.plan, params, self._tables_on_disk())
        return ((name, np.asarray(tensors[name], order="C")) for name in sorted(tensors))


_ADAPTER = re.compile(r"(lora_A|lora_B|lora_embedding_A|lora_embedding_B|lora_magnitude_vector|tokens_delta)(?=\.|$)")


def _wrapped(plan: AdapterPlan) -> dict[str, str]:
    """Module -> what PEFT inserts between its name and its weight."""
    adapted = (
        name for adapters in plan.modules for name, rank in zip(adapters.names, adapters.ranks, strict=True) if rank
    )
    tables = (name.removesuffix(f".{TENSOR}") for name in plan.full.tensors if name.endswith(TENSOR))
    wrapped = dict.fromkeys(adapted, WRAPPED[1])
    return wrapped | {name.removeprefix(PREFIX): WRAPPED[3] for name in tables}


def _narrowed(table: np.ndarray, kind: np.dtype) -> np.ndarray:
    narrow = table.astype(kind)
    return narrow if np.array_equal(narrow.astype(np.float32), table.astype(np.float32)) else table


def _graph_of(base: NativeBackend, plan: AdapterPlan) -> AdaptedGraph:
    adapters = tuple(module.adapter for module in plan.modules)
    return adapted_graph(base.make, adapters, plan.shapes, plan.full.some_layers(), plan.config.lora_dropout)
