"""Where torch is installed: transformers' own models, exported to programs. The one file that may import torch."""

from __future__ import annotations

import contextlib
import importlib.util
import pickle
import re
import zipfile
from collections.abc import Callable, Iterable, Iterator
from functools import cached_property
from pathlib import Path
from typing import Any

import ml_dtypes
import numpy as np

from trl_jax.hub.files import DTYPES, INDEX, SINGLE, indexed_shards
from trl_jax.nn.aten.program import Node, Program, Ref
from trl_jax.nn.aten.table import OPERATIONS

_LAYER = re.compile(r"\.\d+(?:@\d+)?$")  # a numbered submodule; @1 marks that it is called for the second time
PICKLED, PICKLED_INDEX = "pytorch_model.bin", "pytorch_model.bin.index.json"
_POSITIONS = re.compile(r"(embed_positions|position_embeddings|positions_embed|wpe)$")
_SILENT = ("aten._assert_tensor_metadata.default", "aten.sym_constrain_range_for_size.default")
_INERT = {"device", "layout", "pin_memory", "memory_format", "non_blocking", "dtype"}  # dtypes stand in the result


class TorchModel:
    """A sequence classifier of transformers: its config, its parameters' values once, and its programs.

    Attributes:
        config: transformers' config object; `pad_token_id` in it is read whenever a program is made.
        dtypes: parameter name -> the dtype it was loaded in, and is saved in.
        shapes: parameter name -> shape.
        embeddings: the names of embedding tables.
        most_tokens: the length of the longest text that has positions; None where any has.
    """

    def __init__(self, folder: Path, *, dtype: str, seed: int):
        import torch

        self._module = _load(folder, dtype, seed)
        self.config = self._module.config
        self.config.use_cache = False
        named = dict(self._module.named_parameters())
        self.dtypes = {name: _name(parameter.dtype) for name, parameter in named.items()}
        self.shapes = {name: tuple(parameter.shape) for name, parameter in named.items()}
        tables = _members(self._module, torch.nn.Embedding)
        self.embeddings = frozenset(name for name, parameter in named.items() if id(parameter) in tables)
        self.most_tokens = _most_tokens(self._module)
        self._programs: dict[tuple, list[tuple[Callable[[int, int], bool], Program]]] = {}

    @cached_property
    def undecayed(self) -> frozenset[str]:
        """The parameters of layer norms, whatever they are called, those that do not train and those without use."""
        import torch

        inside = _members(self._module, torch.nn.LayerNorm)
        named = self._module.named_parameters()
        own = {name for name, parameter in named if id(parameter) in inside or not parameter.requires_grad}
        return self.program(2, 16, dtype="float32", training=False).unread() | own

    def take(self) -> Iterator[tuple[str, np.ndarray]]:
        """(name, float32 array) of each parameter, once: its memory is given back when the next one is asked for.

        What stays is the shape of the model, enough to export and to save it.
        """
        for name, parameter in self._module.named_parameters():
            yield name, parameter.detach().float().numpy()
            _empty(parameter, "float32")

    def save(self, folder: Path, params: dict[str, Any]) -> None:
        """transformers' own save_pretrained: names, fusion and shards are its business."""
        import torch

        parameters = dict(self._module.named_parameters())
        names = {id(parameter): name for name, parameter in parameters.items()}
        try:
            for name, parameter in parameters.items():
                _empty(parameter, self.dtypes[name])
            state = self._module.state_dict(keep_vars=True)
            for name, tensor in state.items():  # a tied tensor stands in it under several names
                if id(tensor) in names:
                    own = names[id(tensor)]
                    values = torch.from_numpy(np.array(params[own], np.float32))
                    state[name] = values.to(getattr(torch, self.dtypes[own]))
            self._module.save_pretrained(folder, state_dict=state)
        finally:
            for parameter in parameters.values():
                _empty(parameter, "float32")

    def program(self, rows: int, length: int, *, dtype: str, training: bool) -> Program:
        """One that is right for `[rows, length]`: exported before, or now."""
        made = self._programs.setdefault((dtype, training, self.config.get_text_config().pad_token_id), [])
        for fits, program in made:
            if fits(rows, length):
                return program
        exported = _exported(self._module, rows, length, dtype, training)
        made.append((_domain(exported), _translated(exported, self.config.model_type)))
        return made[-1][1]


def _load(folder: Path, dtype: str, seed: int) -> Any:
    """The classifier as TRL has it after `set_seed(seed)`: what the checkpoint lacks is drawn in the same order."""
    import torch
    from transformers import AutoModelForSequenceClassification

    with torch.random.fork_rng(devices=[]):
        torch.manual_seed(seed)
        kind = dtype if dtype == "auto" else getattr(torch, dtype)
        try:
            model = AutoModelForSequenceClassification.from_pretrained(
                folder, num_labels=1, dtype=kind, attn_implementation="eager"
            )
        except pickle.UnpicklingError as error:
            raise _not_tensors(folder / PICKLED, error) from error
    fixed = {name for name, parameter in _unloaded(model.config).named_parameters() if not parameter.requires_grad}
    for name, parameter in model.named_parameters():
        parameter.requires_grad_(name not in fixed)  # loading forgets it
    if model._can_set_experts_implementation():
        model.set_experts_implementation("grouped_mm")  # the one that does not copy an expert for every token
    return model


def _empty(parameter: Any, dtype: str) -> None:
    """Memory that is never written takes no place."""
    import torch

    parameter.data = torch.empty(parameter.shape, dtype=getattr(torch, dtype))


def _members(module: Any, kind: type) -> set[int]:
    return {id(parameter) for part in module.modules() if isinstance(part, kind) for parameter in part.parameters()}


def _exported(module: Any, rows: int, length: int, dtype: str, training: bool) -> Any:
    """The module as torch.export has it, down to ATen operations, any number of rows and tokens if it can be."""
    import torch

    # Half precision as in TRL: torch's autocast decides operation by operation. It must be on around both steps.
    half = contextlib.nullcontext() if dtype == "float32" else torch.autocast("cpu", getattr(torch, dtype))
    example = torch.ones((2, rows, length), dtype=torch.int64)
    free = {"rows": {1: torch.export.Dim.AUTO, 2: torch.export.Dim.AUTO}}
    module.train(training)
    try:
        with half:
            exported = torch.export.export(_of_rows(module), (example,), dynamic_shapes=free, strict=False)
            return exported.run_decompositions()
    except Exception as error:  # torch's tracer fails with errors of many types
        how = " with dropout on (disable_dropout=True leaves it off)" if training else ""
        raise ValueError(
            f"model_type {module.config.model_type!r} cannot be exported{how} for {rows} rows of {length} tokens; "
            f"torch.export says: {str(error).strip()[:400]}"
        ) from error
    finally:
        module.eval()


def _of_rows(module: Any) -> Any:
    """The classifier as a module of one input, ids above mask."""
    import torch

    class Rows(torch.nn.Module):
        def __init__(self):
            super().__init__()
            self.model = module

        def forward(self, rows):
            return self.model(input_ids=rows[0], attention_mask=rows[1]).logits

    return Rows()


def _domain(exported: Any) -> Callable[[int, int], bool]:
    """Which numbers of rows and tokens the program is right for: what the tracer took for granted on its way."""
    value = _input(exported).meta["val"]
    sizes = value.shape[1:]
    guards = [guard.expr for guard in value.fake_mode.shape_env.guards]
    ranges = exported.range_constraints

    def fits(rows: int, length: int) -> bool:
        found: dict[Any, int] = {}
        for size, number in zip(sizes, (rows, length), strict=True):
            symbol = size if isinstance(size, int) else size.node.expr
            if isinstance(symbol, int) or symbol.is_number:
                if int(symbol) != number:
                    return False
            elif found.setdefault(symbol, number) != number or number not in ranges[symbol]:
                return False
        return all(bool(guard.subs(found)) for guard in guards)

    return fits


def _input(exported: Any) -> Any:
    [name] = exported.graph_signature.user_inputs
    return next(node for node in exported.graph.nodes if node.name == name)


def _translated(exported: Any, model_type: str) -> Program:
    """The graph as plain data.

    Raises:
        NotImplementedError: an operation that has no counterpart here.
    """
    signature = exported.graph_signature
    prefix = "model."
    parameters = {name: path.removeprefix(prefix) for name, path in signature.inputs_to_parameters.items()}
    frozen = frozenset(parameters.values()) - _trained(exported)
    held = {**exported.state_dict, **exported.constants}
    paths = {**signature.inputs_to_buffers, **signature.inputs_to_lifted_tensor_constants}
    nodes, layer = [], None
    for node in exported.graph.nodes:
        if node.op == "call_function" and _operation(node) not in _SILENT:
            layer = _layer(node, layer)
            nodes.append(_node(node, layer))
    unknown = sorted({node.op for node in nodes} - set(OPERATIONS))
    if unknown:
        raise NotImplementedError(
            f"model_type {model_type!r} needs operations that trl_jax has no counterpart of: {', '.join(unknown)}."
        )
    constants = {name: held[path].detach().cpu().numpy() for name, path in paths.items()}
    [output] = signature.user_outputs
    return Program(tuple(nodes), parameters, frozen, constants, _input(exported).name, output)


def _trained(exported: Any) -> set[str]:
    return {name.removeprefix("model.") for name, value in exported.named_parameters() if value.requires_grad}


def _node(node: Any, layer: str | None) -> Node:
    kwargs = {name: _plain(value) for name, value in node.kwargs.items() if name not in _INERT}
    return Node(node.name, _operation(node), _plain(tuple(node.args)), kwargs, _recorded(node.meta.get("val")), layer)


def _operation(node: Any) -> str:
    """"aten.add.Tensor", "operator.mul", "torch.sym_max"."""
    import torch

    target = node.target
    if isinstance(target, torch._ops.OpOverload):
        return str(target)
    module = target.__module__.removeprefix("_")
    return f"{module}.{target.__name__}"


def _plain(value: Any) -> Any:
    import torch

    if isinstance(value, torch.fx.Node):
        return Ref(value.name)
    if isinstance(value, list | tuple):
        return tuple(_plain(entry) for entry in value)
    return _name(value) if isinstance(value, torch.dtype) else value


def _recorded(value: Any) -> Any:
    """The dtype of a tensor, those of several, None for a number."""
    import torch

    if isinstance(value, list | tuple):
        return tuple(_recorded(part) for part in value)
    return _name(value.dtype) if isinstance(value, torch.Tensor) else None


def _layer(node: Any, before: str | None) -> str | None:
    """The outermost numbered submodule the node belongs to; where torch noted none, that of its neighbour."""
    stack = node.meta.get("nn_module_stack", {})
    if not any(key.startswith("L__self__") for key in stack):
        return before
    return next((key for key in stack if _LAYER.search(key)), None)


def _name(dtype: Any) -> str:
    return str(dtype).removeprefix("torch.")


def most_tokens(config: Any) -> int | None:
    """The length of the longest text that a model of this config has positions for; None where any has."""
    return _most_tokens(_unloaded(config))


def _unloaded(config: Any) -> Any:
    """The classifier without memory for its parameters."""
    import torch
    from transformers import AutoModelForSequenceClassification

    with torch.device("meta"):
        return AutoModelForSequenceClassification.from_config(config)


def _most_tokens(module: Any) -> int | None:
    """A table of positions has as many rows as the config has positions, and those that its first ids leave out."""
    facts = module.config.get_text_config().to_dict()
    names = "max_position_embeddings", "n_positions", "max_seq_len", "max_sequence_length"
    given = next((facts[name] for name in names if isinstance(facts.get(name), int)), None)
    tables = [part for name, part in module.named_modules() if _POSITIONS.search(name) and "weight" in part._parameters]
    lengths = {len(table.weight) - _first_position(table): len(table.weight) for table in tables}
    return min((length for length, rows in lengths.items() if given in (length, rows)), default=None)


def _first_position(table: Any) -> int:
    if table.padding_idx is not None:
        return table.padding_idx + 1
    return getattr(table, "offset", 0)


def as_tensors(arrays: dict[str, np.ndarray]) -> dict[str, Any]:
    """The same as torch's tensors."""
    import torch

    return {name: torch.from_numpy(array) for name, array in arrays.items()}


def available() -> bool:
    return importlib.util.find_spec("torch") is not None


def only_pickled(folder: Path) -> bool:
    """Whether a folder has its weights as pytorch_model.bin alone, and torch is here to read them."""
    safe = (folder / SINGLE).is_file() or (folder / INDEX).is_file()
    return not safe and available() and any((folder / name).is_file() for name in (PICKLED, PICKLED_INDEX))


class PickledFiles:
    """`CheckpointFiles` of pytorch_model.bin, single or sharded. Tensors are read, nothing in it is run."""

    def __init__(self, folder: Path):
        self._tensors: dict[str, Any] = {}
        self.shards: dict[str, list[str]] = {}
        names = [PICKLED] if (folder / PICKLED).is_file() else indexed_shards(folder, PICKLED_INDEX)
        for name in names:
            tensors = _unpickled(folder / name)
            self.shards[name] = list(tensors)
            self._tensors |= tensors
        self.shapes = {name: tuple(tensor.shape) for name, tensor in self._tensors.items()}
        self.dtypes = {name: _name(tensor.dtype) for name, tensor in self._tensors.items()}
        self._folder = folder

    def check_dtypes(self, tensors: Iterable[str]) -> None:
        """Refuse the first of these tensors that is in a dtype which cannot be read."""
        for tensor in tensors:
            if self.dtypes[tensor] not in DTYPES.values():
                raise ValueError(
                    f"{self._folder}: tensor {tensor} has dtype {self.dtypes[tensor]}; trl_jax reads "
                    f"{', '.join(DTYPES.values())}. Save the checkpoint again in one of these."
                )

    def read(self, tensor: str) -> np.ndarray:
        """The values of one tensor, in the dtype of the file."""
        import torch

        values = self._tensors[tensor]
        if values.dtype is torch.bfloat16:  # NumPy has no such dtype of its own
            return values.contiguous().view(torch.int16).numpy().view(ml_dtypes.bfloat16)
        return values.contiguous().numpy()


def _not_tensors(path: Path, error: Exception) -> ValueError:
    return ValueError(
        f"{path} is not a PyTorch file of nothing but tensors ({type(error).__name__}); nothing in it was run. "
        "Download it again, or get the checkpoint as safetensors."
    )


def _unpickled(path: Path) -> dict[str, Any]:
    import torch

    try:
        held = torch.load(path, map_location="cpu", weights_only=True, mmap=zipfile.is_zipfile(path))
    except Exception as error:  # from zip archives, pickles and torch's own checks alike
        raise _not_tensors(path, error) from error
    if not isinstance(held, dict) or not all(isinstance(value, torch.Tensor) for value in held.values()):
        raise ValueError(f"{path} holds a {type(held).__name__} that is not tensors by name: wanted a state dict.")
    return dict(held)
