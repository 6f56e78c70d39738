"""LoRA adapters: which arrays they train, their initial values, and their tensors in PEFT's files.

An `AdapterPlan` is a LoraConfig resolved for a model. It says which arrays hold each tensor of an adapter's file.
"""

from __future__ import annotations

import logging
import math
import re
from collections.abc import Callable, Iterable, Mapping
from dataclasses import dataclass, field, replace
from functools import cached_property
from pathlib import Path
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np

from trl_jax.core.files import Pieces
from trl_jax.core.text import brief, listed
from trl_jax.core.torch_random import TorchGenerator
from trl_jax.hub.checkpoint import architecture, read_tensor, tables_of_tokens
from trl_jax.hub.config import NativeConfig
from trl_jax.hub.formats import open_tensors, read_one, shape_of, tensor_names
from trl_jax.hub.heads import LM_HEAD
from trl_jax.hub.modules import Module, current_name, modules_of, of_vision
from trl_jax.hub.native_backend import NativeBackend
from trl_jax.hub.peft_config import PICKLED, PISSA, WEIGHTS, LoraConfig, no_adapter_error, refuse_beyond
from trl_jax.hub.peft_targets import (
    ADAPTABLE,
    EMBEDDING,
    HEAD,
    TENSOR,
    Targets,
    fully_trained,
    is_all,
    is_left_out,
    is_lm_head,
    is_selected,
    rank_and_alpha,
    resolve_targets,
    targeted,
    targeted_parameters,
    token_tables,
    with_drawn,
    with_parameters,
    with_peft_head,
)
from trl_jax.hub.tensor_map import TensorEntry
from trl_jax.mesh.mesh import owned
from trl_jax.models.adapters import Adapter, Layers, leaf

logger = logging.getLogger(__name__)


# AdapterPlan: which arrays are trained, and their names on disk


PREFIX = "base_model.model."
_SUFFIX = {"a": "lora_A.weight", "b": "lora_B.weight", "magnitude": "lora_magnitude_vector", "bias": "lora_B.bias"}
_SAVED_TABLES = (EMBEDDING, HEAD)  # if a module with this name is adapted, PEFT also saves its base weight
# What PEFT inserts between a table's name and its weight: nothing; for an adapter; for full training; for single rows.
WRAPPED = ("", ".base_layer", ".original_module", ".token_adapter.base_layer")
_TABLE_SUFFIX = {"a": "lora_embedding_A", "b": "lora_embedding_B"}


@dataclass(frozen=True)
class ModuleAdapters:
    """The adapters of one kind of module, one per layer.

    A module's arrays, each of one kind (a, b, magnitude or bias), stack all layers.

    Attributes:
        ranks: of each layer; 0 for layers without an adapter.
        names: of the module in each layer, in PEFT's files.
    """

    module: Module
    adapter: Adapter
    ranks: tuple[int, ...]
    names: tuple[str, ...]

    @property
    def rank(self) -> int:
        return max(self.ranks)

    @cached_property
    def paths(self) -> dict[str, str]:
        """Kind -> path of the array."""
        return {kind: leaf(self.adapter.name, kind) for kind in ("a", "b", *self.adapter.has)}

    def shapes(self) -> dict[str, tuple[int, ...]]:
        """Kind -> shape of the array."""
        module, lead = self.module, (self.module.layers,) if self.module.stacked else ()
        rank = self.rank * max(module.experts, 1)
        all_shapes = {"a": (rank, module.inputs), "b": (module.outputs, rank)}
        all_shapes |= dict.fromkeys(("magnitude", "bias"), (module.outputs,))
        return {kind: (*lead, *all_shapes[kind]) for kind in self.paths}

    def sizes(self) -> dict[str, int]:
        """Kind -> number of parameters, without the padding of smaller ranks."""
        ranks, layers = sum(self.ranks) * max(self.module.experts, 1), sum(rank > 0 for rank in self.ranks)
        all_sizes = {"a": ranks * self.module.inputs, "b": ranks * self.module.outputs}
        all_sizes |= dict.fromkeys(("magnitude", "bias"), layers * self.module.outputs)
        return {kind: all_sizes[kind] for kind in self.paths}

    def at(self, layer: int) -> dict[str, tuple]:
        """Kind -> index of one layer in the array; each expert's A is padded separately."""
        rank, experts = self.ranks[layer], max(self.module.experts, 1)
        rows = slice(rank * experts)
        if experts > 1 and 0 < rank < self.rank:
            rows = (np.arange(experts)[:, None] * self.rank + np.arange(rank)).reshape(-1)
        inner = {"a": (rows,), "b": (slice(None), slice(rank * experts))}
        lead = (layer,) if self.module.stacked else ()
        return {kind: (*lead, *inner.get(kind, ())) for kind in (self.paths if rank else ())}

    def tensors(self) -> list[tuple[str, str, tuple]]:
        """(name on disk, path of the array, index in it) of each tensor."""
        suffixes = _SUFFIX | (_TABLE_SUFFIX if self.module.kind == "embedding" else {})
        return [
            (f"{PREFIX}{name}.{suffixes[kind]}", self.paths[kind], at)
            for layer, name in enumerate(self.names)
            for kind, at in self.at(layer).items()
        ]


@dataclass(frozen=True)
class FullyTrained:
    """Parameters of the model itself that are trained.

    Attributes:
        layers: path -> the layers, or rows of a table, that are trained; None means all.
        tensors: name in the adapter's file -> the entries stored in it, each with the path of the trained array and the
            index in it.
    """

    layers: dict[str, tuple[int, ...] | None]
    tensors: dict[str, list[tuple[TensorEntry, str, tuple[int, ...]]]]

    def some_layers(self) -> tuple[Layers, ...]:
        """The stacked arrays in which only some layers are trained."""
        return tuple(Layers(path, layers) for path, layers in self.layers.items() if layers is not None)


@dataclass(frozen=True)
class AdapterPlan:
    """A LoraConfig resolved for a model.

    Attributes:
        modules: the adapters, one entry per kind of module.
        order: (layer, index into `modules`) in PEFT's order, with modules before parameters.
        full: the model's own trained parameters.
        saved_tables: name on disk -> path of the base model's embedding or head that PEFT saves with the adapter.
        copies: name on disk -> name of the tensor that PEFT saves a second time under that name.
        unties: whether a tied head needs its own weight, because only one of head and embedding is trained.
        note: a log message about a change to the config for the model's head; None if there is none.
        carried: name on disk -> tensor of an adapter of modules that are not computed; saved unchanged.
    """

    config: LoraConfig
    modules: tuple[ModuleAdapters, ...]
    order: tuple[tuple[int, int], ...]
    full: FullyTrained
    saved_tables: dict[str, str]
    copies: dict[str, str]
    note: str | None
    unties: bool = False
    carried: Mapping[str, np.ndarray] = field(default_factory=dict)

    @property
    def shapes(self) -> dict[str, jax.ShapeDtypeStruct]:
        """Shapes of the adapters' arrays."""
        return {
            module.paths[kind]: jax.ShapeDtypeStruct(shape, jnp.float32)
            for module in self.modules
            for kind, shape in module.shapes().items()
        }

    def tensors(self) -> list[tuple[str, str, tuple]]:
        """(name on disk, path of the array, index in it) of each tensor of the adapters."""
        return [tensor for module in self.modules for tensor in module.tensors()]


# Resolving a LoraConfig for a model


def make_adapter_plan(
    lora: LoraConfig, config: NativeConfig, drawn: tuple[str, ...] = (), *, resized: bool = False
) -> AdapterPlan:
    """Resolve a LoraConfig for a native model.

    Args:
        drawn: tensors that the checkpoint lacks; they are trained fully.
        resized: whether the vocabulary was resized, so that the tables must be saved with the adapter.

    Raises:
        ValueError: the config names something that the model lacks, or that is not supported in this release.
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
    _check_positions(config.family.model_type, [module for _, module, _ in targets] + [table for table, _ in rows])
    trained = _full_training(lora, modules, adapted, full, rows)
    unties = config.is_tied and _unties(targets, full)
    saved, copies = _saved_tables(lora, targets), {}
    if resized:
        tied = config.is_tied and not unties
        whole, some = {name for name, _, _ in full}, {table.name for table, _ in rows}
        saved, copies = _resized_tables(modules, adapted, whole, some, tied=tied, head=not (tied and saved))
        saved = {name: path for name, path in saved.items() if name not in trained.tensors}
    return AdapterPlan(lora, adapters, order, trained, saved, copies, note, unties)


# Tables that transformers calls with the attention mask and that compute positions from it themselves.
_CALLED_WITH_MASK = {"opt": "model.decoder.embed_positions"}


def _check_positions(model_type: str, adapted: list[Module]) -> None:
    """Raise ValueError for an adapter of a position table that PEFT would look up by the attention mask."""
    table = _CALLED_WITH_MASK.get(model_type)
    if any(module.name == table for module in adapted):
        raise ValueError(
            f"LoraConfig: {table} cannot have an adapter or trainable_token_indices: the module is called with the "
            "attention mask, and PEFT looks up its values, 0 and 1, in place of positions, so that all positions would "
            "share a row. Leave it out of target_modules, or train it fully with modules_to_save=['embed_positions']."
        )


def _unties(targets: Targets, full: Targets) -> bool:
    """Whether only one of head and embedding is trained. An adapter on the embedding does not affect the head."""
    heads = any(is_lm_head(module) for _, module, _ in (*targets, *full))
    return heads or any(path.endswith(".embed") for _, module, _ in full for path, _ in module.parts)


def _saved_tables(lora: LoraConfig, targets: Targets) -> dict[str, str]:
    tables = [module for module in dict.fromkeys(m for _, m, _ in targets) if module.kind == "embedding"]
    for name in ("use_dora", "lora_bias"):
        if tables and vars(lora)[name]:
            raise ValueError(f"LoraConfig: {name}=True does not support the embedding {tables[0].name}. Leave one out.")
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
    """The tensors that PEFT's save_embedding_layers="auto" adds for a resized vocabulary: base weights of embeddings
    and head (name on disk -> path), and copies of trained tensors (name -> name).

    Args:
        adapted, whole, some: names of the modules that have an adapter, are trained fully, or have some rows trained.
        tied: whether the head is tied to the embedding.
        head: whether a tied head is saved too.
    """
    saved, copies = {}, {}
    tables = [(module, entry) for module in modules for entry in module.tensor_map if tables_of_tokens([entry.path])]
    [table] = [entry.path for module, entry in tables if is_token_table(module)]
    for module, entry in tables:
        name, kind = PREFIX + module.name, entry.tensor.rpartition(".")[2]
        tied_head = tied and entry.path == LM_HEAD
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
            [table_name] = some
            copies[f"{name}.{TENSOR}"] = f"{PREFIX}{table_name}.{TENSOR}"
    return saved, copies


def is_token_table(module: Module) -> bool:
    """Whether the module is the token embedding of a trunk."""
    return any(path.endswith(".embed") for path, _ in module.parts)


def resolved(lora: LoraConfig, modules: list[Module], model_type: str) -> tuple[LoraConfig, Targets, Targets]:
    """The config as PEFT would save it, and the modules and the parameters that get adapters.

    Raises:
        ValueError: the config selects nothing, or something that cannot have an adapter.
    """
    lora = resolve_targets(with_parameters(lora, modules, model_type), modules, model_type)
    targets = targeted(lora, modules, model_type)
    return lora, targets, targeted_parameters(lora, modules, alone=not targets)


def _auto_mapping(config: NativeConfig) -> dict[str, str]:
    """The class of the model, which PEFT saves if the config has no task."""
    from transformers.models.auto.configuration_auto import model_type_to_module_name

    module = model_type_to_module_name(config.family.model_type)
    library = f"transformers.models.{module}.modeling_{module}"
    return {"base_model_class": architecture(config.family, config.head.kind), "parent_library": library}


def _owner(name: str) -> str:
    """The name of the module that owns a parameter."""
    return name.rpartition(".")[0]


def _check_apart(targets: Targets, parameters: Targets, full: Targets) -> None:
    whole = {name for name, _, _ in full}
    both = sorted(whole & ({name for name, _, _ in targets} | {_owner(name) for name, _, _ in parameters}))
    if both:
        raise ValueError(
            f"LoraConfig: {both[0]} would get an adapter and also be trained fully, because modules_to_save matches "
            f"suffixes of names. PEFT refuses this too. Pass exclude_modules=[{both[0].rpartition('.')[2]!r}], or "
            "remove it from target_parameters."
        )
    modules = {module for _, module, _ in targets}
    twice = sorted(name for name, module, _ in parameters if module in modules)
    if twice:
        raise ValueError(
            f"LoraConfig: target_parameters selects {twice[0]} and target_modules selects its module, in this or "
            "another layer. Use only one of the two."
        )


def _module_adapters(lora: LoraConfig, module: Module, targets: Targets) -> ModuleAdapters:
    of_layer = {layer: rank_and_alpha(lora, name) for name, target, layer in targets if target is module}
    ranks, alphas = zip(*(of_layer.get(layer, (0, 0.0)) for layer in range(module.layers)), strict=True)
    roots = [math.sqrt(rank) if lora.use_rslora else rank for rank in ranks]
    scales = tuple(alpha / root if root else 0.0 for alpha, root in zip(alphas, roots, strict=True))
    has = ("magnitude",) * lora.use_dora + ("bias",) * (lora.lora_bias and module.kind != "embedding")
    adapted = tuple(rank > 0 for rank in ranks)
    adapter = Adapter(
        module.adapter_name, module.parts, scales, adapted, module.stacked, has, module.experts, module.swapped
    )
    names = _wrapped_names(module, targets) if module.experts else module.names()
    return ModuleAdapters(module, adapter, ranks, tuple(names))


def _wrapped_names(module: Module, targets: Targets) -> list[str]:
    """The names of a module's parameters in PEFT's files. If several of them have adapters, PEFT nests its wrappers,
    and only the last keeps the module's name."""
    every, wrapped = [name for name, _, _ in targets], []
    for name in module.names():
        siblings = [target for target in every if _owner(target) == _owner(name)]
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
    """Fully trained parameters: `modules_to_save`, trained biases (with longer names in adapted modules), and table
    rows."""
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
    entries: dict[str, list] = {}
    layers: dict[str, set[int]] = {}
    for name, module, layer, entry in meant:
        inner = ".base_layer" if name in adapted else ""
        tensor = f"{PREFIX}{name}{inner}.{entry.tensor.rpartition('.')[2]}"
        if entry.stacked > 1:
            raise ValueError(f"LoraConfig: {name} holds experts, which cannot be trained fully along with an adapter.")
        entries.setdefault(tensor, []).append((entry, (layer,) if module.stacked else ()))
        layers.setdefault(entry.path, set()).add(layer)
    counts = {entry.path: module.layers for _, module, _, entry in meant}
    some = {path: None if len(at) == counts[path] else tuple(sorted(at)) for path, at in layers.items()}
    for table, ids in tokens:
        if table.name in adapted:
            raise ValueError(
                f"LoraConfig: {table.name} would get an adapter, but trainable_token_indices also trains rows of it. "
                "Leave one out."
            )
        entry = next(entry for entry in table.tensor_map if entry.path.endswith(".weight"))
        entries[f"{PREFIX}{table.name}.{TENSOR}"] = [(entry, ())]
        some[entry.path] = ids

    def placed(entry: TensorEntry, at: tuple[int, ...]) -> tuple[TensorEntry, str, tuple[int, ...]]:
        layers = some[entry.path]
        if layers is None:
            return entry, entry.path, at
        return entry, Layers(entry.path, layers).name, (layers.index(at[0]),) if at else ()

    return FullyTrained(some, {tensor: [placed(*part) for part in parts] for tensor, parts in entries.items()})


# Initial values, drawn with torch's generator as in PEFT


_NO_MAP = re.compile(r"pos(ition)?_embed|embed_vision|audio")  # position tables; gemma4: modules after the text model


def initial(
    plan: AdapterPlan,
    weight: Callable[[str], Any],
    generator: TorchGenerator,
    factors: dict[str, np.ndarray],
    carried: Callable[[], None],
) -> dict[str, np.ndarray]:
    """Initialize the adapters as PEFT does with torch's generator: each module first creates two linear layers, then A
    is drawn again.

    Args:
        weight: returns the array at a path.
        factors: initial values that are given instead of drawn.
        carried: draws what PEFT draws for vision tower layers that we do not compute; it draws them after the others.
    """
    arrays = {name: np.zeros(shape.shape, np.float32) for name, shape in plan.shapes.items()} | factors
    in_tower = True
    for layer, number in plan.order:
        adapters = plan.modules[number]
        if in_tower and not adapters.module.tensor_map[0].path.startswith("vision.tower."):
            carried()
            in_tower = False
        at = adapters.at(layer)
        for kind, values in _draw(plan.config, adapters.module, adapters.ranks[layer], generator).items():
            arrays[adapters.paths[kind]][at[kind]] = values
    for adapters in plan.modules:
        if "magnitude" in adapters.paths:
            arrays[adapters.paths["magnitude"]][...] = _row_norms(adapters, weight, arrays)
    return arrays


def pass_over_towers(
    config: LoraConfig, plan: AdapterPlan, carried: Mapping[str, Pieces], generator: TorchGenerator
) -> None:
    """Advance the generator by what PEFT draws before the text model's adapters. PEFT also adapts matching linear
    layers of the vision towers, which text does not train and which we do not adapt.

    Args:
        config: the config as passed by the user.
        carried: tensors of the towers, by their names in transformers' model.
    """
    for tensor, pieces in carried.items():
        name = tensor.removesuffix(".weight")
        if name == tensor or len(pieces.shape) != 2 or _NO_MAP.search(name):
            continue
        takes_all = is_all(config.target_modules) and not is_left_out(config, name)
        if takes_all or is_selected(plan.config, name):
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


def _row_norms(adapters: ModuleAdapters, weight: Callable[[str], Any], arrays: dict[str, np.ndarray]) -> np.ndarray:
    """Norms of the rows of W + scale * B A: the initial magnitudes of DoRA."""
    module = adapters.module
    a, b = (arrays[adapters.paths[kind]] for kind in "ab")
    lengths = np.zeros(adapters.shapes()["magnitude"], np.float32)
    for path, rows in module.parts:
        whole = weight(f"{path}.weight")
        for layer in range(module.layers):
            at = (layer,) if module.stacked else ()
            our_b = b[at] if rows is None else rows.rows(b[at])
            norms = np.linalg.norm(np.asarray(whole[at]) + adapters.adapter.scales[layer] * (our_b @ a[at]), axis=1)
            view = lengths[at] if rows is None else rows.view(lengths[at])
            view[...] = norms.reshape(view.shape)
    return lengths


# PiSSA (Meng et al. 2024, arXiv:2404.02948): the adapter starts as the principal components of its matrix, and the base
# weights keep the rest.


def principal_parts(
    plan: AdapterPlan, base: NativeBackend, frozen: dict[str, Any]
) -> tuple[dict[str, np.ndarray], dict[str, Any]]:
    """Split the adapted matrices into principal components and a residual.

    Returns:
        A and B by name, padded to the shapes of `plan`; the frozen arrays with residuals in place of the matrices.

    Raises:
        ValueError: the matrices are quantized, or a rank exceeds the size of its matrix.
    """
    factors, rest = {}, dict(frozen)
    for adapters in plan.modules:
        if adapters.module.kind == "embedding":  # embeddings use the default initialization
            continue
        leaves = {kind: np.zeros(adapters.shapes()[kind], np.float32) for kind in "ab"}
        matrices = {path: np.array(base.weight(frozen, f"{path}.weight")) for path, _ in adapters.module.parts}
        for layer in [layer for layer, rank in enumerate(adapters.ranks) if rank]:
            for kind, values in _split(adapters, layer, matrices).items():
                leaves[kind][adapters.at(layer)[kind]] = values
        for path, values in matrices.items():
            rest |= base.replaced(frozen, f"{path}.weight", values)
        factors |= {adapters.paths[kind]: values for kind, values in leaves.items()}
    return factors, rest


def _split(adapters: ModuleAdapters, layer: int, matrices: dict[str, np.ndarray]) -> dict[str, np.ndarray]:
    """A and B of one layer; the matrix in `matrices` is replaced by its residual."""
    module, rank, scale = adapters.module, adapters.ranks[layer], adapters.adapter.scales[layer]
    if rank > min(module.inputs, module.outputs):
        raise ValueError(
            f"LoraConfig: init_lora_weights='pissa' cannot take {rank} principal components of {module.name}, a matrix "
            f"of {module.outputs} x {module.inputs}. Use a smaller r."
        )
    at = (layer,) if module.stacked else ()
    whole = np.empty((module.outputs, module.inputs), np.float32)
    rows = {path: ... if part is None else part.rows(np.arange(module.outputs)) for path, part in module.parts}
    for path, ours in rows.items():
        whole[ours] = matrices[path][at]
    left, values, right = np.linalg.svd(whole, full_matrices=False)
    roots = np.sqrt(values[:rank] / np.float32(scale))
    a, b = roots[:, None] * right[:rank], left[:, :rank] * roots
    rest = whole - np.float32(scale) * b @ a
    for path, ours in rows.items():
        matrices[path][at] = rest[ours]
    return {"a": a, "b": b}


# Our arrays and the tensors of PEFT's files


# PEFT's wrapper modules. If the vocabulary was resized, PEFT also saves tensors inside them.
_OF_THE_BASE = re.compile(r"\.(base_layer|original_module|modules_to_save)\.")
_SINGLE_EXPERT = re.compile(r"\.experts\.\d+\.")


def tensors_of(plan: AdapterPlan, params: dict[str, Any], tables: dict[str, Any]) -> dict[str, np.ndarray]:
    """The content of adapter_model.safetensors, by name. Everything is float32 except `tables`, the arrays of
    `plan.saved_tables` by path."""
    tensors = trained_tensors(plan, params) | {name: tables[path] for name, path in plan.saved_tables.items()}
    return tensors | {name: tensors[source] for name, source in plan.copies.items()}


def trained_tensors(plan: AdapterPlan, params: dict[str, Any]) -> dict[str, np.ndarray]:
    """The adapters and the model's own trained parameters, by name in adapter_model.safetensors; float32."""
    tensors = {name: np.asarray(params[path][at], np.float32) for name, path, at in plan.tensors()}
    return tensors | full_tensors(plan, params) | plan.carried


def full_tensors(plan: AdapterPlan, params: dict[str, Any]) -> dict[str, np.ndarray]:
    """Tensors of the model's own trained parameters."""
    tensors = {}
    for name, parts in plan.full.tensors.items():
        arrays = {entry.path: params[path] for entry, path, _ in parts}
        tensors[name] = read_tensor(arrays, [(entry, at) for entry, _, at in parts])
    return tensors


def arrays_of(plan: AdapterPlan, tensors: dict[str, np.ndarray], shapes: dict[str, Any]) -> dict[str, jax.Array]:
    """The inverse of `tensors_of`: trained arrays with these shapes, from tensors by name."""
    arrays = {name: np.zeros(like.shape, np.float32) for name, like in shapes.items()}
    for name, path, at in plan.tensors():
        arrays[path][at] = tensors[name]
    for name, parts in plan.full.tensors.items():
        for entry, path, at in parts:
            arrays[path][at] = entry.take(np.asarray(tensors[name], np.float32))
    return {name: owned(array) for name, array in arrays.items()}


def tokens_of(folder: Path, config: NativeConfig) -> int | None:
    """Vocabulary size in an adapter's file, if it contains a full token embedding or language model head; otherwise
    None."""
    path = folder / WEIGHTS
    if not path.is_file():
        return None
    tables = [module.name for module in modules_of(config.untied()) if is_lm_head(module) or is_token_table(module)]
    shapes = (shape_of(path, f"{PREFIX}{name}{inner}.weight") for name in tables for inner in WRAPPED)
    return next((shape[0] for shape in shapes if shape), None)


def for_tower(folder: Path, plan: AdapterPlan, unread: frozenset[str]) -> AdapterPlan:
    """Adjust the plan to an adapter's file, for a model with a vision tower.

    An adapter that was trained on text only has no tensors for the tower, so the tower gets no adapter.

    Args:
        unread: modules of the tower whose outputs are not used and which are thus not computed. PEFT adapts them, too.
    """
    in_file = set(_names_in(folder))

    def is_adapted(adapters: ModuleAdapters) -> bool:
        return not of_vision(adapters.module.tensor_map[0]) or any(name in in_file for name, _, _ in adapters.tensors())

    numbers = [number for number, adapters in enumerate(plan.modules) if is_adapted(adapters)]
    if len(numbers) < len(plan.modules):
        logger.warning("%s was trained on text only: the vision tower stays as it is.", folder / WEIGHTS)
    order = tuple((layer, numbers.index(number)) for layer, number in plan.order if number in numbers)
    plan = replace(plan, modules=tuple(plan.modules[number] for number in numbers), order=order)
    return with_carried(folder, plan, lambda name: name.partition(".lora_")[0] in unread)


def spared_towers(plan: AdapterPlan, carried: Iterable[str]) -> AdapterPlan:
    """The plan with full names in `target_modules` if shorter ones also select modules of a vision tower that PEFT
    cannot adapt. PEFT could not load such an adapter. Gemma 4's tower has such modules: their matrix is in an inner
    module `linear`.

    Args:
        carried: names in transformers' model of the tower's tensors, which are not computed.
    """
    outer = (name.removesuffix(".linear.weight") for name in carried if name.endswith(".linear.weight"))
    if not any(is_selected(plan.config, name) for name in outer):
        return plan
    named = ((plan.modules[at].module, layer) for layer, at in plan.order)
    names = {module.names()[layer] for module, layer in named if module.kind in ADAPTABLE}
    return replace(plan, config=replace(plan.config, target_modules=names))


def with_carried(folder: Path, plan: AdapterPlan, is_carried: Callable[[str], Any]) -> AdapterPlan:
    """Add the file's tensors of modules that are not computed to the plan. They are saved unchanged.

    Args:
        is_carried: whether a tensor belongs to such a module, given its name without PEFT's prefix.
    """
    names = [name for name in _names_in(folder) if is_carried(name.removeprefix(PREFIX))]
    return replace(plan, carried={name: read_one(folder / WEIGHTS, name) for name in names})


def _names_in(folder: Path) -> list[str]:
    """The tensors of an adapter's file; none if there is no file."""
    path = folder / WEIGHTS
    return list(tensor_names(path)) if path.is_file() else []


def saved_in(folder: Path, plan: AdapterPlan) -> AdapterPlan:
    """The plan with only those saved tables and copies that the adapter's file contains."""
    in_file = set(_names_in(folder))
    tables = {name: path for name, path in plan.saved_tables.items() if name in in_file}
    copies = {name: source for name, source in plan.copies.items() if name in in_file}
    return replace(plan, saved_tables=tables, copies=copies)


def read_tables(folder: Path, plan: AdapterPlan, shapes: Mapping[str, tuple[int, ...]]) -> dict[str, np.ndarray]:
    """Read the base model's token tables from an adapter's file, by path, in their stored dtype.

    Args:
        shapes: shapes of the base model's arrays, by path.

    Raises:
        ValueError: a table has a different shape.
    """
    file = _weights_in(folder)
    in_file, tables = set(tensor_names(file)), {}
    for name, path in plan.saved_tables.items():
        if path in tables or name not in in_file:
            continue
        values = read_one(file, name)
        if values.shape != tuple(shapes[path]):
            raise ValueError(
                f"{file}: {name} is {brief(list(values.shape))}, but this base model requires {list(shapes[path])}. "
                "Resize its vocabulary to the size it had when the adapter was trained."
            )
        tables[path] = values
    lacking = sorted(name for name, path in plan.saved_tables.items() if path not in tables)
    if lacking:
        logger.warning("%s has no %s: using the base model's, whose new rows may differ.", file, _some(lacking))
    return tables


def expected_shapes(plan: AdapterPlan, shapes: dict[str, Any]) -> dict[str, tuple[int, ...]]:
    """Name on disk -> shape of each tensor that an adapter's file must contain, given the shapes of the trained
    arrays."""
    expected = {name: np.empty(shapes[path].shape, np.bool_)[at].shape for name, path, at in plan.tensors()}
    for name, [(entry, path, _), *_] in plan.full.tensors.items():
        expected[name] = entry.shape_on_disk(shapes[path].shape)
    return expected


def read_tensors(
    folder: Path, plan: AdapterPlan, shapes: dict[str, Any], defaults: dict[str, np.ndarray] | None = None
) -> dict[str, np.ndarray]:
    """Read the tensors of an adapter's file that the plan needs, falling back to `defaults`.

    Raises:
        FileNotFoundError, ValueError: the file is missing, or it does not fit the model.
    """
    path = _weights_in(folder)
    tensors, expected = open_tensors(path), expected_shapes(plan, shapes)
    lacking = sorted(set(defaults or {}) - set(tensors))
    if lacking:
        logger.warning("%s has no %s: starting from the base model's.", path, _some(lacking))
    tensors = (defaults or {}) | tensors
    _check_names(path, plan, set(tensors), set(expected))
    for name, shape in expected.items():
        if tuple(tensors[name].shape) != tuple(shape):
            raise ValueError(
                f"{path}: {name} is {brief(list(tensors[name].shape))}, but this base model requires {list(shape)}. "
                "Pass the base model that the adapter was trained on."
            )
    return {name: tensors[name] for name in expected}


def _weights_in(folder: Path) -> Path:
    """The weights file in an adapter's folder. Raises FileNotFoundError or ValueError if there is none."""
    if not (folder / WEIGHTS).is_file():
        raise no_adapter_error(str(folder), (folder / PICKLED).exists())
    return folder / WEIGHTS


def _check_names(path: Path, plan: AdapterPlan, names: set[str], expected: set[str]) -> None:
    missing, optional = sorted(expected - names), {*plan.saved_tables, *plan.copies, *plan.carried}
    if unread := sorted(names & plan.carried.keys()):
        logger.warning("%s: %s adapt layers whose outputs are not read; saved unchanged.", path, _some(unread))
    strange = sorted(name for name in names - expected - optional if not _OF_THE_BASE.search(name))
    if any(_SINGLE_EXPERT.search(name) for name in strange):
        raise ValueError(
            f"{path} has separate adapters for each expert, as in transformers 4; now all experts share one parameter. "
            "Convert it with PEFT: PeftModel.from_pretrained(base, folder).save_pretrained(new_folder)."
        )
    if missing or strange:
        raise ValueError(
            f"{path} does not match its config and this base model. Missing: {_some(missing)}. Unexpected: "
            f"{_some(strange)}. Pass the base model that the adapter was trained on."
        )


def _some(names: list[str]) -> str:
    return listed(names, 4, "; ") or "none"
