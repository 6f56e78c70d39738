"""The modules of a model in transformers' names and order, and the places of our arrays in them."""

from __future__ import annotations

import re
from dataclasses import dataclass, replace
from typing import Any

from flax import nnx

from trl_jax.hub.checkpoint.tensor_map import TensorEntry, make_tensor_map
from trl_jax.hub.checkpoint.tensor_slices import ExpertRows, Rows, TensorSlice
from trl_jax.hub.config.native import NativeConfig
from trl_jax.hub.families import Family
from trl_jax.models.adapted import module_at
from trl_jax.models.lm_head import LmHead
from trl_jax.nn.linear import Embedding, Linear

_ROUTER = re.compile(r"\.router$")  # a class of its own there, no linear map
_READ_WHOLE = re.compile(r"\.(type_embed|distance_embed)$")  # no rows of these are looked up
# The parameters of experts there, in order, and those of ours that lie in each, one below the other.
_EXPERTS = {"gate_up_proj": ("gate", "up"), "down_proj": ("down",)}
_UNGATED = {"up_proj": ("up",), "down_proj": ("down",)}


@dataclass(frozen=True)
class Module:
    """A module with parameters; with `{}` in its name, one of each layer.

    Attributes:
        kind: "linear", "conv1d" (a linear map stored as (in, out)), "embedding", "router", "experts" or "other".
        parts: our modules whose weights lie in its weight, each with its slice of it.
        tensor_map: its parameters.
        layers: how many, 1 without `{}`; `first` is the number of the first.
        inputs, outputs: of the whole matrix; of an embedding rows and columns.
        experts: how many matrices lie in one parameter; 0 where it is a matrix. swapped: they lie there as (in, out),
            and PEFT takes the one for the other.
        inside: parameters of experts, each with a name of its own, `<module>.<parameter>`.
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
        """The name of its adapters' arrays, which tells layers of one run from those of another."""
        return self.name.replace("{}", f"{{{self.first}+}}") if self.first else self.name

    def names(self) -> list[str]:
        return [self.name.format(self.first + layer) for layer in range(self.layers)]

    def parameters(self) -> list[tuple[str, Module]]:
        """Each by its last name, with the module, or the one inside of it, that has it."""
        if self.inside:
            return [(one.name.rpartition(".")[2], one) for one in self.inside]
        return [(name, self) for name in dict.fromkeys(entry.tensor.rpartition(".")[2] for entry in self.tensor_map)]


def modules_of(config: NativeConfig) -> list[Module]:
    """The modules of a model in transformers' order; a layer's are next to each other, wherever `names` has them."""
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
            group = groups.setdefault((current_name(_owner(entry.tensor), config.family), entry.first), [])
            if entry not in group:
                group.append(entry)
    made = [_module(name, group, shapes, model) for (name, _), group in groups.items()]
    if config.family.linear_router:
        made = [replace(one, kind="linear") if one.kind == "router" else one for one in made]
    return made


def _owner(tensor: str) -> str:
    """The module that has this tensor; all experts are one module."""
    if tensor.count("{}") > 1:
        return tensor[: tensor.rindex(".{}")]
    return tensor.rpartition(".")[0]


def current_name(name: str, family: Family) -> str:
    """The name in transformers of a module or tensor, whose name on disk may be an older one."""
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
    """The module of all experts; its parameters have a first axis for them."""
    entries, inside = {entry.path.rpartition(".")[2]: entry for entry in tensor_map}, []
    for parameter, ours in (_EXPERTS if "gate" in entries else _UNGATED).items():
        layers, experts, rows, inputs = shapes[entries[ours[0]].path].shape
        total = rows * len(ours)
        of = tuple(entries[one] for one in ours)
        slices = [None] if len(ours) == 1 else [Rows(at * rows, rows, total) for at in range(len(ours))]
        if of[0].tensor_slice is not None:  # they lie so on disk, too
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
    if not isinstance(module, Linear | LmHead):
        return "other"
    if _ROUTER.search(path):
        return "router"
    return "conv1d" if isinstance(entry.tensor_slice, Rows) and entry.tensor_slice.transposed else "linear"


def in_order(modules: list[Module]) -> list[tuple[str, Module, int]]:
    """Every module by its whole name, with its layer counted from 0, in the order of `named_modules`."""
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
