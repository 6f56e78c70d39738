"""What a script gets from torch if torch has no GPU or is not installed. JAX chooses the device that it trains on.

Without a GPU, `.to("cuda")` stays on the CPU, and torch.cuda's queries return values that let the script continue.
Without torch, `import torch` gives a stand-in with what training scripts use besides tensors: dtypes, devices, seeds,
GPU queries, and classes to annotate with.

Only scripts get either. Libraries still see that torch has no GPU, or is not installed.
"""

from __future__ import annotations

import builtins
import contextlib
import functools
import importlib.util
import logging
import os
import re
import sys
from collections.abc import Callable, Iterator
from pathlib import Path
from types import ModuleType, SimpleNamespace
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from trl_jax.cli.reading import Module

logger = logging.getLogger(__name__)

_PACKAGE, _STANDARD = Path(__file__).parents[1], Path(os.__file__).parent
_CUDA = re.compile(r"cuda(:\d+)?")
_NO_OPS = ("empty_cache", "ipc_collect", "init", "manual_seed", "manual_seed_all", "reset_max_memory_allocated",
            "reset_max_memory_cached", "reset_peak_memory_stats", "set_device", "set_per_process_memory_fraction",
            "synchronize")  # fmt: skip
_ZERO_QUERIES = ("current_device", "max_memory_allocated", "max_memory_reserved", "memory_allocated", "memory_reserved")
_CAPABILITY = (8, 0)  # the first compute capability with bfloat16, which JAX supports on every device
_PLACEMENT = ("device_map", "max_memory", "offload_folder")
# The last three are options of phi-2's former remote code.
_KERNELS = {"use_flash_attention_2", "flash_attn", "flash_rotary", "fused_dense"}


# ---- torch without a GPU


def patch_torch(torch: ModuleType) -> None:
    """Patch torch to answer GPU calls from now on, unless it has a GPU."""
    if torch.cuda.is_available():
        return
    for name, value in _cuda_answers().items():
        setattr(torch.cuda, name, _patched_query(getattr(torch.cuda, name), value, quietly=name in _NO_OPS))
    torch.set_default_device = _ignore_cuda(torch.set_default_device)
    torch.Generator = _generator_on_cpu(torch.Generator)
    torch.load = _load_onto_cpu(torch.load)
    torch.cuda.device = _Device  # transformers' pipelines enter it too
    _on_cpu(torch).__enter__()  # for the rest of the process


def _cuda_answers() -> dict[str, Any]:
    """The function of torch.cuda -> what it returns to a script."""
    answers = {
        "is_available": True,
        "device_count": 1,
        "get_device_capability": _CAPABILITY,
        "get_device_name": "JAX's device",
        "get_arch_list": [f"sm_{_CAPABILITY[0]}{_CAPABILITY[1]}"],
        "get_device_properties": _device_properties(),
        "is_bf16_supported": True,
        "is_initialized": True,
        "mem_get_info": (_memory(), _memory()),
        "memory_summary": "",
    }
    return answers | dict.fromkeys(_NO_OPS) | dict.fromkeys(_ZERO_QUERIES, 0)


def patch_bf16(module: ModuleType) -> None:
    """Make transformers accept bf16=True when torch has no GPU: JAX supports bfloat16 on every device."""
    module.is_torch_bf16_gpu_available = lambda: True


def patch_tf32(module: ModuleType) -> None:
    """Make transformers accept tf32=True when torch has no GPU. JAX does the computing, so torch's precision is not
    changed."""
    module.is_torch_tf32_available = lambda: True
    module.enable_tf32 = lambda enable: None


def load_anywhere(kind: type) -> None:
    """Make `from_pretrained` and `from_config` of a class of transformers, and of subclasses that define their own,
    ignore GPU options when torch has no GPU."""
    for name in {"from_pretrained", "from_config"} & vars(kind).keys():
        setattr(kind, name, classmethod(_ignore_gpu_options(vars(kind)[name].__func__)))
    for derived in kind.__subclasses__():
        load_anywhere(derived)


def _ignore_gpu_options(original: Callable) -> Callable:
    @functools.wraps(original)
    def load(cls: type, *args: Any, **kwargs: Any) -> Any:
        return original(cls, *args, **_drop_gpu_options(translate_bit_flags(kwargs)))

    return load


def translate_bit_flags(kwargs: dict[str, Any]) -> dict[str, Any]:
    """The arguments with `load_in_4bit` and `load_in_8bit`, removed in transformers 5, as a `quantization_config`."""
    bits = {name: kwargs[name] for name in ("load_in_4bit", "load_in_8bit") if name in kwargs}
    if not bits:
        return kwargs
    from transformers import BitsAndBytesConfig

    remaining = {name: value for name, value in kwargs.items() if name not in bits}
    if any(bits.values()) and remaining.get("quantization_config") is None:
        remaining["quantization_config"] = BitsAndBytesConfig(**bits)
    logger.warning("%s of from_pretrained: use quantization_config=BitsAndBytesConfig(...).", " and ".join(bits))
    return remaining


def _drop_gpu_options(kwargs: dict[str, Any]) -> dict[str, Any]:
    """The arguments without device placement, FlashAttention and other GPU kernels."""
    import torch

    if torch.cuda.is_available():  # this call comes from a library file, so it is not patched
        return kwargs
    dropped = {name for name in _PLACEMENT if kwargs.get(name) not in (None, "cpu")} | _KERNELS
    dropped |= {name for name in ("attn_implementation", "_attn_implementation") if "flash" in str(kwargs.get(name))}
    if dropped & kwargs.keys():
        _warn()
    return {name: value for name, value in kwargs.items() if name not in dropped}


def _patched_query(original: Callable, value: Any, *, quietly: bool) -> Callable:
    """A function that returns `value` to a script, and calls `original` for everyone else."""

    @functools.wraps(original)
    def query(*args: Any, **kwargs: Any) -> Any:
        if not is_script_file(sys._getframe(1).f_code.co_filename):
            return original(*args, **kwargs)
        if not quietly:
            _warn()
        return value

    return query


def is_script_file(file: str) -> bool:
    """Whether a file belongs to the user's script, not to a library."""
    path = Path(file)
    return not ("site-packages" in file or path.is_relative_to(_PACKAGE) or path.is_relative_to(_STANDARD))


def _ignore_cuda(original: Callable) -> Callable:
    @functools.wraps(original)
    def set_default_device(device: Any) -> None:
        if _is_cuda(device):
            _warn()
        else:
            original(device)

    return set_default_device


def _generator_on_cpu(original: type) -> type:
    """torch.Generator, which creates a CPU generator when asked for one on a GPU."""

    class Called(type(original)):
        def __call__(cls, device: Any = "cpu") -> Any:
            return original(_replace_cuda(device))

        def __instancecheck__(cls, instance: Any) -> bool:
            return isinstance(instance, original)

    return Called(original.__name__, (original,), {"__module__": original.__module__})


class _Device(contextlib.nullcontext):
    """Stands in for torch.cuda.device, and does nothing."""


def _load_onto_cpu(original: Callable) -> Callable:
    @functools.wraps(original)
    def load(f: Any, map_location: Any = None, *args: Any, **kwargs: Any) -> Any:
        if isinstance(map_location, dict):
            map_location = {stored: _replace_cuda(device) for stored, device in map_location.items()}
        return original(f, _replace_cuda(map_location), *args, **kwargs)

    return load


def _replace_cuda(device: Any) -> Any:
    """The device, or the CPU instead of a GPU."""
    if not _is_cuda(device):
        return device
    _warn()
    return "cpu"


def _on_cpu(torch: ModuleType) -> Any:
    """A torch function mode that keeps tensors on the CPU when they are sent to a GPU."""
    from torch.overrides import TorchFunctionMode

    class OnCpu(TorchFunctionMode):
        def __torch_function__(self, function, types, args=(), kwargs=None):
            kwargs = {} if kwargs is None else kwargs
            if function in (torch.Tensor.cuda, torch.Tensor.pin_memory):
                _warn()
                return args[0]
            if "device" in kwargs:
                kwargs = kwargs | {"device": _replace_cuda(kwargs["device"])}
            if function is torch.Tensor.to and len(args) > 1:
                args = (args[0], _replace_cuda(args[1]), *args[2:])
            return function(*args, **kwargs)

    return OnCpu()


def _is_cuda(device: Any) -> bool:
    """Whether `device` is a GPU: "cuda:0", torch.device("cuda"), 0."""
    return type(device) is int or (device is not None and _CUDA.fullmatch(str(device)) is not None)


def _device_properties() -> SimpleNamespace:
    major, minor = _CAPABILITY
    return SimpleNamespace(
        name="JAX's device", total_memory=_memory(), major=major, minor=minor, multi_processor_count=os.cpu_count()
    )


def _memory() -> int:
    """Bytes of this machine's RAM."""
    return os.sysconf("SC_PAGE_SIZE") * os.sysconf("SC_PHYS_PAGES")


@functools.cache
def _warn() -> None:
    logger.warning(
        "torch has no GPU here: cuda, device_map and FlashAttention in the script are ignored or answered on the CPU, "
        "and JAX chooses the device that it trains on."
    )


# ---- Without torch

ADVICE = (
    "Without torch, scripts have its dtypes, devices, seeds and GPU queries, and its classes in annotations. Install "
    "torch, whose build for the CPU is enough, or write this in NumPy or jax.numpy."
)
_VERSION = "2.6.0+trl.jax"  # the oldest release that transformers takes; "+trl.jax" shows that it is not torch's own
_DTYPES = {
    "bfloat16": "bfloat16", "float16": "float16", "float32": "float32", "float64": "float64", "uint8": "uint8",
    "int8": "int8", "int16": "int16", "int32": "int32", "int64": "int64", "half": "float16", "float": "float32",
    "double": "float64", "short": "int16", "int": "int32", "long": "int64", "bool": "bool",
}  # fmt: skip
# Classes for annotations and isinstance. Only Tensor, nn.Module, nn.Linear and nn.Embedding have instances.
_CLASSES = (
    "Tensor", "FloatTensor", "LongTensor", "IntTensor", "BoolTensor", "Generator", "nn.Module", "nn.Linear",
    "nn.Embedding", "nn.Parameter", "nn.parameter.Parameter", "optim.Optimizer", "optim.lr_scheduler.LRScheduler",
    "optim.lr_scheduler._LRScheduler", "optim.lr_scheduler.LambdaLR", "utils.data.Dataset", "utils.data.DataLoader",
    "utils.data.IterableDataset", "utils.data.Sampler", "utils.data.SequentialSampler", "utils.data.RandomSampler",
)  # fmt: skip
# Modules that a script may import although nothing in them can be called.
_EMPTY = ("nn.functional", "nn.utils", "nn.utils.rnn", "nn.init", "optim", "utils", "utils.data", "multiprocessing")
_SETTINGS = {
    "backends.cuda.matmul": ("allow_tf32", "allow_fp16_reduced_precision_reduction",
                             "allow_bf16_reduced_precision_reduction"),
    "backends.cudnn": ("allow_tf32", "benchmark", "deterministic", "enabled"),
}  # fmt: skip
_CALLS_WITHOUT_EFFECT = (
    "set_float32_matmul_precision", "set_num_threads", "set_num_interop_threads", "use_deterministic_algorithms",
    "set_default_device", "set_printoptions", "backends.cuda.enable_flash_sdp", "backends.cuda.enable_math_sdp",
    "backends.cuda.enable_mem_efficient_sdp", "backends.cuda.enable_cudnn_sdp",
)  # fmt: skip
# Whether there is something that never is without torch.
_NEVER = (
    "backends.mps.is_available", "backends.mps.is_built", "xpu.is_available", "distributed.is_available",
    "distributed.is_initialized",
)  # fmt: skip


_installed: list[Callable] = []  # the import functions that `stand_in_for_torch` has put in place


def stand_in_for_torch() -> None:
    """Give scripts a stand-in for torch if it is not installed."""
    if importlib.util.find_spec("torch") is not None or builtins.__import__ in _installed:
        return
    original = builtins.__import__

    @functools.wraps(original)
    def import_for_scripts(
        name: str, globals: Any = None, locals: Any = None, fromlist: Any = (), level: int = 0
    ) -> ModuleType:
        frame = sys._getframe(1)
        file = frame.f_code.co_filename
        if level or name.partition(".")[0] != "torch" or not is_script_file(file) or frame.f_lineno in _guarded(file):
            return original(name, globals, locals, fromlist, level)
        module = stand_in(name)
        _warn_of_missing_names(file)
        for wanted in fromlist or ():
            if wanted != "*" and wanted not in vars(module):
                raise ImportError(f"torch is not installed: cannot import {wanted} from {name}. {ADVICE}", name=name)
        return module if fromlist else stand_in("torch")

    _installed.append(import_for_scripts)
    builtins.__import__ = import_for_scripts


def stand_in(name: str = "torch") -> ModuleType:
    """The stand-in for torch or one of its modules.

    Raises:
        ModuleNotFoundError: there is none for this module.
    """
    module = _stand_in()
    for part in name.split(".")[1:]:
        module = vars(module).get(part)
        if not isinstance(module, _Part):
            raise ModuleNotFoundError(f"torch is not installed: cannot import {name}. {ADVICE}", name=name)
    return module


def has_name(path: str) -> bool:
    """Whether the stand-in has what `path` names, such as "torch.cuda.is_available"."""
    value: Any = _stand_in()
    for part in path.split(".")[1:]:
        if not isinstance(value, _Part):
            return True  # an attribute of a dtype, a class or a returned value
        if part not in vars(value):
            return False
        value = vars(value)[part]
    return True


def names_to_miss(module: Module) -> Iterator[tuple[int, str]]:
    """The lines of a script, and what they use of torch that the stand-in lacks."""
    from trl_jax.cli.reading import Imported, bases, meanings

    def paths(node: Any, scope: Any) -> list[str]:
        return [meaning.path for meaning in meanings(node, scope) if isinstance(meaning, Imported)]

    inner = {id(attribute.node.value) for attribute in module.attributes}
    for attribute in module.attributes:
        if id(attribute.node) not in inner:
            for path in paths(attribute.node, attribute.scope):
                if path.startswith("torch.") and not has_name(path):
                    yield attribute.node.lineno, path
    made = [(call.node.lineno, path) for call in module.calls for path in paths(call.node.func, call.scope)]
    for definition in module.classes:
        made += [(definition.node.lineno, base.path) for base in bases(definition) if isinstance(base, Imported)]
    for line, path in made:
        if path.partition(".")[2] in _CLASSES and path.startswith("torch."):
            yield line, f"{path}(...)"


@functools.cache
def _read(file: str) -> Module | None:
    """The script; None if it cannot be read, such as a cell of a notebook."""
    from trl_jax.cli.reading import read

    try:
        return read(Path(file).read_text(encoding="utf-8"))
    except (OSError, SyntaxError, ValueError, RecursionError, MemoryError):
        return None


@functools.cache
def _guarded(file: str) -> frozenset[int]:
    """The lines of a script that import torch and are prepared for its absence, if it uses more than the stand-in."""
    script = _read(file)
    if script is None or not any(names_to_miss(script)):
        return frozenset()
    return frozenset(name.line for name in script.names if name.guarded and name.module.partition(".")[0] == "torch")


@functools.cache
def _warn_of_missing_names(file: str) -> None:
    script, lines = _read(file), {}
    for line, path in sorted(names_to_miss(script)) if script is not None else ():
        lines.setdefault(path, line)
    if lines:
        names = ", ".join(f"{path} (line {line})" for path, line in lines.items())
        logger.warning("torch is not installed, and %s uses %s, which raises an error there. %s", file, names, ADVICE)


class _Part(ModuleType):
    """The stand-in for torch, or for one of its modules."""

    def __getattr__(self, name: str) -> Any:
        if name.startswith("__"):
            raise AttributeError(name)
        raise AttributeError(f"torch is not installed: there is no {self.__name__}.{name}. {ADVICE}")

    def __reduce__(self) -> tuple:
        return stand_in, (self.__name__,)  # a function that a worker process of datasets.map gets refers to it


class _Dtype(str):
    """A dtype, such as torch.bfloat16: the name, which all of trl_jax accepts."""

    def __str__(self) -> str:
        return f"torch.{str.__str__(self)}"

    __repr__ = __str__


class _Place(str):
    """torch.device: its name, such as "cuda:0". It is also a context manager without effect."""

    def __new__(cls, device: Any, index: int | None = None) -> _Place:
        name = f"cuda:{device}" if isinstance(device, int) else str.__str__(device)
        return super().__new__(cls, name if index is None else f"{name}:{index}")

    @property
    def type(self) -> str:
        return self.partition(":")[0]

    @property
    def index(self) -> int | None:
        number = self.partition(":")[2]
        return int(number) if number else None

    def __enter__(self) -> _Place:
        return self

    def __exit__(self, *error: Any) -> None:
        pass


class _WithoutEffect(contextlib.ContextDecorator):
    """torch.no_grad, autocast and the like, as a context manager or decorator, with parentheses or without."""

    def __new__(cls, *args: Any, **options: Any) -> Any:
        return args[0] if args and callable(args[0]) else super().__new__(cls)

    def __init__(self, *args: Any, **options: Any):
        pass

    def __enter__(self) -> None:
        pass

    def __exit__(self, *error: Any) -> None:
        pass


# Class -> the kinds of layers that are its instances, as in `Backend.layers`.
_LAYERS = {
    "Linear": ("linear", "nf4", "fp4", "int8"), "Embedding": ("embedding",), "Linear4bit": ("nf4", "fp4"),
    "Linear8bitLt": ("int8",),
}  # fmt: skip


class _Named(type):
    """A class of torch that scripts only name, in annotations and isinstance."""

    def __new__(cls, name: str, bases: tuple, values: dict[str, Any]):
        if bases == (object,):  # dill, in a worker process of datasets.map
            return vars(stand_in(values["__module__"]))[name]
        if bases:
            base = bases[0]
            raise TypeError(f"torch is not installed: {name} cannot derive from {base.__module__}.{base.__qualname__}. "
                            f"{ADVICE}")  # fmt: skip
        return super().__new__(cls, name, bases, values)

    def __instancecheck__(cls, value: Any) -> bool:
        from trl_jax.hub.parameters import Submodule, kind_of_layer
        from trl_jax.hub.pretrained import PreTrainedModel
        from trl_jax.hub.torch_bridge import TensorLikeArray

        if cls.__qualname__ in _LAYERS:
            return kind_of_layer(value) in _LAYERS[cls.__qualname__]
        if cls.__qualname__ == "Module":
            return isinstance(value, PreTrainedModel | Submodule)
        return cls.__qualname__ == "Tensor" and isinstance(value, TensorLikeArray)

    def __call__(cls, *args: Any, **options: Any) -> Any:
        raise TypeError(f"torch is not installed: there is no {cls.__module__}.{cls.__qualname__}(...). {ADVICE}")


@functools.cache
def _stand_in() -> _Part:
    torch = _Part("torch")

    def put(path: str, value: Any) -> None:
        *parents, name = path.split(".")
        module = torch
        for parent in parents:
            module = vars(module).setdefault(parent, _Part(f"{module.__name__}.{parent}"))
        vars(module)[name] = value

    for path in _EMPTY:
        put(path, _Part(f"torch.{path}"))
    for path in _CLASSES:
        parents, _, name = path.rpartition(".")
        put(path, _Named(name, (), {"__module__": f"torch.{parents}".rstrip(".")}))
    for name, dtype in _DTYPES.items():
        put(name, _Dtype(dtype))
    for path, names in _SETTINGS.items():
        for name in names:
            put(f"{path}.{name}", False)
    for path in _CALLS_WITHOUT_EFFECT:
        put(path, lambda *args, **options: None)
    for path in _NEVER:
        put(path, lambda *args, **options: False)
    for name, value in _cuda_answers().items():
        put(f"cuda.{name}", _answer(value, quietly=name in _NO_OPS))
    for path in ("no_grad", "enable_grad", "inference_mode", "set_grad_enabled", "autocast", "cuda.amp.autocast",
                 "amp.autocast", "cuda.device"):  # fmt: skip
        put(path, _WithoutEffect)
    for path in ("manual_seed", "random.manual_seed"):
        put(path, _seed)
    for path, value in {"__version__": _VERSION, "version.cuda": None, "version.hip": None, "dtype": _Dtype,
                        "device": _Place}.items():  # fmt: skip
        put(path, value)
    return torch


@functools.cache
def quantized_layers() -> _Part:
    """The stand-in for bitsandbytes.nn: the classes of quantized layers, for isinstance."""
    module = _Part("bitsandbytes.nn")
    for name in ("Linear4bit", "Linear8bitLt"):
        vars(module)[name] = _Named(name, (), {"__module__": "bitsandbytes.nn"})
    return module


def _answer(value: Any, *, quietly: bool) -> Callable:
    def query(*args: Any, **options: Any) -> Any:
        if not quietly:
            _warn()
        return value

    return query


def _seed(seed: int) -> None:
    """torch.manual_seed: seed the stream from which trl_jax draws what torch's global generator would."""
    from trl_jax.core.torch_random import default_generator

    default_generator().manual_seed(seed)
