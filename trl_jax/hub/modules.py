"""The modules of a model, with transformers' names and order, and our arrays that hold their parameters."""

from __future__ import annotations

import re
from collections.abc import Iterable, Iterator
from dataclasses import dataclass, replace
from itertools import groupby
from typing import Any

from flax import nnx

from trl_jax.hub.config import NativeConfig
from trl_jax.hub.families import Family
from trl_jax.hub.tensor_map import ExpertRows, Kernel, Rows, TensorEntry, TensorSlice, make_tensor_map
from trl_jax.models.adapters import module_at
from trl_jax.models.model import LmHead
from trl_jax.nn.linear import Embedding, Linear

_ROUTER = re.compile(r"\.router$")  # not an nn.Linear in transformers, but a class of its own
_READ_WHOLE = re.compile(r"\.(type_embed|distance_embed)$")  # tables that are not looked up by token id
# The parameters of experts in transformers, in order -> our parameters that are concatenated in each.
_EXPERTS = {"gate_up_proj": ("gate", "up"), "down_proj": ("down",)}
_UNGATED = {"up_proj": ("up",), "down_proj": ("down",)}


QUANTIZED = ("nf4", "fp4", "int8")  # formats of weights


@dataclass(frozen=True)
class Module:
    """A module with parameters. `{}` in its name stands for the layer number.

    Attributes:
        kind: "linear", "conv1d" (a linear layer stored as (in, out)), "embedding", "router", "experts" or "other".
        parts: our modules whose weights form its weight, each with its slice of that weight (None: all of it).
        tensor_map: the entries of its parameters.
        layers: number of layers; 1 if the name has no `{}`.
        first: number of the first layer.
        inputs, outputs: size of the full matrix; for an embedding, rows and columns.
        experts: number of matrices in one parameter; 0 for a plain matrix.
        swapped: whether experts are stored as (in, out), which PEFT mistakes for (out, in).
        inside: the parameters of experts as modules of their own, named `<module>.<parameter>`.
    """

    name: str
    kind: str
    parts: tuple[tuple[str, TensorSlice | None], ...]
    tensor_map: tuple[TensorEntry, ...]
    layers: int
    first: int
    inputs: int
    outputs: int
    experts: int = 0
    inside: tuple[Module, ...] = ()
    swapped: bool = False

    @property
    def stacked(self) -> bool:
        return "{}" in self.name

    @property
    def adapter_name(self) -> str:
        """The name of the adapter's arrays. It includes the first layer, so that each run of layers has its own
        name."""
        return self.name.replace("{}", f"{{{self.first}+}}") if self.first else self.name

    def names(self) -> list[str]:
        return [self.name.format(self.first + layer) for layer in range(self.layers)]

    def parameters(self) -> list[tuple[str, Module]]:
        """(last name component, owner) of each parameter; the owner is this module or one of `inside`."""
        if self.inside:
            return [(inner.name.rpartition(".")[2], inner) for inner in self.inside]
        return [(name, self) for name in dict.fromkeys(entry.tensor.rpartition(".")[2] for entry in self.tensor_map)]


def modules_of(config: NativeConfig) -> list[Module]:
    """The modules of a model in transformers' order. One entry covers all layers of a run; `in_order` lists each
    layer."""
    names = config.names
    _, shapes = config.abstract
    model = nnx.eval_shape(config.model)
    entries = {entry.path: entry for entry in make_tensor_map(shapes, names)}
    groups: dict[tuple[str, int], list[TensorEntry]] = {}
    for key in names:
        for path in [key] if key in entries else [f"{key}.weight", f"{key}.bias"]:
            if path not in entries:
                continue
            entry = entries[path]
            tensor = entry.tensor
            name = _owner(config.vision.module(tensor) if of_vision(entry) else current_name(tensor, config.family))
            group = groups.setdefault((name, entry.first), [])
            if entry not in group:
                group.append(entry)
    modules = [_module(name, group, shapes, model) for (name, _), group in groups.items()]
    if config.family.linear_router:
        modules = [replace(module, kind="linear") if module.kind == "router" else module for module in modules]
    return modules


def torch_tensor_map(config: NativeConfig) -> list[TensorEntry]:
    """The tensor map with the names and shapes that parameters have in transformers. Files may differ: they may store
    the experts of a layer separately, or use older names of modules."""
    entries = []
    for module in modules_of(config):
        fused = {
            path: TensorEntry(path, inner.name, _of_all(rows), inner.first)
            for inner in module.inside
            for path, rows in inner.parts
        }
        for entry in module.tensor_map:
            named = replace(entry, tensor=f"{module.name}.{entry.tensor.rpartition('.')[2]}")
            entries.append(fused.get(entry.path, named))
    return entries


def parameter_names(config: NativeConfig) -> list[str]:
    """The names of all parameters and buffers, in the order of torch's `named_parameters`."""
    shapes = config.abstract[1]
    entries = torch_tensor_map(config)
    return torch_order(name for entry in entries for name, _ in entry.tensors(shapes[entry.path].shape))


def torch_order(names: Iterable[str]) -> list[str]:
    """Sort names as torch does, which lists a module's own parameters, and then its children's. Parameters and children
    are in the order in which they first occur; layers are in the order of their numbers."""
    root: dict[str, Any] = {}
    for name in names:
        *owners, parameter = name.split(".")
        module = root
        for owner in owners:
            module = module.setdefault(owner, {})
        module[parameter] = None

    def walk(module: dict[str, Any], prefix: str) -> Iterator[str]:
        yield from (prefix + name for name, children in module.items() if children is None)
        inner = [name for name, children in module.items() if children is not None]
        for name in sorted(inner, key=int) if all(map(str.isdecimal, inner)) else inner:
            yield from walk(module[name], f"{prefix}{name}.")

    return list(walk(root, ""))


def _of_all(rows: TensorSlice | None) -> TensorSlice | None:
    """Convert a slice of one expert's matrix to a slice of the parameter that holds all experts."""
    if isinstance(rows, Rows) and not isinstance(rows, ExpertRows):
        return ExpertRows(rows.start, rows.count, rows.total, rows.transposed)
    return rows


def of_vision(entry: TensorEntry) -> bool:
    """Whether an array belongs to a vision tower or its connector, which PEFT visits before the text model."""
    return entry.path.startswith("vision.")


def _owner(tensor: str) -> str:
    """The name of the module that owns a tensor; all experts of a layer belong to one module."""
    if tensor.count("{}") > 1:
        return tensor[: tensor.rindex(".{}")]
    return tensor.rpartition(".")[0]


def current_name(name: str, family: Family) -> str:
    """The name in current transformers of a module or tensor, which may have an older name on disk."""
    if family.other_head is not None and name.removesuffix(".weight") == family.lm_head.names[0][1]:
        name = name.replace(family.lm_head.names[0][1], family.other_head)
    for old, new in family.moved:
        name = name.replace(old, new)
    for prefix in family.other_prefixes:
        name = prefix + name.removeprefix(family.base_prefix) if name.startswith(family.base_prefix) else name
    return name


def _module(name: str, tensor_map: list[TensorEntry], shapes: dict, model: Any) -> Module:
    if tensor_map[0].stacked > 1 or name.endswith(".experts"):
        return _experts(name, tensor_map, shapes)
    weights = [entry for entry in tensor_map if entry.path.endswith(".weight") and entry.tensor.endswith(".weight")]
    kind, ours = "other", [entry.path.removesuffix(".weight") for entry in weights]
    first = tensor_map[0]
    layers = shapes[first.path].shape[0] if "{}" in name else 1
    inputs = outputs = 0
    if weights:
        kind = _kind(module_at(model, ours[0]), ours[0], weights[0])
    if kind != "other":
        whole = weights[0].shape_on_disk(shapes[weights[0].path].shape)
        outputs, inputs = whole[::-1] if kind in ("conv1d", "embedding") else whole
    parts = tuple((path, entry.tensor_slice) for path, entry in zip(ours, weights, strict=True))
    return Module(name, kind, parts, tuple(tensor_map), layers, first.first, inputs, outputs)


def _experts(name: str, tensor_map: list[TensorEntry], shapes: dict) -> Module:
    """The module of all experts; the first axis of its parameters is the expert."""
    entries, inside = {entry.path.rpartition(".")[2]: entry for entry in tensor_map}, []
    for parameter, ours in (_EXPERTS if "gate" in entries else _UNGATED).items():
        layers, experts, rows, inputs = shapes[entries[ours[0]].path].shape
        total = rows * len(ours)
        of = tuple(entries[name] for name in ours)
        slices = [None] if len(ours) == 1 else [Rows(at * rows, rows, total) for at in range(len(ours))]
        if of[0].tensor_slice is not None:  # also fused on disk
            slices = [entry.tensor_slice for entry in of]
        parts = tuple((entry.path, rows) for entry, rows in zip(of, slices, strict=True))
        swapped = isinstance(slices[0], ExpertRows) and slices[0].transposed
        sizes = (total, inputs) if swapped else (inputs, total)
        whole = f"{name}.{parameter}"
        inside.append(Module(whole, "experts", parts, of, layers, of[0].first, *sizes, experts, swapped=swapped))
    return Module(name, "other", (), tuple(tensor_map), layers, tensor_map[0].first, 0, 0, inside=tuple(inside))


def _kind(module: Any, path: str, entry: TensorEntry) -> str:
    if isinstance(module, Embedding):
        return "other" if _READ_WHOLE.search(path) else "embedding"
    if not isinstance(module, Linear | LmHead) or isinstance(entry.tensor_slice, Kernel):
        return "other"
    if _ROUTER.search(path):
        return "router"
    return "conv1d" if isinstance(entry.tensor_slice, Rows) and entry.tensor_slice.transposed else "linear"


def in_order(modules: list[Module]) -> list[tuple[str, Module, int]]:
    """(full name, module, layer index from 0) of each module in each layer, in the order of `named_modules`: the vision
    tower, its connectors, the text model."""
    return [place for _, part in groupby(modules, _part) for place in _layer_by_layer(list(part))]


def _part(module: Module) -> str:
    """The part of a vision-language model that a module belongs to, such as "tower"; "" for the text model."""
    first = module.tensor_map[0]
    return first.path.split(".")[1] if of_vision(first) else ""


def _layer_by_layer(modules: list[Module]) -> list[tuple[str, Module, int]]:
    """The modules of one part: those before the layers, the layers, and those after them."""
    at = next((i for i, module in enumerate(modules) if module.stacked), len(modules))
    before, after = modules[:at], [module for module in modules[at:] if not module.stacked]
    stacked = [module for module in modules if module.stacked]
    single = [[(module.name, module, 0) for module in group] for group in (before, after)]
    numbers = sorted({module.first + layer for module in stacked for layer in range(module.layers)})
    layered = [
        (module.name.format(number), module, number - module.first)
        for number in numbers
        for module in stacked
        if 0 <= number - module.first < module.layers
    ]
    return single[0] + layered + single[1]
