"""Everything that calls torch: export models, read pickles, convert tensors.

torch is optional, so it is only imported inside functions.
"""

from __future__ import annotations

import contextlib
import importlib
import importlib.util
import pickle
import re
import sys
import tempfile
import zipfile
from collections.abc import Callable, Iterator
from functools import cache
from pathlib import Path
from typing import Any
from unittest.mock import patch

import ml_dtypes
import numpy as np

# Loading and exporting transformers' models, and converting tensors


PICKLED = "pytorch_model.bin"


def available() -> bool:
    return importlib.util.find_spec("torch") is not None


def peft_available() -> bool:
    """Whether peft is installed; the stub that `python -m trl_jax` provides does not count, and has no file."""
    spec = importlib.util.find_spec("peft")
    return spec is not None and spec.origin is not None


def _class_of(head: str) -> Any:
    """transformers' auto class for models with this head."""
    import transformers

    names = {"score": "AutoModelForSequenceClassification", "lm": "AutoModelForCausalLM"}
    return getattr(transformers, names[head])


def load_model(folder: Path, dtype: str, seed: int, config: Any = None, head: str = "score") -> Any:
    """Load a model as TRL does after `set_seed(seed)`: missing tensors are initialized in the same order.

    `config` is its config object; None reads the one in the folder.
    """
    import torch

    with torch.random.fork_rng(devices=[]):
        torch.manual_seed(seed)
        kind = dtype if dtype == "auto" else getattr(torch, dtype)
        usual = {"num_labels": 1} if head == "score" else {}
        facts = usual if config is None else {"config": config}
        try:
            model = _class_of(head).from_pretrained(
                folder, dtype=kind, attn_implementation="eager", trust_remote_code=False, **facts
            )
        except pickle.UnpicklingError as error:
            raise _not_tensors_error(folder / PICKLED, error) from error
    fixed = {name for name, parameter in unloaded(model.config, head).named_parameters() if not parameter.requires_grad}
    for name, parameter in model.named_parameters():
        parameter.requires_grad_(name not in fixed)  # loading resets the flag
    if model._can_set_experts_implementation():
        model.set_experts_implementation("grouped_mm")  # the only one that does not copy an expert for every token
    return model


def unloaded(config: Any, head: str = "score") -> Any:
    """The model on torch's meta device, without memory for its parameters."""
    import torch

    with torch.device("meta"):
        return _class_of(head).from_config(config, trust_remote_code=False)


def adapted(model: Any, config: Any) -> Any:
    """The PeftModel around a torch model whose layers get a new adapter. `config` is ours."""
    from peft import PeftConfig, get_peft_model

    with tempfile.TemporaryDirectory(prefix="trl-jax-") as folder:
        config.save_pretrained(folder)
        return get_peft_model(model, PeftConfig.from_pretrained(folder))


def torch_modules(config: Any, head: str, adapter: Any = None, *, images: bool = False) -> dict[str, Any]:
    """All modules of a torch model by their names, without memory for its parameters.

    Args:
        config: the model's config object.
        adapter: the config of its adapter, if it has one.
        images: whether the model has a vision tower.
    """
    import torch
    from transformers import AutoModelForImageTextToText
    from transformers.models.auto.modeling_auto import MODEL_FOR_CAUSAL_LM_MAPPING

    with torch.random.fork_rng(devices=[]):  # initializing the modules draws numbers
        if head == "lm" and (images or type(config) not in MODEL_FOR_CAUSAL_LM_MAPPING):
            with torch.device("meta"):
                model = AutoModelForImageTextToText.from_config(config, trust_remote_code=False)
        else:
            model = unloaded(config, head)
        model = model if adapter is None else adapted(model, adapter)
    return dict(model.named_modules())


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
        from trl_jax.exported.aten import Ref

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


def dtype_name(dtype: Any) -> str:
    return str(dtype).removeprefix("torch.")


def is_torch(value: Any) -> bool:
    """Whether `value` is a torch tensor, without importing torch."""
    return "torch" in sys.modules and isinstance(value, sys.modules["torch"].Tensor)


def as_tensors(values: Any) -> Any:
    """Convert arrays to torch tensors, also inside dicts, lists and tuples; other values are returned unchanged."""
    if isinstance(values, dict):
        return {name: as_tensors(value) for name, value in values.items()}
    if isinstance(values, list | tuple):
        return type(values)(map(as_tensors, values))
    return _as_tensor(np.asarray(values)) if isinstance(values, np.ndarray) else values


def _as_tensor(values: np.ndarray) -> Any:
    import torch

    values = values if values.flags.writeable else values.copy()  # which torch warns about
    if values.dtype == ml_dtypes.bfloat16:
        return torch.from_numpy(values.view(np.int16)).view(torch.bfloat16)
    return torch.from_numpy(values)


_WRITES = re.compile(r"[^_]_$|^__(i(add|sub|mul|truediv|floordiv|mod|pow|and|or|xor|lshift|rshift)|setitem)__$")
_FLAGS = ("requires_grad_", "__set__")
# Their results are the script's own. Some return the tensor itself if its device and dtype are as wanted; we copy it,
# as if it were on a GPU.
_COPIES = ("clone", "cpu", "cuda", "to", "float")


@cache
def values_class() -> type:
    """The class of tensors with the values of a parameter, or with results of computing with them.

    The values cannot be written, because the model would not change, nor can views of them. Copies and results can.
    """
    import torch

    class ParameterValues(torch.Tensor):
        __module__, __qualname__ = __name__, "ParameterValues"
        parameter: str | None = None  # the name of the parameter whose values they are; None for results

        @classmethod
        def __torch_function__(
            cls, function: Callable, types: tuple[type, ...], args: tuple = (), kwargs: dict[str, Any] | None = None
        ) -> Any:
            if not all(issubclass(one, torch.Tensor) for one in types):
                return NotImplemented  # torch's protocol: it then asks `Parameter`, which passes its values
            kwargs, name = kwargs or {}, function.__name__
            given = [*args, *kwargs.values()]
            read = [one for one in _members(given) if type(one) is cls and one.parameter is not None]
            sets_flag = name == "requires_grad_" and (len(given) < 2 or given[1])
            if sets_flag and read:
                return _own(read[0]).as_subclass(cls).requires_grad_()  # for torch.nn.Parameter(values)
            writes = _WRITES.search(name) or name in _FLAGS or kwargs.get("inplace")
            for one in _members(given[:1] if writes else kwargs.get("out")):
                if any(one is other for other in read):
                    raise refused_flag() if name in _FLAGS else refused_write(one.parameter)
            with torch._C.DisableTorchFunctionSubclass():
                found = function(*args, **kwargs)
                if read and isinstance(found, np.ndarray):
                    found.flags.writeable = False
                if name in _COPIES and isinstance(found, torch.Tensor):
                    return _own(found) if any(_share_memory(found, one) for one in read) else _plain(found)
                return replaced(found, torch.Tensor, lambda one: _result(one, read))

        def __iter__(self) -> Iterator[Any]:
            return iter(self.unbind(0))

        def __array_function__(self, function: Callable, types: Any, args: tuple, kwargs: dict[str, Any]) -> Any:
            return function(
                *replaced(args, ParameterValues, np.asarray), **replaced(kwargs, ParameterValues, np.asarray)
            )

        def __array__(self, dtype: Any = None, copy: bool | None = None) -> np.ndarray:
            values = as_array(_plain(self.detach()))
            values.flags.writeable = False
            return np.array(values, dtype, copy=copy)

        def __jax_array__(self) -> Any:
            import jax.numpy as jnp

            return jnp.asarray(np.asarray(self))

        def __repr__(self, **options: Any) -> str:
            return _plain(self).__repr__(**options)

        def __format__(self, spec: str) -> str:
            return format(_plain(self), spec)

        def __reduce_ex__(self, protocol: Any) -> Any:
            return _plain(self.detach()).__reduce_ex__(protocol)

        def __deepcopy__(self, memo: Any) -> Any:
            return _plain(self.detach()).clone().requires_grad_(self.requires_grad)

    def _result(values: Any, read: list[Any]) -> Any:
        found = values.as_subclass(ParameterValues)
        found.parameter = next((one.parameter for one in read if _share_memory(values, one)), None)
        return found

    return ParameterValues


def _plain(values: Any) -> Any:
    import torch

    with torch._C.DisableTorchFunctionSubclass():
        return values.as_subclass(torch.Tensor)


def _own(values: Any) -> Any:
    return _plain(values).clone()


def _share_memory(one: Any, other: Any) -> bool:
    strided = str(one.layout) == "torch.strided" and one.device.type == "cpu"
    return strided and one.untyped_storage().data_ptr() == other.untyped_storage().data_ptr()


def _members(values: Any) -> Iterator[Any]:
    """What lists, tuples and dicts contain, or the value itself."""
    if isinstance(values, dict):
        values = list(values.values())
    if isinstance(values, list | tuple):
        for value in values:
            yield from _members(value)
    else:
        yield values


def replaced(values: Any, kind: type, change: Callable) -> Any:
    """Change what is exactly of this class, also inside dicts, lists and tuples."""
    if type(values) is kind:
        return change(values)
    if isinstance(values, dict):
        return {name: replaced(value, kind, change) for name, value in values.items()}
    if isinstance(values, list | tuple) and any(type(one) is kind for one in _members(values)):
        return type(values)([replaced(value, kind, change) for value in values])
    return values


def refused_write(name: str) -> ValueError:
    return ValueError(
        f"Cannot write into {name or 'a parameter'}: these are a copy of its values, so the model would not change. "
        "Change model.params, or call model.load_state_dict({name: values}, strict=False)."
    )


def refused_flag() -> ValueError:
    return ValueError(
        "requires_grad can only be set on a parameter itself, not on a copy or a slice of it. Set it on a clone()."
    )


def parameter_values(values: np.ndarray, name: str) -> Any:
    """The values of a parameter as a tensor with the same memory, into which scripts cannot write."""
    tensor = _as_tensor(values).as_subclass(values_class())
    tensor.parameter = name
    return tensor


def without_memory(shape: tuple[int, ...], dtype: str) -> Any:
    """A tensor of this shape and dtype with the memory of one number."""
    import torch

    return torch.zeros((), dtype=getattr(torch, dtype)).expand(shape)


def as_array(values: Any) -> np.ndarray:
    """Convert a tensor to a NumPy array with the same dtype."""
    import torch

    if values.dtype is torch.bfloat16:  # not a native NumPy dtype
        return values.contiguous().view(torch.int16).numpy().view(ml_dtypes.bfloat16)
    return values.contiguous().numpy()


def unpickled(path: Path) -> dict[str, Any]:
    """The tensors of a file by name. Code in the file is not run."""
    import torch

    try:
        content = torch.load(path, map_location="cpu", weights_only=True, mmap=zipfile.is_zipfile(path))
    except MemoryError:
        raise
    except Exception as error:  # zip archives, pickles and torch's own checks raise errors of many types
        raise _not_tensors_error(path, error) from error
    if not isinstance(content, dict) or not all(isinstance(value, torch.Tensor) for value in content.values()):
        raise ValueError(f"{path} must hold a state dict of tensors by name, got a {type(content).__name__}.")
    return dict(content)


def _not_tensors_error(path: Path, error: Exception) -> ValueError:
    return ValueError(
        f"{path} is not a PyTorch file that only holds tensors ({type(error).__name__}); no code in it was run. "
        "Download it again, or use a safetensors version of the checkpoint."
    )


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
        for now, given in zip(decay.unbind(dim), drive.unbind(dim), strict=True):
            state = now * state + given
            states.append(state)
        return torch.stack(states, dim)

    schema = "(Tensor decay, Tensor drive, int dim) -> Tensor"
    made = torch.library.custom_op("trl_jax::linear_recurrence", computed, mutates_args=(), schema=schema)
    made.register_fake(lambda decay, drive, dim: torch.empty_like(drive))
    return made
