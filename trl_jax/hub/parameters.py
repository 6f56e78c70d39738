"""The parameters of a model and the modules that contain them, with the methods that scripts use on torch's.

`Weights` has a model's arrays and reads them by the names of parameters in PyTorch. A `Parameter` is no more than a
name in these weights: whatever a script does with it uses the current arrays. There is one object per parameter. A
`Submodule` is the name of a module; `ModuleApi` has the methods that the model shares with its modules.
"""

from __future__ import annotations

import contextlib
import re
import sys
import weakref
from collections.abc import Callable, Collection, Iterator, Mapping
from contextvars import ContextVar
from functools import cache
from types import MappingProxyType
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import numpy as np

from trl_jax.hub.backend import Backend
from trl_jax.hub.torch_bridge import (
    Size,
    TensorLikeArray,
    as_array,
    as_tensors,
    given_dtype,
    is_torch,
    on_arrays,
    parameter_values,
    refused_write,
    replaced,
    values_class,
    without_memory,
)
from trl_jax.mesh.mesh import spans_hosts

# Weights: the arrays of a model, read by the names of its parameters


def for_scripts(values: TensorLikeArray) -> Any:
    """The values as scripts see them: a tensor if torch is imported, otherwise a NumPy array."""
    if "torch" not in sys.modules:
        return values
    _let_jax_take_values()
    return parameter_values(values.base, values.parameter)


@cache
def _let_jax_take_values() -> None:
    _register_with_jax(values_class())


def _register_with_jax(kind: type) -> None:
    """Make instances of a class pytrees of their values. JAX's functions would not convert them otherwise."""
    jax.tree_util.register_pytree_node(kind, lambda values: ((np.asarray(values),), None), lambda _, values: values[0])


def _read_only(values: np.ndarray, name: str) -> TensorLikeArray:
    """A copy, into which scripts cannot write."""
    copied = np.array(values).view(TensorLikeArray)
    copied.flags.writeable, copied.parameter = False, name
    return copied


class _Reading(NamedTuple):
    """The values of a parameter, and weak references to the arrays that the model had when they were read. As long as
    it has the same arrays, which training replaces, the values are current and need not be read again."""

    arrays: list[weakref.ref]
    values: TensorLikeArray

    def is_current(self, name: str, arrays: dict[str, Any]) -> bool:
        pairs = zip(self.arrays, arrays.values(), strict=False)
        same = len(self.arrays) == len(arrays) and all(reference() is array for reference, array in pairs)
        return same and self.values.parameter == name


class Refusal(NamedTuple):
    """Returns the error to raise when a script reads parameters (`read`) or calls the model (`call`) where neither has
    gradients, or disables the adapter (`base`); None allows that."""

    read: Callable[[], Exception]
    call: Callable[[], Exception]
    base: Callable[[], Exception] | None


class Weights:
    """The arrays of a model, and what is known about each of its parameters.

    Parameters keep the weights and not the model: a script that holds a parameter does not keep the model, and there is
    no reference cycle that would delay freeing the arrays.

    Attributes:
        params, frozen, backend, frozen_names, read: as on the model.
        at_gradients: whether a hook runs in which torch has gradients, such as on_pre_optimizer_step.
        refusal: set while a script computes its own loss.
    """

    def __init__(self, params: dict[str, jax.Array], frozen: dict[str, Any], backend: Backend):
        self.params, self.frozen, self.backend = params, frozen, backend
        self.frozen_names: frozenset[str] | set[str] = frozenset()
        self.read: Callable[[jax.Array], Any] | None = None
        self.at_gradients, self.refusal = False, None
        self._shapes: dict[str, TensorLikeArray] = {}  # arrays without memory
        self._last_read: _Reading | None = None
        self._kept: dict[str, _Reading] = {}

    def __getstate__(self) -> dict[str, Any]:
        return vars(self) | {"_shapes": {}, "_last_read": None, "_kept": {}}

    @property
    def arrays(self) -> dict[str, Any]:
        return self.frozen | self.params

    def readable(self, arrays: dict[str, Any]) -> dict[str, Any]:
        """Arrays that NumPy can read; reading one is a collective operation if several processes hold it."""
        return arrays if self.read is None else {path: self.read(array) for path, array in arrays.items()}

    def read_values(
        self, names: Collection[str] | None = None, *, keep: bool = False
    ) -> Iterator[tuple[str, TensorLikeArray]]:
        """Yield the name and the values of each parameter and buffer, or of those in `names`.

        Args:
            keep: whether to keep values that no process can read without the others, so that a single one can use them.
        """
        if self.refusal is not None:
            raise self.refusal.read()
        arrays = self.arrays
        references = [weakref.ref(array) for array in arrays.values()]
        keep = keep and self.read is not None and any(map(spans_hosts, arrays.values()))
        for name, read in self.backend.named(self.readable(arrays), names):
            values = _read_only(read, name)
            self._shapes[name] = np.broadcast_to(np.zeros((), values.dtype), values.shape).view(TensorLikeArray)
            self._last_read = _Reading(references, values)
            if keep:
                self._kept[name] = self._last_read
            yield name, values

    def values_of(self, name: str) -> TensorLikeArray:
        """The current values: those that were kept or read last, if still current; otherwise read from the device."""
        for reading in (self._kept.get(name), self._last_read):
            if self.refusal is None and reading is not None and reading.is_current(name, self.arrays):
                return reading.values
        return next(values for _, values in self.read_values([name]))

    def unshared(self, name: str) -> TensorLikeArray:
        """Like `values_of`, in memory that no later call returns, since a script's torch code may write into it."""
        values = self.values_of(name)
        if name in self._kept and values is self._kept[name].values:
            return _read_only(values, name)
        self.forget_last_read()
        return values

    def forget_last_read(self) -> None:
        self._last_read = None

    def shape_of(self, name: str) -> TensorLikeArray | None:
        """An array with the shape and the dtype of a parameter, but without memory; None if it was never read."""
        return self._shapes.get(name)

    def forget_shapes(self) -> None:
        self._shapes.clear()

    def names(self) -> list[str]:
        return list(self.backend.locations(self.arrays))

    def names_in(self, module: str, *, twice: bool = False) -> dict[str, str]:
        """The names of parameters and buffers relative to a module -> their full names. A tied parameter is also in its
        second module. If `twice`, a module that contains both of its names has both."""
        start = f"{module}." if module else ""
        names = {name.removeprefix(start): name for name in self.names() if name.startswith(start)}
        tied = {alias: name for alias, name in self.backend.tied.items() if alias.startswith(start)}
        again = {alias: name for alias, name in tied.items() if twice or name not in names.values()}
        return names | {alias.removeprefix(start): name for alias, name in again.items()}

    def buffers(self) -> set[str]:
        """Names of the arrays that are saved with the parameters but not trained."""
        if not self.backend.buffers:
            return set()
        located = self.backend.locations(self.params)
        buffers = self.backend.buffers  # frozen parameters of a model with an adapter have no places
        return {name for name, places in located.items() if places and all(path in buffers for path, _ in places)}

    def is_trained(self, name: str) -> bool:
        return name not in self.frozen_names and self.backend.is_trained(name)

    def set_trainable(self, *names: str, trainable: bool) -> None:
        """As `PreTrainedModel.set_trainable`."""
        changed = [name for name in names if self.is_trained(name) != trainable]
        thaws = trainable and self.frozen_names.issuperset(changed)  # an adapter loaded without is_trainable
        if changed and not (self.backend.can_freeze or thaws):
            raise ValueError(
                f"{changed[0]}: requires_grad cannot be set to {trainable} on a model with an adapter. Use "
                "target_modules, layers_to_transform and modules_to_save of LoraConfig to choose what is trained."
            )
        if self.backend.can_freeze or thaws:
            self.frozen_names = self.frozen_names - set(names) if trainable else self.frozen_names | set(names)


def of_weights(name: str) -> property:
    """A property of a model that gets and sets an attribute of its weights."""

    def get(model: Any) -> Any:
        return getattr(model.weights, name)

    def set_(model: Any, value: Any) -> None:
        setattr(model.weights, name, value)

    return property(get, set_)


# Parameters


def _with_values(arguments: Any) -> Any:
    return replaced(arguments, Parameter, lambda parameter: parameter._values)


def _of_values(name: str) -> Callable:
    return lambda parameter, *arguments: getattr(parameter._values, name)(*_with_values(arguments))


_BINARY = "add sub mul truediv floordiv mod pow matmul and or xor".split()
_DELEGATED = [
    f"__{name}__"
    for name in (
        *_BINARY, *(f"r{name}" for name in _BINARY), *(f"i{name}" for name in _BINARY), "neg", "pos", "abs", "invert",
        "lt", "le", "eq", "ne", "gt", "ge", "getitem", "setitem", "len", "iter", "contains", "bool", "float", "int",
        "repr", "format",
    )
]  # fmt: skip
_GRADIENTS = re.compile("backward$|register_.*hook$|retain_grad$")


def _without_gradient(parameter: str, name: str) -> AttributeError:
    return AttributeError(
        f"{parameter} has no {name}: gradients stay within the compiled step. grad_norm is logged; to change "
        "gradients, return an optax transformation from create_optimizer."
    )


# Known without reading the values
_SHAPES = {"shape", "ndim", "nbytes", "itemsize", "numel", "nelement", "dim", "element_size", "device",
           "is_floating_point", "is_leaf", "is_cuda", "grad_fn"}  # fmt: skip


_count_as_tensors: ContextVar[bool] = ContextVar("count_as_tensors", default=False)


@contextlib.contextmanager
def counting_as_tensors() -> Iterator[None]:
    """A context in which torch optimizers can be made for parameters, if torch is imported."""
    before = _count_as_tensors.set("torch" in sys.modules)
    try:
        yield
    finally:
        _count_as_tensors.reset(before)


class _RelatedToTensors(type):
    """Makes tensors instances of `Parameter`: torch.testing.assert_close only compares objects if one is an instance of
    the other's class. `issubclass` is unchanged, because torch would otherwise let tensors handle functions of
    parameters."""

    def __instancecheck__(cls, value: Any) -> bool:
        return super().__instancecheck__(value) or is_torch(value)


class Parameter(metaclass=_RelatedToTensors):
    """A parameter of a model. It has the methods of its values: a torch tensor's if torch is imported, otherwise those
    of `TensorLikeArray`.

    A model has one object per parameter, so that scripts can compare parameters by `id` or `is`, as in torch. It reads
    the model's current values when they are needed. `requires_grad` reads and sets whether `train()` updates it.
    """

    def __init__(self, weights: Weights, name: str):
        self._weights, self._name = weights, name

    @property
    def __class__(self) -> type:
        """torch's class where a script makes an optimizer, which only takes its tensors."""
        return sys.modules["torch"].nn.Parameter if _count_as_tensors.get() else Parameter

    def detach(self) -> Any:
        """The current values, read-only."""
        return for_scripts(self._weights.unshared(self._name))

    @property
    def _values(self) -> Any:
        """The current values for a single operation, without reading them from the device twice in a row."""
        return for_scripts(self._weights.values_of(self._name))

    @property
    def data(self) -> Any:
        """The values, as torch's `parameter.data`. Setting equal values in another dtype is a no-op, because weights
        are float32 while they train.

        Raises:
            ValueError: other values are set.
        """
        return self.detach()

    @data.setter
    def data(self, values: Any) -> None:
        new, current = as_array(values.detach().cpu()) if is_torch(values) else np.asarray(values), np.asarray(self)
        if not np.array_equal(new.astype(np.float32), current.astype(np.float32)):
            if new.shape == current.shape and np.array_equal(new, current.astype(new.dtype)):
                raise ValueError(
                    f"{self._name or 'A parameter'} was cast to {new.dtype.name}, which rounds it, and weights are "
                    "float32 while they train. Leave the cast out."
                )
            raise ValueError(
                f"Cannot set other values for {self._name or 'a parameter'}: these are a copy. Change model.params, or "
                "call model.load_state_dict({name: values}, strict=False)."
            )

    @property
    def requires_grad(self) -> bool:
        return self._weights.is_trained(self._name)

    @requires_grad.setter
    def requires_grad(self, value: bool) -> None:
        self._weights.set_trainable(self._name, trainable=value)

    def requires_grad_(self, requires_grad: bool = True) -> Parameter:
        self.requires_grad = requires_grad
        return self

    @property
    def grad(self) -> None:
        """None, as in torch between steps.

        Raises:
            AttributeError: it is read in a hook where torch has gradients. Ours stay within the compiled step.
        """
        if self.requires_grad and self._weights.at_gradients:
            raise _without_gradient(self._name, "grad")

    @property
    def dtype(self) -> Any:
        """torch's dtype if torch is imported, as scripts compare it with `torch.float32`; otherwise NumPy's."""
        return self._shape_only.dtype

    @property
    def _shape_only(self) -> Any:
        """An object with the shape and dtype of the values. If these are known, nothing is read."""
        struct = self._weights.shape_of(self._name)
        if struct is None:
            return self._values
        return without_memory(struct.shape, struct.dtype.name) if "torch" in sys.modules else struct

    @property
    def size(self) -> int:
        return Size.of(self.shape)

    def numpy(self) -> np.ndarray:
        return np.asarray(self._values)

    def data_ptr(self) -> int:
        """A number that no other parameter has, for scripts that count shared ones once."""
        return id(self)

    def __getattr__(self, name: str) -> Any:
        if name.startswith("_") or name == "grad":  # whose getter raised: it does again
            return object.__getattribute__(self, name)
        if _GRADIENTS.match(name):
            raise _without_gradient(self._name, name)
        return getattr(self._shape_only if name in _SHAPES else self.detach(), name)

    def __array__(self, dtype: Any = None, copy: bool | None = None) -> np.ndarray:
        return np.array(np.asarray(self._values), dtype, copy=copy)

    def __array_ufunc__(self, ufunc: np.ufunc, method: str, *inputs: Any, out: tuple = (), **kwargs: Any) -> Any:
        if any(type(array) is Parameter for array in out):
            raise refused_write(self._name)
        kwargs |= {"out": out} if out else {}
        return on_arrays(getattr(ufunc, method), Parameter, inputs, kwargs)

    def __array_function__(self, function: Callable, types: Any, args: tuple, kwargs: dict[str, Any]) -> Any:
        return on_arrays(function, Parameter, args, kwargs)

    @classmethod
    def __torch_function__(
        cls, function: Callable, types: tuple[type, ...], args: tuple = (), kwargs: dict[str, Any] | None = None
    ) -> Any:
        """Let torch functions such as `torch.equal(parameter, other)` work on the values of parameters."""
        return function(*as_tensors(_with_values(args)), **as_tensors(_with_values(kwargs or {})))

    def __jax_array__(self) -> jax.Array:
        return jnp.asarray(np.asarray(self))

    def __deepcopy__(self, memo: Any) -> Any:
        """Copy the values."""
        return self.clone()

    def __reduce_ex__(self, protocol: Any) -> Any:
        return self._values.__reduce_ex__(protocol)


for _name in _DELEGATED:
    setattr(Parameter, _name, _of_values(_name))
_register_with_jax(Parameter)


# Modules


def owners(names: Collection[str], tied: Collection[str]) -> list[str]:
    """The names of the modules that contain parameters, in torch's order: "" for the model itself, then others."""
    parts = (name.split(".")[:-1] for name in (*names, *tied))
    return list(dict.fromkeys(".".join(owner[:at]) for owner in parts for at in range(len(owner) + 1)))


_TABLE = re.compile(r"^(?!.*\.lora_).*\.weight$")


# What to write instead of a method of a torch module
_INSTEAD = {
    "register_.*hook": "JAX runs a step as one compiled program, which calls no modules. Call the model to read its "
    "outputs, override compute_loss of the trainer, or return an optax transformation from create_optimizer to "
    "change gradients",
    "(un)?merge_adapter|unload": "merge_and_unload() returns the merged model and get_base_model() the model without "
    "its adapter; both leave this one as it is",
    "(en|dis)able_adapters?(_layers)?": "Use `with model.disable_adapter():`",
    "(add|load|delete)_adapters?": "A model has one adapter. Pass peft_config to the trainer to create one, or "
    "load its folder with AutoPeftModelForCausalLM.from_pretrained",
    ".*": "Call the whole model, or read its parameters. For what only torch can do, save it with save_pretrained and "
    "load it with transformers",
}


def _fixed(value: Any) -> Any:
    """A read-only version of a torch module's setting: writing into it would not change the model."""
    if isinstance(value, dict):
        return MappingProxyType({name: _fixed(inner) for name, inner in value.items()})
    if isinstance(value, list | set):
        return tuple(value) if isinstance(value, list) else frozenset(value)
    return value


class ModuleApi:
    """The methods of a torch module, for a model and for its modules.

    Attributes:
        _whole: the model, which knows the names of all parameters and modules.
        _module: the module's name in the model; "" for the model itself.
    """

    _whole: Any
    _module: str

    def _names(self, *, twice: bool = False) -> dict[str, str]:
        """The names of parameters and buffers in this module -> their names in the model, as `Weights.names_in`."""
        return self._whole.weights.names_in(self._module, twice=twice)

    def named_parameters(
        self, prefix: str = "", recurse: bool = True, remove_duplicate: bool = True
    ) -> Iterator[tuple[str, Parameter]]:
        """Yield each parameter with its name in transformers. Its values are the current ones, but cannot be written;
        to change the model, call `load_state_dict` or change `params`.

        With an adapter, names are PEFT's: the base model's parameters come first, then the trained ones. Fully trained
        parameters appear only once, whereas PEFT also keeps the original.

        Args:
            prefix: put before each name, with a dot.
            recurse: whether to include the parameters of the modules in this one.
            remove_duplicate: whether to leave out the second names of tied parameters.
        """
        start, buffers = f"{prefix}." if prefix else "", self._whole.weights.buffers()

        def listed(*, twice: bool) -> list[tuple[str, str]]:
            names = self._names(twice=twice).items()
            return [(name, full) for name, full in names if full not in buffers and (recurse or "." not in name)]

        first = {full: name for name, full in listed(twice=False)}
        yield from ((start + first[full], parameter) for full, parameter in self._whole._named(first))
        if not remove_duplicate:
            again = [(name, full) for name, full in listed(twice=True) if name != first[full]]
            yield from ((start + name, self._whole.get_parameter(full)) for name, full in again)

    @property
    def _parameters(self) -> dict[str, Parameter | None]:
        """Read by transformers' get_parameter_names."""
        parameters, module = dict(self.named_parameters(recurse=False)), self._in_torch
        return parameters if module is None else {name: parameters.get(name) for name in module._parameters}

    def parameters(self, recurse: bool = True) -> Iterator[Parameter]:
        return (parameter for _, parameter in self.named_parameters(recurse=recurse))

    def named_modules(self, memo: Any = None, prefix: str = "") -> Iterator[tuple[str, Any]]:
        """Yield this module and all modules in it, with their names in transformers, or in PEFT with an adapter.

        If torch is imported, `isinstance` treats each as an instance of its class there. Otherwise modules without
        parameters, such as activations, are left out.
        """
        model, start = self._whole, f"{self._module}." if self._module else ""
        inside = (name for name in model._torch_modules if name.startswith(start) and name != "")
        yield prefix, self
        for name in inside:
            yield ".".join(filter(None, (prefix, name.removeprefix(start)))), model._module_named(name)

    def modules(self) -> Iterator[Any]:
        return (module for _, module in self.named_modules())

    def named_children(self) -> Iterator[tuple[str, Any]]:
        return ((name, module) for name, module in self.named_modules() if name and "." not in name)

    def children(self) -> Iterator[Any]:
        return (module for _, module in self.named_children())

    def named_buffers(self, prefix: str = "", recurse: bool = True) -> Iterator[tuple[str, Parameter]]:
        """Yield what is saved with the parameters but not trained, with names in transformers. torch also lists what is
        not saved, such as the frequencies of rotary embeddings."""
        start = f"{prefix}." if prefix else ""
        buffers = self._whole.weights.buffers()
        tails = {full: name for name, full in self._names().items() if full in buffers and (recurse or "." not in name)}
        return ((start + tails[full], values) for full, values in self._whole._named(tails))

    def buffers(self, recurse: bool = True) -> Iterator[Parameter]:
        return (values for _, values in self.named_buffers(recurse=recurse))

    def apply(self, fn: Callable[[Any], Any]) -> Any:
        """Call a function with each module in this one, and then with this one, as in torch. It cannot write into
        parameters."""
        for module in self.children():
            module.apply(fn)
        fn(self)
        return self

    def state_dict(
        self, *, destination: dict[str, Any] | None = None, prefix: str = "", keep_vars: bool = False
    ) -> dict[str, Any]:
        """A copy of every parameter and buffer by its name; a tied one has both names, as in torch.

        Args:
            destination: a dict to put them into.
            prefix: put before each name.
            keep_vars: whether to return the parameters themselves.
        """
        state = {} if destination is None else destination
        state.update((prefix + name, values) for name, values in self._state(keep_vars).items())
        return state

    def requires_grad_(self, requires_grad: bool = True) -> Any:
        self._whole.set_trainable(*self._names().values(), trainable=requires_grad)
        return self

    def eval(self) -> Any:
        return self.train(False)

    def half(self) -> Any:
        return self.to("float16")

    def bfloat16(self) -> Any:
        return self.to("bfloat16")

    def float(self) -> Any:
        return self.to("float32")

    def double(self) -> Any:
        return self.to(np.float64)

    def zero_grad(self, set_to_none: bool = True) -> None:
        """Does nothing: no gradients are kept between steps."""

    def compile(self, *args: Any, **kwargs: Any) -> None:
        """Does nothing: JAX compiles each step."""

    def extra_repr(self) -> str:
        module = self._in_torch
        return "" if module is None else module.extra_repr()

    def __repr__(self) -> str:
        module, name = self._in_torch, self._module or self._whole.name_or_path
        return f"{name} ({type(self).__name__})" if module is None else repr(module)

    @property
    def _in_torch(self) -> Any:
        """The same module of a torch model without values, if torch is imported; otherwise None."""
        return self._whole._torch_modules.get(self._module)

    def _fact(self, name: str, error: AttributeError) -> Any:
        """A fact about this module that torch's module knows, such as `in_features`.

        Raises:
            AttributeError: `name` is a method or a tensor; or `error`, if torch's module does not have it either.
        """
        has_raised = any(name in vars(kind) for kind in type(self).__mro__)  # the getter of a property
        module = None if has_raised else self._in_torch
        instead = next(text for pattern, text in _INSTEAD.items() if re.fullmatch(pattern, name))
        refused = AttributeError(
            f"{name} of {self._module or self._whole.name_or_path} exists in torch only: this model computes with JAX. "
            f"{instead}."
        )
        if module is None and not has_raised and instead is not _INSTEAD[".*"]:
            raise refused
        try:
            value = getattr(module, name)
        except AttributeError:
            raise error from None
        if (inside := f"{self._module}.{name}".lstrip(".")) in self._whole._torch_modules:
            return self._whole._module_named(inside)
        if is_torch(value) or callable(value) and not isinstance(value, type):
            raise refused
        return _fixed(value)


class Submodule(ModuleApi):
    """A module of a model, such as `model.model` or `model.lm_head`, so that scripts can inspect or freeze it."""

    def __init__(self, model: Any, name: str):
        vars(self).update(_whole=model, _module=name)

    @property
    def __class__(self) -> type:
        """The module's class in transformers or PEFT if torch is imported, for `isinstance`."""
        module = self._in_torch
        return type(self) if module is None else type(module)

    def __call__(self, *args: Any, **kwargs: Any) -> Any:
        raise TypeError(
            f"{self._module} cannot be called: JAX computes the whole model at once. Call the model, as "
            "model(input_ids).logits, or compute with the parameters in model.params."
        )

    def __setattr__(self, name: str, value: Any) -> None:
        raise AttributeError(
            f"{name} cannot be set on {self._module}: the model computes with JAX modules, which would not change. Set "
            "it on the torch model before the trainer is made, or in model.config before the weights are loaded."
        )

    def to(self, *args: Any, **kwargs: Any) -> Submodule:
        """Return the module. A device has no effect, nor has float32, in which weights train.

        Raises:
            ValueError: another dtype.
        """
        for name in map(given_dtype, (*args, *kwargs.values())):
            if name not in (None, "float32"):
                raise ValueError(
                    f"{self._module}.to({name}): weights train in float32, and bf16=True in the config computes in "
                    "bfloat16. Leave out the conversion."
                )
        return self

    cpu = cuda = type = to

    def train(self, mode: bool = True) -> Submodule:
        """Does nothing: like transformers' Trainer, each step trains and each evaluation evaluates the whole model."""
        return self

    def _state(self, keep_vars: bool) -> dict[str, Any]:
        state = self._whole.state_dict(keep_vars=keep_vars)
        return {name: state[full] for name, full in self._names(twice=True).items()}

    def load_state_dict(self, state_dict: Mapping[str, Any], strict: bool = True, assign: bool = False) -> Any:
        """As the model's, with names relative to this module."""
        return self._whole.load_values(self._module, self._names(twice=True), state_dict, strict)

    def __getattr__(self, name: str) -> Any:
        if name.startswith("_"):
            raise AttributeError(f"{type(self).__name__} has no attribute {name!r}")
        if name in ("config", "device", "dtype", "training"):
            return getattr(self._whole, name)
        try:
            return self._whole.submodule(f"{self._module}.{name}")
        except AttributeError as error:
            return self._fact(name, error)

    def __getitem__(self, number: int | slice | str) -> Any:
        if isinstance(number, str):
            return self._whole.submodule(f"{self._module}.{number}")
        selected = range(len(self))[number]
        if isinstance(selected, range):
            return [self[i] for i in selected]
        return self._whole.submodule(f"{self._module}.{selected}")

    def __bool__(self) -> bool:
        return True  # even if it contains no numbered modules

    def __len__(self) -> int:
        numbers = {name.partition(".")[0] for name in self._names()}
        return len([number for number in numbers if number.isdigit()])


def kind_of_layer(value: Any) -> str | None:
    """The kind of a module, as in `Backend.layers`; None if it is not the module of a model, or has no weights."""
    return value._whole.backend.layers.get(value._module) if issubclass(type(value), Submodule) else None


class EmbeddingModule(Submodule):
    """The token embedding or the language model head, possibly with PEFT's modules around it."""

    @property
    def weight(self) -> Parameter:
        """The table `[vocabulary, hidden]`."""
        return self._whole.get_parameter(next(name for name in self._names().values() if _TABLE.search(name)))

    @property
    def num_embeddings(self) -> int:
        return self.weight.shape[0]

    @property
    def embedding_dim(self) -> int:
        return self.weight.shape[1]
