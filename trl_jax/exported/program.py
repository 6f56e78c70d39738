"""Models without a JAX implementation: transformers' code, exported by torch and run as JAX programs.

torch exports the code once for each kind of shape, as a graph of ATen operations. `translated` turns the graph into a
`Program`, which is plain data, and `aten.run` computes it in JAX. The torch module keeps its shapes but not its values;
it is used again to export further shapes and to save the model.
"""

from __future__ import annotations

import abc
import contextlib
import copy
import hashlib
import importlib
import logging
import pickle
import re
import sys
from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass
from functools import cache, cached_property
from pathlib import Path
from typing import Any, Protocol
from unittest.mock import patch

import jax
import jax.numpy as jnp
import numpy as np
from flax import nnx

from trl_jax.core.outputs import TokenOutputs
from trl_jax.exported.aten import OPERATIONS, Node, Program, Ref, run
from trl_jax.hub.backend import Backend, Traits
from trl_jax.hub.checkpoint import ShardingRule
from trl_jax.hub.heads import HeadName
from trl_jax.hub.model_types import max_positions_of
from trl_jax.hub.torch_bridge import PICKLED, auto_class, dtype_name, not_tensors_error, unloaded
from trl_jax.mesh.mesh import owned
from trl_jax.models.encoder import valid_tokens
from trl_jax.nn.head import outputs_of_logits, tempered

logger = logging.getLogger(__name__)

# The model: its computation is a program


class Programs(Protocol):
    """The programs of a model, by shape."""

    def program(self, rows: int, length: int, *, dtype: str, training: bool) -> Program:
        """The program for `[rows, length]` tokens, with matrix products in `dtype`, and with dropout if `training`."""


class ExportedModel(nnx.Module):
    """A model with the call signature of `Model`, whose program computes the logits of rows `[R, T]` of tokens.

    Parameters have the names of the exported model.
    """

    needs_valid = True  # without it, the attention may see padding

    def __init__(self, shapes: dict[str, tuple[int, ...]], programs: Programs):
        self._programs, self._names = programs, tuple(shapes)
        for name, part in _nested(shapes).items():
            setattr(self, name, part)

    def __call__(
        self,
        tokens: jax.Array,
        positions: jax.Array,
        reads: jax.Array | None,
        *,
        targets: jax.Array | None = None,
        valid: jax.Array | None = None,
        lengths: jax.Array | None = None,
        dtype: jnp.dtype = jnp.float32,
        remat: bool = False,
        dropout_key: jax.Array | None = None,
        temperature: float = 1.0,
    ) -> Any:
        """The outputs at each read. `positions` is not used: the program computes them from the ids.

        Args:
            tokens: int32 `[R, T]`.
            reads: int32 `[N]`, flat indices (row * T + column) of the tokens to return; None means all.
            targets: int32 `[N]`, as in `Model`.
            valid: bool `[R, T]`, False at pads; None means the first `lengths` of each row.
            lengths: int32 `[R]`, the length of each row's text; None means T.
            dtype: of matrix products.
            remat: recompute each layer from its input in the backward pass.
            dropout_key: enables dropout, at the config's rates.
            temperature: divides the logits.
        """
        del positions
        if not len(tokens):
            return jnp.zeros(0)
        rows = jnp.stack([tokens.astype(jnp.int32), valid_tokens(tokens, valid, lengths).astype(jnp.int32)])
        training = dropout_key is not None
        program = self._programs.program(*tokens.shape, dtype=jnp.dtype(dtype).name, training=training)
        logits = run(program, self._params(), rows, remat=remat, key=dropout_key)
        return self.outputs(tempered(logits.astype(jnp.float32), temperature), reads, targets, tokens.shape[1])

    @abc.abstractmethod
    def outputs(
        self, logits: jax.Array, reads: jax.Array | None, targets: jax.Array | None, length: int
    ) -> TokenOutputs | jax.Array:
        """The outputs at `reads` `[N]` of rows of `length` tokens."""

    def _params(self) -> dict[str, jax.Array]:
        return {name: _at(self, name.split("."))[...] for name in self._names}


class ExportedScorer(ExportedModel):
    """A model with a score head. Its program finds the token to read in each row and returns `[R, 1]`."""

    def outputs(self, logits: jax.Array, reads: jax.Array | None, targets: jax.Array | None, length: int) -> jax.Array:
        return logits[:, 0][reads // length]


class ExportedLm(ExportedModel):
    """A causal language model. Its program returns `[R, T, V]`."""

    def outputs(
        self, logits: jax.Array, reads: jax.Array | None, targets: jax.Array | None, length: int
    ) -> TokenOutputs | jax.Array:
        flat = logits.reshape(-1, logits.shape[-1])
        flat = flat if reads is None else flat[reads]
        return flat if targets is None else outputs_of_logits(flat, targets)


def _nested(shapes: dict[str, tuple[int, ...]]) -> dict[str, Any]:
    """`{"a.0.b": shape}` -> `{"a": nnx.Dict({"0": nnx.Dict({"b": Param})})}`."""
    groups: dict[str, Any] = {}
    for name, shape in shapes.items():
        first, _, rest = name.partition(".")
        if rest:
            groups.setdefault(first, {})[rest] = shape
        else:
            groups[first] = nnx.Param(jax.ShapeDtypeStruct(shape, jnp.float32))
    return {name: nnx.Dict(_nested(part)) if isinstance(part, dict) else part for name, part in groups.items()}


def _at(part: Any, path: list[str]) -> Any:
    top, *rest = path
    part = vars(part)[top]
    for name in rest:
        part = part[name]
    return part


# Forward passes of the torch module on fake tensors, which have shapes but no data

_TRACER = "torch._subclasses.fake_tensor"  # logs failures as errors


@dataclass(frozen=True)
class FakePass:
    """The operations of a forward pass, and the parameters that get a gradient.

    Attributes:
        differentiable: names of the parameters that the logits depend on differentiably.
        operations: the ATen operations with their arguments; tensors are numbered in order of creation. Two passes with
            equal operations compute the same.
    """

    differentiable: frozenset[str]
    operations: tuple[tuple, ...]


def fake_pass(module: Any, rows: int, length: int, training: bool, head: str) -> FakePass | None:
    """The forward pass over `[rows, length]` tokens; None if the code depends on values, for example in a branch."""
    import torch
    from torch._subclasses.fake_tensor import FakeCopyMode, FakeTensorMode
    from torch.fx.experimental.symbolic_shapes import ShapeEnv

    fake, operations = FakeTensorMode(allow_non_fake_inputs=True, shape_env=ShapeEnv()), []
    try:
        with _quiet():
            with FakeCopyMode(fake):
                copied = copy.deepcopy(of_rows(module, head))  # the module may cache tensors
            if copied.model._can_set_experts_implementation():
                copied.model.set_experts_implementation("batched_mm")  # grouped_mm has no shapes in float32
            copied.train(training)
            names = {id(parameter): name for name, parameter in copied.model.named_parameters()}
            with scanned(copied), fake, _recorder(operations, names):
                logits = copied(torch.ones((2, rows, length), dtype=torch.int64))
    except Exception:  # torch raises many types; the caller has a fallback
        return None
    return FakePass(frozenset(names[id(leaf)] for leaf in _leaves(logits)), tuple(operations))


def _leaves(result: Any) -> Iterator[Any]:
    """The leaf tensors of the autograd graph of a result."""
    seen, todo = set(), [result.grad_fn]
    while todo:
        node = todo.pop()
        if node is None or node in seen:
            continue
        seen.add(node)
        if type(node).__name__ == "AccumulateGrad":
            yield node.variable
        todo.extend(following for following, _ in node.next_functions)


def _recorder(operations: list[tuple], names: dict[int, str]) -> Any:
    """A mode that records every operation; `names` maps the ids of existing tensors to their names."""
    import torch
    from torch._subclasses.fake_tensor import FakeTensor, unset_fake_temporarily
    from torch.utils._python_dispatch import TorchDispatchMode
    from torch.utils._pytree import tree_flatten

    tensors: dict[int, Any] = {}  # keeps tensors alive, so that their ids stay unique

    def described(value: Any) -> Any:
        if not isinstance(value, torch.Tensor):
            return repr(value)
        if not isinstance(value, FakeTensor):  # a constant in the code
            with unset_fake_temporarily():
                return hashlib.sha256(value.detach().contiguous().reshape(-1).view(torch.uint8).numpy()).hexdigest()
        number, _ = tensors.setdefault(id(value), (len(tensors), value))
        return names.get(id(value), number)

    class Recorder(TorchDispatchMode):
        def __torch_dispatch__(self, func, types, args=(), kwargs=None):
            result = func(*args, **(kwargs or {}))
            flat, tree = tree_flatten((args, kwargs, result))
            if func.namespace != "prim":  # queries, e.g. of the device
                operations.append((str(func), str(tree), *map(described, flat)))
            return result

    return Recorder()


@contextlib.contextmanager
def _quiet() -> Iterator[None]:
    logger = logging.getLogger(_TRACER)
    before, logger.disabled = logger.disabled, True
    try:
        yield
    finally:
        logger.disabled = before


# The backend: torch exports one program for each kind of shape, and JAX runs it


_MODELS = {"score": ExportedScorer, "lm": ExportedLm}


class ExportedBackend(Backend):
    """Runs the programs that a torch model is exported to, one for each kind of shape."""

    log_level = logging.WARNING
    can_resize = saves_in_background = False  # the torch module is used for saving and exporting

    def __init__(self, model: TorchModel):
        self.head = model.head
        self._model, self.dtypes = model, model.dtypes
        self.name = f"exported (model_type {model.config.model_type!r}, transformers' code by way of torch.export)"
        self.traits = Traits(
            vocab_size=model.config.get_text_config().vocab_size,
            max_positions=model.max_positions,
            embeddings=model.embeddings,
            infers_lengths=True,
            drops_out=True,
        )
        self.tensors = {name: name for name in model.shapes}
        self.graph, _ = nnx.split(nnx.eval_shape(lambda: _MODELS[model.head](model.shapes, model)))

    @property
    def undecayed(self) -> frozenset[str]:
        return self._model.undecayed

    @property
    def token_table(self) -> str:
        return self._model.token_table

    @property
    def tied(self) -> Mapping[str, str]:
        return {name: first for name, first in self._model.names().items() if name != first}

    def save(
        self, folder: Path | None, params: dict[str, jax.Array], config: Any, max_shard_size: int | str | None = None
    ) -> None:
        del config  # transformers writes its own
        whole = {name: np.asarray(params[name]) for name in self.tensors}
        if folder is not None:
            self._model.save(folder, whole, max_shard_size)

    def load(self, folder: Path, seed: int, sharding_of: ShardingRule | None = None) -> dict[str, jax.Array]:
        return _take_params(TorchModel(folder, dtype="auto", seed=seed, head=self.head))

    def resized(self, rows: int) -> Backend:
        raise ValueError(
            f"This model runs on the {self.name} backend, which cannot resize its embedding from "
            f"{self.traits.vocab_size} to {rows} tokens. Resize the checkpoint with transformers' "
            "resize_token_embeddings and load it again."
        )

    def on_disk(self, params: dict[str, jax.Array]) -> Iterator[tuple[str, np.ndarray]]:
        return ((name, np.asarray(params[name])) for name in self.tensors if name in params)


def load_exported(
    folder: Path, *, dtype: str, seed: int, head: HeadName, config: Any = None
) -> tuple[dict[str, jax.Array], ExportedBackend, Any]:
    """The parameters, the backend, and the config object used for exporting and saving; arguments as in TorchModel."""
    model = TorchModel(folder, dtype=dtype, seed=seed, head=head, config=config)
    return _take_params(model), ExportedBackend(model), model.config


def _take_params(model: TorchModel) -> dict[str, jax.Array]:
    """Copy the parameters to float32 JAX arrays, freeing torch's memory one by one."""
    return {name: jax.block_until_ready(owned(values)) for name, values in model.take()}


# transformers' models: their parameters and programs


_MANY = 5000  # operations; a longer program has unrolled a loop over tokens


class TorchModel:
    """A transformers model: its config, its programs and, until they are taken, the values of its parameters.

    Attributes:
        head: its head.
        config: transformers' config object; its `pad_token_id` is read whenever a program is exported.
        dtypes: parameter name -> dtype on disk, when loading and saving.
        shapes: parameter name -> shape.
        embeddings: names of embedding tables.
        max_positions: the largest text length that the positions allow; None means no limit.
    """

    def __init__(self, folder: Path, *, dtype: str, seed: int, head: HeadName = "score", config: Any = None):
        """`config` is transformers' config object of the folder; None reads it from the folder."""
        self._module = load_model(folder, dtype, seed, config, head)
        self.head = head
        self.config = self._module.config
        if head == "score":
            self.config.use_cache = False
        named = dict(self._module.named_parameters())
        self.dtypes = {name: dtype_name(parameter.dtype) for name, parameter in named.items()}
        self.shapes = {name: tuple(parameter.shape) for name, parameter in named.items()}
        tables = members(self._module, "Embedding")
        self.embeddings = frozenset(name for name, parameter in named.items() if id(parameter) in tables)
        self.max_positions = max_positions_of(self._module)
        self._programs: dict[tuple, list[tuple[Callable[[int, int], bool], Program]]] = {}

    @cached_property
    def undecayed(self) -> frozenset[str]:
        """Parameters without weight decay: those of layer norms, frozen ones, and those that no logit depends on."""
        inside = members(self._module, "LayerNorm")
        named = self._module.named_parameters()
        undecayed = {name for name, parameter in named if id(parameter) in inside or not parameter.requires_grad}
        return self._without_gradient() | undecayed

    def _without_gradient(self) -> frozenset[str]:
        """The parameters that get no gradient from any logit; torch's optimizers skip them."""
        forward = fake_pass(self._module, 2, 16, training=False, head=self.head)
        if forward is None:
            return self.program(2, 16, dtype="float32", training=False).unread()
        return frozenset(self.shapes) - forward.differentiable

    def take(self) -> Iterator[tuple[str, np.ndarray]]:
        """(name, float32 array) of each parameter, once: its memory is freed when the next one is requested.

        The module keeps its shapes, which suffice to export and save it.
        """
        for name, parameter in self._module.named_parameters():
            yield name, parameter.detach().float().numpy()
            empty(parameter, "float32")

    def save(self, folder: Path, params: dict[str, Any], max_shard_size: int | str | None) -> None:
        """Save with transformers' save_pretrained, which knows names, fused tensors and shards."""
        parameters = dict(self._module.named_parameters())
        try:
            for name, parameter in parameters.items():
                empty(parameter, self.dtypes[name])
            state = self._module.state_dict(keep_vars=True)
            whole = {name: as_dtype(params[name], dtype) for name, dtype in self.dtypes.items()}
            state |= {name: whole[first] for name, first in self.names().items()}  # a tied parameter is written once
            limit = {} if max_shard_size is None else {"max_shard_size": max_shard_size}
            self._module.save_pretrained(folder, state_dict=state, **limit)
        finally:
            for parameter in parameters.values():
                empty(parameter, "float32")

    @property
    def token_table(self) -> str:
        """The name of the token embedding's weight."""
        table = self._module.get_input_embeddings().weight
        return next(name for name, parameter in self._module.named_parameters() if parameter is table)

    def names(self) -> dict[str, str]:
        """Every name of a parameter -> its name in `named_parameters`; a tied parameter has several names."""
        first = {id(parameter): name for name, parameter in self._module.named_parameters()}
        every = self._module.named_parameters(remove_duplicate=False)
        return {name: first[id(parameter)] for name, parameter in every}

    def program(self, rows: int, length: int, *, dtype: str, training: bool) -> Program:
        """A program that is valid for `[rows, length]`; exported on the first call that needs it."""
        pad = self.config.get_text_config().pad_token_id
        program = self._fitting((dtype, training, pad), rows, length)
        if program is not None:
            return program
        other_mode = self._fitting((dtype, not training, pad), rows, length)
        if other_mode is not None and self._has_no_train_mode(rows, length):
            return other_mode
        return self._exported((dtype, training, pad), rows, length)

    def _fitting(self, kind: tuple, rows: int, length: int) -> Program | None:
        return next((program for fits, program in self._programs.get(kind, []) if fits(rows, length)), None)

    def _has_no_train_mode(self, rows: int, length: int) -> bool:
        """Whether training and evaluation compute the same, for example without dropout."""
        first, second = (fake_pass(self._module, rows, length, training, self.head) for training in (False, True))
        return first is not None and second is not None and first.operations == second.operations

    def _exported(self, of: tuple, rows: int, length: int) -> Program:
        dtype, training, _ = of
        programs, kind = self._programs.setdefault(of, []), self.config.model_type
        logger.warning(
            f"model_type {kind!r}: torch now exports transformers' code for {rows} rows of {length} tokens, and JAX "
            "compiles it, which takes tens of seconds. If the code allows it, other lengths use the same program."
        )
        exported = export(self._module, rows, length, dtype, training, self.head)
        fits = domain(exported)
        program = translated(exported, kind, self.names())
        programs.append((fits, program))
        count = len(exported.graph.nodes)
        if count > _MANY and not fits(rows, length + 1):
            logger.warning(
                f"model_type {kind!r}: its code loops over the {length} tokens, so its program has {count:,} "
                "operations and each length needs a program of its own. Compiling takes minutes, and longer for longer "
                "rows. Lower max_length and set pad_to_multiple_of to the same value, so that one program serves all."
            )
        return program


# torch: load a model, and export it


def load_model(folder: Path, dtype: str, seed: int, config: Any = None, head: str = "score") -> Any:
    """Load a model as TRL does after `set_seed(seed)`: missing tensors are initialized in the same order.

    `config` is its config object; None reads the one in the folder.
    """
    import torch

    with torch.random.fork_rng(devices=[]):
        torch.manual_seed(seed)
        kind = dtype if dtype == "auto" else getattr(torch, dtype)
        usual = {"num_labels": 1} if head == "score" else {}
        options = usual if config is None else {"config": config}
        try:
            model = auto_class(head).from_pretrained(
                folder, dtype=kind, attn_implementation="eager", trust_remote_code=False, **options
            )
        except pickle.UnpicklingError as error:
            raise not_tensors_error(folder / PICKLED, error) from error
    fixed = {name for name, parameter in unloaded(model.config, head).named_parameters() if not parameter.requires_grad}
    for name, parameter in model.named_parameters():
        parameter.requires_grad_(name not in fixed)  # loading resets the flag
    if model._can_set_experts_implementation():
        model.set_experts_implementation("grouped_mm")  # the only one that does not copy an expert for every token
    return model


def empty(parameter: Any, dtype: str) -> None:
    """Discard a parameter's values: the replacement is never written, so it takes no physical memory."""
    import torch

    parameter.data = torch.empty(parameter.shape, dtype=getattr(torch, dtype))


def members(module: Any, kind: str) -> set[int]:
    """The ids of all parameters in submodules of a certain torch.nn class."""
    import torch

    kinds = getattr(torch.nn, kind)
    return {id(parameter) for part in module.modules() if isinstance(part, kinds) for parameter in part.parameters()}


def as_dtype(values: Any, dtype: str) -> Any:
    """The array as a torch tensor with this dtype."""
    import torch

    return torch.from_numpy(np.array(values, np.float32)).to(getattr(torch, dtype))


def export(module: Any, rows: int, length: int, dtype: str, training: bool, head: str = "score") -> Any:
    """Export the module with torch.export as ATen operations, for any number of rows and tokens if possible."""
    import torch

    # Half precision as in TRL: torch's autocast decides for each operation. It must be enabled during both steps.
    half = contextlib.nullcontext() if dtype == "float32" else torch.autocast("cpu", getattr(torch, dtype))
    example = torch.ones((2, rows, length), dtype=torch.int64)
    free = {"rows": {1: torch.export.Dim.AUTO, 2: torch.export.Dim.AUTO}}
    module.train(training)
    try:
        with half, scanned(module):
            exported = torch.export.export(of_rows(module, head), (example,), dynamic_shapes=free, strict=False)
            return exported.run_decompositions()
    except Exception as error:  # torch's tracer raises errors of many types
        mode = " with dropout on (disable_dropout=True leaves it off)" if training else ""
        raise ValueError(
            f"model_type {module.config.model_type!r} cannot be exported{mode} for {rows} rows of {length} tokens; "
            f"torch.export reports: {str(error).strip()[:400]}"
        ) from error
    finally:
        module.eval()


def of_rows(module: Any, head: str) -> Any:
    """The model as a function of a single input, token ids stacked on the mask."""
    import torch

    options = {"use_cache": False} if head == "lm" else {}

    class Rows(torch.nn.Module):
        def __init__(self):
            super().__init__()
            self.model = module

        def forward(self, rows):
            return self.model(input_ids=rows[0], attention_mask=rows[1], **options).logits

    return Rows()


# Recurrences over tokens as a single operation of an exported program


_SCANS = "torch._higher_order_ops.associative_scan"


@contextlib.contextmanager
def scanned(module: Any) -> Iterator[None]:
    """Within the context, associative scans in the code of `module` are recorded as a single operation."""
    has = {sys.modules[type(part).__module__] for part in module.modules() if "use_associative_scan" in vars(part)}
    with contextlib.ExitStack() as stack:
        for code in has:
            stack.enter_context(patch.object(code, "is_torchdynamo_compiling", lambda: True))
            stack.enter_context(patch.object(code, "is_torchdynamo_exporting", lambda: False))
        if has:
            torchs = importlib.import_module(_SCANS)
            stack.enter_context(patch.object(torchs, "associative_scan", _scan_by(torchs.associative_scan)))
        yield


def _scan_by(original: Callable) -> Callable:
    """torch's associative_scan, except that linear recurrences use our own operation."""

    def scan(combine_fn: Callable, xs: Any, dim: int, reverse: bool = False, combine_mode: str = "pointwise") -> Any:
        if reverse or not _is_linear_recurrence(combine_fn):
            return original(combine_fn, xs, dim, reverse=reverse, combine_mode=combine_mode)
        decay, drive = xs
        return decay.cumprod(dim), _linear_recurrence()(decay, drive, dim)

    return scan


def _is_linear_recurrence(combine: Callable) -> bool:
    """Whether `combine` composes two steps of h -> a h + b; tested on numbers."""
    try:
        return tuple(combine((2, 3), (5, 7))) == (10, 22) and tuple(combine((-3, 4), (11, 2))) == (-33, 46)
    except (TypeError, AttributeError):  # it only accepts tensors
        return False


@cache
def _linear_recurrence() -> Callable:
    """torch's operator for `exported.aten.linear_recurrence`."""
    import torch

    def computed(decay: Any, drive: Any, dim: int) -> Any:
        state, states = torch.zeros_like(drive.select(dim, 0)), []
        for factor, added in zip(decay.unbind(dim), drive.unbind(dim), strict=True):
            state = factor * state + added
            states.append(state)
        return torch.stack(states, dim)

    schema = "(Tensor decay, Tensor drive, int dim) -> Tensor"
    operator = torch.library.custom_op("trl_jax::linear_recurrence", computed, mutates_args=(), schema=schema)
    operator.register_fake(lambda decay, drive, dim: torch.empty_like(drive))
    return operator


# An exported program as plain data: a graph of ATen operations, and the shapes that it is valid for


_MODEL = "model."  # the module's name in the exported program
_LAYER = re.compile(r"\.\d+(?:@\d+)?$")  # a numbered submodule; @1 marks its second call
_SILENT = ("aten._assert_tensor_metadata.default", "aten.sym_constrain_range_for_size.default")
# Keyword arguments to ignore; dtypes are recorded in the result
_INERT = {"device", "layout", "pin_memory", "memory_format", "non_blocking", "dtype"}


def domain(exported: Any) -> Callable[[int, int], bool]:
    """A predicate, based on the tracer's guards: whether the program is valid for (rows, length)."""
    value = _input(exported).meta["val"]
    sizes = value.shape[1:]
    guards = [guard.expr for guard in value.fake_mode.shape_env.guards]
    ranges = exported.range_constraints

    def fits(rows: int, length: int) -> bool:
        values: dict[Any, int] = {}
        for size, number in zip(sizes, (rows, length), strict=True):
            symbol = size if isinstance(size, int) else size.node.expr
            if isinstance(symbol, int) or symbol.is_number:
                if int(symbol) != number:
                    return False
            elif values.setdefault(symbol, number) != number or number not in ranges[symbol]:
                return False
        return all(bool(guard.subs(values)) for guard in guards)

    return fits


def _input(exported: Any) -> Any:
    [name] = exported.graph_signature.user_inputs
    return next(node for node in exported.graph.nodes if node.name == name)


def translated(exported: Any, model_type: str, names: Mapping[str, str]) -> Program:
    """The graph as plain data.

    Args:
        names: every name of a parameter -> the name to use; a tied parameter has several.

    Raises:
        ValueError: an operation is not supported.
    """
    signature = exported.graph_signature
    paths = signature.inputs_to_parameters
    parameters = {name: names[path.removeprefix(_MODEL)] for name, path in paths.items()}
    frozen = frozenset(parameters.values()) - {names[name] for name in _trained(exported)}
    tensors = {**exported.state_dict, **exported.constants}
    paths = {**signature.inputs_to_buffers, **signature.inputs_to_lifted_tensor_constants}
    nodes, layer = [], None
    for node in exported.graph.nodes:
        if node.op == "call_function" and operation_of(node) not in _SILENT:
            layer = _layer(node, layer)
            nodes.append(_node(node, layer))
    unknown = sorted({node.op for node in nodes} - set(OPERATIONS))
    if unknown:
        raise ValueError(
            f"model_type {model_type!r} uses operations that trl_jax does not support: {', '.join(unknown)}. Use a "
            "checkpoint of another type."
        )
    constants = {name: tensors[path].detach().cpu().numpy() for name, path in paths.items()}
    [output] = signature.user_outputs
    return Program(tuple(nodes), parameters, frozen, constants, _input(exported).name, output)


def _trained(exported: Any) -> set[str]:
    return {name.removeprefix(_MODEL) for name, value in exported.named_parameters() if value.requires_grad}


def _node(node: Any, layer: str | None) -> Node:
    kwargs = {name: plain(value) for name, value in node.kwargs.items() if name not in _INERT}
    return Node(node.name, operation_of(node), plain(tuple(node.args)), kwargs, recorded(node.meta.get("val")), layer)


def operation_of(node: Any) -> str:
    """The qualified name of an operation, such as "aten.add.Tensor", "operator.mul" or "torch.sym_max"."""
    import torch

    target = node.target
    if isinstance(target, torch._ops.OpOverload):
        return str(target)
    module = target.__module__.removeprefix("_")
    return f"{module}.{target.__name__}"


def plain(value: Any) -> Any:
    """An argument of an operation, converted from torch's classes to plain Python."""
    import torch

    if isinstance(value, torch.fx.Node):
        return Ref(value.name)
    if isinstance(value, list | tuple):
        return tuple(plain(entry) for entry in value)
    return dtype_name(value) if isinstance(value, torch.dtype) else value


def recorded(value: Any) -> Any:
    """The dtype of a tensor, or a tuple for several tensors; None for a number."""
    import torch

    if isinstance(value, list | tuple):
        return tuple(recorded(part) for part in value)
    return dtype_name(value.dtype) if isinstance(value, torch.Tensor) else None


def _layer(node: Any, before: str | None) -> str | None:
    """The outermost numbered submodule of the node, or `before` (that of the previous node) if torch recorded none."""
    stack = node.meta.get("nn_module_stack", {})
    if not any(key.startswith("L__self__") for key in stack):
        return before
    return next((key for key in stack if _LAYER.search(key)), None)
