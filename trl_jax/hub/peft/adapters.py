"""An adapter on a model: which arrays train, and their names on disk."""

from __future__ import annotations

import math
from dataclasses import dataclass, replace

import jax
import jax.numpy as jnp
import numpy as np

from trl_jax.hub.checkpoint.head_tensors import architecture
from trl_jax.hub.checkpoint.resizing import tables_of_tokens
from trl_jax.hub.checkpoint.saving import IndexedEntry
from trl_jax.hub.config.native import NativeConfig
from trl_jax.hub.peft.heads import is_lm_head, with_peft_head
from trl_jax.hub.peft.lora_config import LoraConfig, refuse_beyond
from trl_jax.hub.peft.modules import Module, current_name, modules_of
from trl_jax.hub.peft.target_parameters import targeted_parameters, with_parameters
from trl_jax.hub.peft.targets import Targets, fully_trained, rank_and_alpha, settled, targeted, with_drawn
from trl_jax.hub.peft.trained_tokens import TENSOR, token_tables
from trl_jax.models.adapted import Adapter, Layers, leaf

PREFIX = "base_model.model."
_SUFFIX = {"a": "lora_A.weight", "b": "lora_B.weight", "magnitude": "lora_magnitude_vector", "bias": "lora_B.bias"}
_SAVED_TABLES = ("embed_tokens", "lm_head")  # PEFT saves the base's own table or head too where one is named so
_HEAD = "lm_head.weight"  # the path of ours
# What PEFT puts between a table's name and its weight: nothing; a module with an adapter; one that trains whole; rows.
WRAPPED = ("", ".base_layer", ".original_module", ".token_adapter.base_layer")
_TABLE_SUFFIX = {"a": "lora_embedding_A", "b": "lora_embedding_B"}


@dataclass(frozen=True)
class ModuleAdapters:
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
        """Kind -> how many numbers it has, without the padding where ranks are smaller."""
        ranks, layers = sum(self.ranks) * max(self.module.experts, 1), sum(rank > 0 for rank in self.ranks)
        each = {"a": ranks * self.module.inputs, "b": ranks * self.module.outputs}
        each |= dict.fromkeys(("magnitude", "bias"), layers * self.module.outputs)
        return {kind: each[kind] for kind in ("a", "b", *self.adapter.has)}

    def at(self, layer: int) -> dict[str, tuple]:
        """Kind -> the index of one layer's in the array of all layers; each expert's A is padded by itself."""
        rank, experts = self.ranks[layer], max(self.module.experts, 1)
        rows = slice(rank * experts)
        if experts > 1 and 0 < rank < self.rank:
            rows = (np.arange(experts)[:, None] * self.rank + np.arange(rank)).reshape(-1)
        inner = {"a": (rows,), "b": (slice(None), slice(rank * experts))}
        lead = (layer,) if self.module.stacked else ()
        return {kind: (*lead, *inner.get(kind, ())) for kind in (("a", "b", *self.adapter.has) if rank else ())}

    def tensors(self) -> list[tuple[str, str, tuple]]:
        """(name on disk, kind, index in the array of all layers) of each layer's."""
        suffixes = _SUFFIX | (_TABLE_SUFFIX if self.module.kind == "embedding" else {})
        return [
            (f"{PREFIX}{name}.{suffixes[kind]}", kind, at)
            for layer, name in enumerate(self.names)
            for kind, at in self.at(layer).items()
        ]


@dataclass(frozen=True)
class FullyTrained:
    """Parameters of the model itself that train.

    Attributes:
        layers: path -> the layers, or rows of a table, that train; None: all.
        tensors: name in the adapter's file -> the entries that have a slice in it, each with its layer in our array.
    """

    layers: dict[str, tuple[int, ...] | None]
    tensors: dict[str, list[IndexedEntry]]

    def some_layers(self) -> tuple[Layers, ...]:
        """The stacks of which only some layers train."""
        return tuple(Layers(path, layers) for path, layers in self.layers.items() if layers is not None)

    def array_of(self, path: str) -> str:
        """The name of the array of a path that trains, among the params."""
        layers = self.layers[path]
        return path if layers is None else Layers(path, layers).name

    def index_of(self, path: str, at: tuple[int, ...]) -> tuple[int, ...]:
        """The place of a layer in that array; () is all of it."""
        layers = self.layers[path]
        return at if layers is None or not at else (layers.index(at[0]),)


@dataclass(frozen=True)
class AdapterPlan:
    """A LoraConfig on a model, resolved.

    Attributes:
        modules: the adapters, a kind of module each.
        order: (layer, number in `modules`) in PEFT's order, modules before parameters.
        full: the model's own parameters that train.
        saved_tables: name on disk -> path of the base's tables of tokens, or head, that PEFT saves with the adapter.
        copies: name on disk -> the name of the tensor that PEFT saves a second time under it.
        unties: whether a head that the base ties to the table of tokens needs a weight of its own: one of the two
            trains, and the other does not.
        note: a line on what the config lacked for the model's head; None for nothing.
    """

    config: LoraConfig
    modules: tuple[ModuleAdapters, ...]
    order: tuple[tuple[int, int], ...]
    full: FullyTrained
    saved_tables: dict[str, str]
    copies: dict[str, str]
    note: str | None
    unties: bool = False

    @property
    def shapes(self) -> dict[str, jax.ShapeDtypeStruct]:
        """Shapes of the adapters' arrays."""
        return {
            leaf(one.adapter.name, kind): jax.ShapeDtypeStruct(shape, jnp.float32)
            for one in self.modules
            for kind, shape in one.shapes().items()
        }

    def paths(self) -> list[dict[str, str]]:
        """Kind -> the path of its array among the params, of each of the adapters."""
        return [{kind: leaf(one.adapter.name, kind) for kind in one.shapes()} for one in self.modules]


def make_adapter_plan(
    lora: LoraConfig, config: NativeConfig, drawn: tuple[str, ...] = (), *, resized: bool = False
) -> AdapterPlan:
    """Resolve a LoraConfig on a native model.

    Args:
        drawn: tensors that are in no file: they train whole.
        resized: whether the tables of tokens are not those of the base's files, so that the adapter's file needs them.

    Raises:
        ValueError: it asks for what is not there, or not in this release; by name.
    """
    refuse_beyond(lora)
    modules = modules_of(config.untied())
    lora, for_head = with_peft_head(lora, modules, config.head.kind)
    lora, for_drawn = with_drawn(lora, modules, tuple(current_name(tensor, config.family) for tensor in drawn))
    note = " ".join(line for line in (for_head, for_drawn) if line) or None
    lora, targets, parameters = resolved(lora, modules, config.family.model_type)
    if lora.task_type is None:
        lora = replace(lora, auto_mapping=_auto_mapping(config))
    full = fully_trained(lora, modules)
    _check_apart(targets, parameters, full)
    grouped = {module: group for group in (targets, parameters) for _, module, _ in group}
    adapters = tuple(_module_adapters(lora, module, group) for module, group in grouped.items())
    number = {module: at for at, module in enumerate(grouped)}
    order = tuple((layer, number[module]) for _, module, layer in (*targets, *parameters))
    adapted = {name for name, _, _ in targets} | {_owner(name) for name, _, _ in parameters}
    rows = token_tables(lora, modules)
    trained = _full_training(lora, modules, adapted, full, rows)
    unties = config.is_tied and _unties(targets, full)
    saved, copies = _saved_tables(lora, targets), {}
    if resized:
        tied = config.is_tied and not unties
        whole, some = {name for name, _, _ in full}, {table.name for table, _ in rows}
        saved, copies = _resized_tables(modules, adapted, whole, some, tied=tied, head=not (tied and saved))
        saved = {name: path for name, path in saved.items() if name not in trained.tensors}
    return AdapterPlan(lora, adapters, order, trained, saved, copies, note, unties)


def _unties(targets: Targets, full: Targets) -> bool:
    """Whether the head or the table of tokens trains alone. An adapter of the table is none of the head's."""
    heads = any(is_lm_head(module) for _, module, _ in (*targets, *full))
    return heads or any(path.endswith(".embed") for _, module, _ in full for path, _ in module.parts)


def _saved_tables(lora: LoraConfig, targets: Targets) -> dict[str, str]:
    tables = [module for module in dict.fromkeys(m for _, m, _ in targets) if module.kind == "embedding"]
    for name in ("use_dora", "lora_bias"):
        if tables and vars(lora)[name]:
            raise ValueError(f"LoraConfig: {name}=True does not go with the table {tables[0].name}. Leave one out.")
    heads = [module for module in dict.fromkeys(m for _, m, _ in targets) if is_lm_head(module)]
    named = isinstance(lora.target_modules, set) and not lora.target_modules.isdisjoint(_SAVED_TABLES)
    if isinstance(lora.target_modules, str):
        named = any(module.name.rpartition(".")[2] in _SAVED_TABLES for module in (*tables, *heads))
    if not named or lora.trainable_token_indices is not None:
        return {}
    saved = [module for module in (*tables, *heads) if not module.parts[0][0].endswith("position_embed")]
    return {
        f"{PREFIX}{module.name}.base_layer.{entry.tensor.rpartition('.')[2]}": entry.path
        for module in saved
        for entry in module.tensor_map
    }


def _resized_tables(
    modules: list[Module], adapted: set[str], whole: set[str], some: set[str], *, tied: bool, head: bool
) -> tuple[dict[str, str], dict[str, str]]:
    """The tensors that PEFT adds by save_embedding_layers="auto" for a resized vocabulary: base values of each table
    of tokens and of the head (name on disk -> path), and copies of what trains (name -> name).

    Args:
        adapted, whole, some: names of the modules with an adapter, that train whole, and of which some rows train.
        tied: the head is the table. head: whether it is saved then, too.
    """
    saved, copies = {}, {}
    tables = [(one, entry) for one in modules for entry in one.tensor_map if tables_of_tokens([entry.path])]
    [table] = [entry.path for one, entry in tables if is_token_table(one)]
    for module, entry in tables:
        name, kind = PREFIX + module.name, entry.tensor.rpartition(".")[2]
        tied_head = tied and entry.path == _HEAD
        if tied_head and not head:
            continue
        if module.name in adapted:
            inner = WRAPPED[1]
        elif module.name in whole:
            inner, copies[f"{name}.modules_to_save.{kind}"] = WRAPPED[2], f"{name}.{kind}"
        else:
            inner = WRAPPED[3 if module.name in some or (tied_head and some) else 0]
        saved[f"{name}{inner}.{kind}"] = table if tied_head else entry.path
        if tied_head and some:
            [other] = some
            copies[f"{name}.{TENSOR}"] = f"{PREFIX}{other}.{TENSOR}"
    return saved, copies


def is_token_table(module: Module) -> bool:
    """Whether it is the table that a trunk looks tokens up in."""
    return any(path.endswith(".embed") for path, _ in module.parts)


def resolved(lora: LoraConfig, modules: list[Module], model_type: str) -> tuple[LoraConfig, Targets, Targets]:
    """The config as PEFT would write it, the modules that get adapters and the parameters that do.

    Raises:
        ValueError: it means nothing, or what cannot have one.
    """
    lora = settled(with_parameters(lora, modules, model_type), modules, model_type)
    targets = targeted(lora, modules, model_type)
    return lora, targets, targeted_parameters(lora, modules, alone=not targets)


def _auto_mapping(config: NativeConfig) -> dict[str, str]:
    """The class of the model, which PEFT writes where no task says it."""
    from transformers.models.auto.configuration_auto import model_type_to_module_name

    module = model_type_to_module_name(config.family.model_type)
    library = f"transformers.models.{module}.modeling_{module}"
    return {"base_model_class": architecture(config.family, config.head.kind), "parent_library": library}


def _owner(name: str) -> str:
    """The module that a parameter belongs to."""
    return name.rpartition(".")[0]


def _check_apart(targets: Targets, parameters: Targets, full: Targets) -> None:
    whole = {name for name, _, _ in full}
    both = sorted(whole & ({name for name, _, _ in targets} | {_owner(name) for name, _, _ in parameters}))
    if both:
        raise ValueError(
            f"LoraConfig: {both[0]} would get an adapter and train whole, too, for modules_to_save go by the ends of "
            f"names. PEFT refuses that as well: pass exclude_modules=[{both[0].rpartition('.')[2]!r}], or leave it out "
            "of target_parameters."
        )
    modules = {module for _, module, _ in targets}
    twice = sorted(name for name, module, _ in parameters if module in modules)
    if twice:
        raise ValueError(
            f"LoraConfig: target_parameters means {twice[0]}, and target_modules its module, in this layer or another. "
            "Name it in one of the two."
        )


def _module_adapters(lora: LoraConfig, module: Module, targets: Targets) -> ModuleAdapters:
    of_layer = {layer: rank_and_alpha(lora, name) for name, target, layer in targets if target is module}
    facts = [of_layer.get(layer, (0, 0.0)) for layer in range(module.layers)]
    roots = [math.sqrt(rank) if lora.use_rslora else rank for rank, _ in facts]
    scales = tuple(alpha / root if root else 0.0 for (_, alpha), root in zip(facts, roots, strict=True))
    has = ("magnitude",) * lora.use_dora + ("bias",) * (lora.lora_bias and module.kind != "embedding")
    there = tuple(rank > 0 for rank, _ in facts)
    adapter = Adapter(
        module.adapter_name, module.parts, scales, there, module.stacked, has, module.experts, module.swapped
    )
    names = _wrapped_names(module, targets) if module.experts else module.names()
    return ModuleAdapters(module, adapter, tuple(rank for rank, _ in facts), tuple(names))


def _wrapped_names(module: Module, targets: Targets) -> list[str]:
    """Parameters of one module are wrapped one around the other: the last one's adapter has the module's own name."""
    every, wrapped = [name for name, _, _ in targets], []
    for name in module.names():
        siblings = [one for one in every if _owner(one) == _owner(name)]
        later = siblings[siblings.index(name) + 1 :] if name in siblings else []
        wrapped.append(_owner(name) + ".base_layer" * len(later))
    return wrapped


def _full_training(
    lora: LoraConfig,
    modules: list[Module],
    adapted: set[str],
    full: Targets,
    tokens: list[tuple[Module, tuple[int, ...]]],
) -> FullyTrained:
    """`modules_to_save`, the biases that train, those of `adapted` modules with a longer name, and rows of tables."""
    meant = [(name, module, layer, entry) for name, module, layer in full for entry in module.tensor_map]
    if lora.bias != "none":
        done = {name for name, _, _ in full}
        others = [
            (name, module, layer)
            for module in modules
            for layer, name in enumerate(module.names())
            if name not in done and (lora.bias == "all" or name in adapted)
        ]
        meant += [(n, m, at, entry) for n, m, at in others for entry in m.tensor_map if entry.tensor.endswith(".bias")]
    tensors: dict[str, list] = {}
    layers: dict[str, set[int]] = {}
    for name, module, layer, entry in meant:
        inner = ".base_layer" if name in adapted else ""
        tensor = f"{PREFIX}{name}{inner}.{entry.tensor.rpartition('.')[2]}"
        if entry.stacked > 1:
            raise ValueError(f"LoraConfig: {name} holds experts, which do not train whole beside an adapter here.")
        tensors.setdefault(tensor, []).append((entry, (layer,) if module.stacked else ()))
        layers.setdefault(entry.path, set()).add(layer)
    counts = {entry.path: module.layers for _, module, _, entry in meant}
    some = {path: None if len(at) == counts[path] else tuple(sorted(at)) for path, at in layers.items()}
    for table, ids in tokens:
        if table.name in adapted:
            raise ValueError(
                f"LoraConfig: {table.name} would get an adapter, and its rows train by trainable_token_indices. Leave "
                "one out."
            )
        entry = next(entry for entry in table.tensor_map if entry.path.endswith(".weight"))
        tensors[f"{PREFIX}{table.name}.{TENSOR}"] = [(entry, ())]
        some[entry.path] = ids
    return FullyTrained(some, tensors)
