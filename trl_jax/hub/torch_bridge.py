"""Tensors and arrays: what passes between torch and JAX as values, in either direction.

Batches and model outputs go to functions of scripts, and their losses and gradients come back. Scripts see the values
of a model's parameters as tensors if torch is imported, otherwise as NumPy arrays with a tensor's methods. torch is
optional, so it is only imported inside functions.
"""

from __future__ import annotations

import contextlib
import functools
import importlib.util
import inspect
import math
import random
import re
import sys
import tempfile
import zipfile
from collections.abc import Callable, Iterator, Mapping, Sequence
from functools import cache
from pathlib import Path
from types import ModuleType
from typing import Any, NamedTuple

import ml_dtypes
import numpy as np

from trl_jax.core.files import WEIGHT_DTYPES

# Whether torch and PEFT are installed, and torch models without values


def available() -> bool:
    return importlib.util.find_spec("torch") is not None


def peft_available() -> bool:
    """Whether peft is installed; the stub that `python -m trl_jax` provides does not count, and has no file."""
    spec = importlib.util.find_spec("peft")
    return spec is not None and spec.origin is not None


def auto_class(head: str) -> Any:
    """transformers' auto class for models with this head."""
    import transformers

    names = {"score": "AutoModelForSequenceClassification", "lm": "AutoModelForCausalLM"}
    return getattr(transformers, names[head])


def unloaded(config: Any, head: str = "score") -> Any:
    """The model on torch's meta device, without memory for its parameters."""
    import torch

    with torch.device("meta"):
        return auto_class(head).from_config(config, trust_remote_code=False)


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


# Tensors and arrays


def dtype_name(dtype: Any) -> str:
    return str(dtype).removeprefix("torch.")


def is_torch(value: Any) -> bool:
    """Whether `value` is a torch tensor, without importing torch."""
    return "torch" in sys.modules and isinstance(value, sys.modules["torch"].Tensor)


_DTYPES = {*WEIGHT_DTYPES, "float64", "int8", "int16", "int32", "int64", "uint8", "bool"}


def given_dtype(value: Any) -> str | None:
    """The name of a dtype, torch's or NumPy's; None for anything else, such as a device."""
    if isinstance(value, str):
        return str.__str__(value) if value in _DTYPES else None
    if type(value).__module__ == "torch" and type(value).__name__ == "dtype":
        return str(value).removeprefix("torch.")
    return np.dtype(value).name if isinstance(value, np.dtype | type) else None


def is_tensor(value: Any) -> bool:
    """Whether `value` is a torch tensor, or the array that a script gets instead where torch is not installed."""
    return isinstance(value, TensorLikeArray) or is_torch(value)


def as_tensors(values: Any) -> Any:
    """Convert arrays to torch tensors, also inside dicts, lists and tuples; other values are returned unchanged. Where
    torch is not installed, the arrays get the methods of tensors."""
    if isinstance(values, dict):
        return {name: as_tensors(value) for name, value in values.items()}
    if isinstance(values, list | tuple):
        return type(values)(map(as_tensors, values))
    return _as_tensor(np.asarray(values)) if isinstance(values, np.ndarray) else values


def _as_tensor(values: np.ndarray) -> Any:
    values = values if values.flags.writeable else values.copy()
    if not available():
        return values.view(TensorLikeArray)
    import torch

    if values.dtype == ml_dtypes.bfloat16:
        return torch.from_numpy(values.view(np.int16)).view(torch.bfloat16)
    return torch.from_numpy(values)


def as_array(values: Any) -> np.ndarray:
    """Convert a tensor to a NumPy array with the same dtype."""
    import torch

    if values.dtype is torch.bfloat16:  # not a native NumPy dtype
        return values.contiguous().view(torch.int16).numpy().view(ml_dtypes.bfloat16)
    return values.contiguous().numpy()


def batch_tensors(arrays: dict[str, Any]) -> dict[str, Any]:
    """A batch as torch's collators return it, with int64 token ids, masks and labels."""
    return as_tensors({name: _as_long(np.array(values)) for name, values in arrays.items()})


def batch_tensor(values: Any) -> Any:
    """Like `batch_tensors`, for a single array."""
    return batch_tensors({"": values})[""]


def as_arrays(values: Any) -> Any:
    """A tensor, or the tensors in mappings and lists, as NumPy arrays; other values as they are."""
    if isinstance(values, Mapping):
        return {name: as_arrays(value) for name, value in values.items()}
    if isinstance(values, list):
        return list(map(as_arrays, values))
    return as_array(values.detach()) if is_torch(values) else values


def _as_long(values: np.ndarray) -> np.ndarray:
    return values.astype(np.int64) if values.dtype.kind in "iu" else values


def any_tensor(*values: Any) -> bool:
    """Whether any of `values` is a tensor, without importing torch."""
    return any(map(is_torch, values))


def also_of_tensors(function: Callable) -> Callable:
    """Let a function of arrays also accept tensors; it then returns a tensor without a gradient."""

    @functools.wraps(function)
    def called(*values: Any, **options: Any) -> Any:
        if not any_tensor(*values, *options.values()):
            return function(*values, **options)
        import jax

        results = function(*as_arrays(list(values)), **as_arrays(options))
        return as_tensors(jax.tree.map(np.asarray, results))

    return called


# Losses written in torch: outputs as tensors that require a gradient, and their gradients


def knows_torch(function: Callable) -> bool:
    """Whether a function or the module that defines it imports torch, or its stand-in where it is not installed."""
    return imports_package(function, "torch")


def takes_tensors(function: Callable) -> bool:
    """Whether a function expects tensors: neither it nor the module that defines it imports jax, and torch is installed
    or they import its stand-in."""
    return (available() or knows_torch(function)) and not imports_package(function, "jax")


def function_name(function: Callable) -> str:
    """The name of a function, or the class of another callable."""
    return function.__name__ if "__name__" in dir(function) else type(function).__qualname__


def imports_package(function: Callable, package: str) -> bool:
    """Whether a function or the module that defines it imports a package."""
    function = inspect.unwrap(function)
    if not inspect.isfunction(function):
        return False
    modules = [value.__name__ for value in function.__globals__.values() if isinstance(value, ModuleType)]
    return any(name.partition(".")[0] == package for name in (*modules, *function.__code__.co_names))


def as_leaves(outputs: dict[str, Any]) -> tuple[dict[str, Any], dict[str, Any]]:
    """Convert arrays to leaf tensors that record gradients, and to clones of these, which user code may modify in
    place."""
    copies = as_tensors({name: np.array(values) for name, values in outputs.items()})
    leaves = {name: tensor.requires_grad_() for name, tensor in copies.items()}
    return leaves, {name: leaf.clone() for name, leaf in leaves.items()}


def padded_gradient(gradient: np.ndarray, shape: tuple[int, ...]) -> np.ndarray:
    """Pad a gradient with zeros at the end of its axes: the script saw only the first positions of an output of this
    shape."""
    padded = np.zeros(shape, np.float32)
    padded[tuple(map(slice, gradient.shape))] = gradient
    return padded


def padded_positions(values: Any, before: int, after: int) -> Any:
    """Pad the second axis of a tensor `[rows, positions, V]` with NaN."""
    import torch

    return torch.nn.functional.pad(values, (0, 0, before, after), value=float("nan"))


def gradients(loss: Any, leaves: Sequence[dict[str, Any]]) -> list[dict[str, np.ndarray]]:
    """The derivative of a loss with respect to each of these tensors; zeros if it does not depend on one.

    Raises:
        TypeError: some tensors already have a gradient, because user code called backward().
    """
    if any(leaf.grad is not None for of_call in leaves for leaf in of_call.values()):
        raise TypeError(
            "The script's own loss calls .backward(), which trl_jax does itself with what the method returns. Leave it "
            "out and return the loss, or take gradients with torch.autograd.grad."
        )
    loss.backward()

    def gradient_of(leaf: Any) -> np.ndarray:
        return np.zeros(leaf.shape, np.float32) if leaf.grad is None else leaf.grad.numpy()

    return [{name: gradient_of(leaf) for name, leaf in of_call.items()} for of_call in leaves]


def without_gradient() -> Any:
    """A context in which torch records no gradients."""
    import torch

    return torch.no_grad()


@contextlib.contextmanager
def random_states_unchanged() -> Iterator[None]:
    """A context that restores the global random generators of torch, NumPy and Python when it ends."""
    import torch

    of_python, of_numpy = random.getstate(), np.random.get_state()
    try:
        with torch.random.fork_rng(devices=[]):
            yield
    finally:
        random.setstate(of_python)
        np.random.set_state(of_numpy)


# The values of a parameter as a torch tensor


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
            if not all(issubclass(kind, torch.Tensor) for kind in types):
                return NotImplemented  # torch's protocol: it then asks `Parameter`, which passes its values
            kwargs, name = kwargs or {}, function.__name__
            arguments = [*args, *kwargs.values()]
            read = [value for value in _members(arguments) if type(value) is cls and value.parameter is not None]
            sets_flag = name == "requires_grad_" and (len(arguments) < 2 or arguments[1])
            if sets_flag and read:
                return _own(read[0]).as_subclass(cls).requires_grad_()  # for torch.nn.Parameter(values)
            writes = _WRITES.search(name) or name in _FLAGS or kwargs.get("inplace")
            for value in _members(arguments[:1] if writes else kwargs.get("out")):
                if any(value is tensor for tensor in read):
                    raise refused_flag() if name in _FLAGS else refused_write(value.parameter)
            with torch._C.DisableTorchFunctionSubclass():
                result = function(*args, **kwargs)
                if read and isinstance(result, np.ndarray):
                    result.flags.writeable = False
                if name in _COPIES and isinstance(result, torch.Tensor):
                    return _own(result) if any(_share_memory(result, values) for values in read) else _plain(result)
                return replaced(result, torch.Tensor, lambda values: _result(values, read))

        def __iter__(self) -> Iterator[Any]:
            return iter(self.unbind(0))

        def __array_function__(self, function: Callable, types: Any, args: tuple, kwargs: dict[str, Any]) -> Any:
            return on_arrays(function, ParameterValues, args, kwargs)

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
        result = values.as_subclass(ParameterValues)
        result.parameter = next((source.parameter for source in read if _share_memory(values, source)), None)
        return result

    return ParameterValues


def _plain(values: Any) -> Any:
    import torch

    with torch._C.DisableTorchFunctionSubclass():
        return values.as_subclass(torch.Tensor)


def _own(values: Any) -> Any:
    return _plain(values).clone()


def _share_memory(tensor: Any, twin: Any) -> bool:
    strided = str(tensor.layout) == "torch.strided" and tensor.device.type == "cpu"
    return strided and tensor.untyped_storage().data_ptr() == twin.untyped_storage().data_ptr()


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
    if isinstance(values, list | tuple) and any(type(member) is kind for member in _members(values)):
        return type(values)([replaced(value, kind, change) for value in values])
    return values


def on_arrays(function: Callable, kind: type, args: tuple, kwargs: dict[str, Any]) -> Any:
    """The result of a function that takes NumPy arrays in place of objects of this class."""
    return function(*replaced(args, kind, np.asarray), **replaced(kwargs, kind, np.asarray))


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


# The values of a parameter without torch: an array with the tensor methods that scripts use most, in torch's meaning


class Extremes(NamedTuple):
    """The result of `max(dim)`, `min(dim)` and `sort`, as in torch."""

    values: TensorLikeArray
    indices: TensorLikeArray


def _along(name: str) -> Callable:
    """NumPy's method, which also takes torch's arguments."""

    def method(values: TensorLikeArray, dim: Any = None, keepdim: bool = False, **numpys: Any) -> Any:
        options = {"axis": dim} | ({"keepdims": True} if keepdim else {}) | numpys
        return vars(np.ndarray)[name](values, **options)

    return method


def _unbiased(name: str) -> Callable:
    def method(values: TensorLikeArray, dim: Any = None, unbiased: bool = True, **options: Any) -> Any:
        if isinstance(dim, bool):  # torch's std(unbiased)
            dim, unbiased = None, dim
        return _along(name)(values, dim, **{"ddof": options.pop("correction", int(unbiased))} | options)

    return method


def _extreme(name: str) -> Callable:
    def method(values: TensorLikeArray, dim: int | None = None, keepdim: bool = False, **numpys: Any) -> Any:
        extremes = _along(name)(values, dim, keepdim, **numpys)
        return extremes if dim is None else Extremes(extremes, _along(f"arg{name}")(values, dim, keepdim))

    return method


class Size(int):
    """NumPy's `size`, which is also torch's `size()`."""

    shape: tuple[int, ...]

    @classmethod
    def of(cls, shape: tuple[int, ...]) -> Size:
        size = cls(math.prod(shape))
        size.shape = shape
        return size

    def __call__(self, dim: int | None = None) -> Any:
        return self.shape if dim is None else self.shape[dim]


def _cast(dtype: type) -> Callable:
    def method(values: TensorLikeArray) -> TensorLikeArray:
        return values.astype(dtype)

    return method


def _in_place(name: str) -> Callable:
    def method(values: TensorLikeArray, operand: Any) -> TensorLikeArray:
        values._check_writable()
        return vars(np.ndarray)[name](values, operand)

    return method


class TensorLikeArray(np.ndarray):
    """The values of a parameter when they were read, or a copy of them, in a script that does not import torch. Where
    torch is not installed, also what such a script gets instead of tensors: batches, token ids and logits."""

    parameter = ""  # its name
    requires_grad, grad, grad_fn, is_leaf, is_cuda = False, None, None, True, False

    sum, mean, prod, all, any = map(_along, ("sum", "mean", "prod", "all", "any"))
    argmax, argmin, cumsum, cumprod = map(_along, ("argmax", "argmin", "cumsum", "cumprod"))
    std, var = map(_unbiased, ("std", "var"))
    max, min = map(_extreme, ("max", "min"))

    def __array_finalize__(self, of: Any) -> None:
        self.parameter = of.parameter if isinstance(of, TensorLikeArray) else ""

    @property
    def data(self) -> TensorLikeArray:
        return self

    @property
    def size(self) -> int:
        return Size.of(self.shape)

    def numel(self) -> int:
        return int(self.size)

    nelement = numel

    def dim(self) -> int:
        return self.ndim

    def element_size(self) -> int:
        return self.itemsize

    def is_floating_point(self) -> bool:
        return np.issubdtype(self.dtype, np.floating) or self.dtype.name.startswith(("bfloat", "float"))

    def clone(self) -> TensorLikeArray:
        return self.copy()

    def detach(self) -> TensorLikeArray:
        return self

    def cpu(self) -> TensorLikeArray:
        """A copy, into which a script may write."""
        return self.copy()

    def to(self, *args: Any, **kwargs: Any) -> TensorLikeArray:
        """A copy, into which a script may write, with another dtype if one is named. JAX chooses the device."""
        names = [name for name in map(given_dtype, (*args, *kwargs.values())) if name is not None]
        return self.astype(np.dtype(names[0])) if names else self.copy()

    float, double, long, int, bool = map(_cast, (np.float32, np.float64, np.int64, np.int32, np.bool_))

    def numpy(self) -> np.ndarray:
        return np.asarray(self)

    def abs(self) -> TensorLikeArray:
        return np.abs(self)

    def pow(self, exponent: Any) -> TensorLikeArray:
        return self**exponent

    def sqrt(self) -> TensorLikeArray:
        return np.sqrt(self)

    def isnan(self) -> TensorLikeArray:
        return np.isnan(self)

    def isfinite(self) -> TensorLikeArray:
        return np.isfinite(self)

    def norm(self, p: Any = 2, dim: Any = None, keepdim: bool = False) -> Any:
        order = {"inf": np.inf, "fro": 2}.get(p, p)
        if isinstance(dim, tuple | list):
            raise ValueError(f"norm(dim={dim}): without torch, a norm is over one axis or all. Import torch.")
        return np.linalg.norm(
            self.ravel() if dim is None else self, order, axis=dim, keepdims=keepdim and dim is not None
        )

    def sort(self, dim: int = -1, descending: bool = False) -> Extremes:
        order = self.argsort(dim, descending)
        return Extremes(np.take_along_axis(self, order, axis=dim), order)

    def argsort(self, dim: int = -1, descending: bool = False, **numpys: Any) -> Any:
        return np.ndarray.argsort(-self if descending else self, **{"axis": dim, "kind": "stable"} | numpys)

    def nonzero(self) -> TensorLikeArray:
        return np.argwhere(self)

    def repeat(self, *sizes: Any, **numpys: Any) -> TensorLikeArray:
        if numpys:
            return np.ndarray.repeat(self, *sizes, **numpys)
        return np.tile(self, sizes[0] if isinstance(sizes[0], tuple | list) else sizes)

    def view(self, *shape: Any, **numpys: Any) -> TensorLikeArray:
        of_numpy = numpys or not shape or isinstance(shape[0], type | np.dtype | str)
        return np.ndarray.view(self, *shape, **numpys) if of_numpy else self.reshape(*shape)

    def t(self) -> TensorLikeArray:
        return self.T

    def transpose(self, *dims: Any) -> TensorLikeArray:
        numpys = len(dims) != 2
        return np.ndarray.transpose(self, *dims) if numpys else self.swapaxes(*dims)

    def permute(self, *dims: Any) -> TensorLikeArray:
        return np.ndarray.transpose(self, *dims)

    def squeeze(self, dim: int | None = None, **numpys: Any) -> TensorLikeArray:
        if dim is None or self.shape[dim] == 1:
            return np.ndarray.squeeze(self, **{"axis": dim} | numpys)
        return self

    def unsqueeze(self, dim: int) -> TensorLikeArray:
        return np.expand_dims(self, dim)

    def __array_function__(self, function: Callable, types: Any, args: tuple, kwargs: dict[str, Any]) -> Any:
        """NumPy's functions call NumPy's methods."""
        result = on_arrays(function, TensorLikeArray, args, kwargs)
        return result.view(TensorLikeArray) if type(result) is np.ndarray else result

    def __getattr__(self, name: str) -> Any:
        if not name.startswith("_") and _WRITES.search(name):
            self._check_writable()
        instead = (
            "" if name.startswith("_") else ". Use NumPy, or install and import torch: then values are its tensors"
        )
        raise AttributeError(f"{type(self).__name__} has no attribute {name!r}{instead}")

    def __setitem__(self, index: Any, values: Any) -> None:
        self._check_writable()
        super().__setitem__(index, values)

    __iadd__, __isub__, __imul__, __itruediv__ = map(_in_place, ("__iadd__", "__isub__", "__imul__", "__itruediv__"))

    def _check_writable(self) -> None:
        """Raise ValueError unless this is the script's own copy, for example from `clone`."""
        if not self.flags.writeable:
            raise refused_write(self.parameter)


# pytorch_model.bin


PICKLED = "pytorch_model.bin"


def unpickled(path: Path) -> dict[str, Any]:
    """The tensors of a file by name. Code in the file is not run."""
    import torch

    try:
        content = torch.load(path, map_location="cpu", weights_only=True, mmap=zipfile.is_zipfile(path))
    except MemoryError:
        raise
    except Exception as error:  # zip archives, pickles and torch's own checks raise errors of many types
        raise not_tensors_error(path, error) from error
    if not isinstance(content, dict) or not all(isinstance(value, torch.Tensor) for value in content.values()):
        raise ValueError(f"{path} must hold a state dict of tensors by name, got a {type(content).__name__}.")
    return dict(content)


def not_tensors_error(path: Path, error: Exception) -> ValueError:
    return ValueError(
        f"{path} is not a PyTorch file that only holds tensors ({type(error).__name__}); no code in it was run. "
        "Download it again, or use a safetensors version of the checkpoint."
    )
