"""Answer a script's GPU calls when torch has no GPU: `.to("cuda")` stays on the CPU, and torch.cuda's queries return
values that let the script continue. JAX chooses the device that it trains on.

Only scripts get these answers. Libraries still see that torch has no GPU; otherwise they would put tensors there.
"""

from __future__ import annotations

import contextlib
import functools
import logging
import os
import re
import sys
from collections.abc import Callable
from pathlib import Path
from types import ModuleType, SimpleNamespace
from typing import Any

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


def patch_torch(torch: ModuleType) -> None:
    """Patch torch to answer GPU calls from now on, unless it has a GPU."""
    if torch.cuda.is_available():
        return
    answers = {
        "get_device_capability": _CAPABILITY,
        "get_device_name": "JAX's device",
        "get_arch_list": [f"sm_{_CAPABILITY[0]}{_CAPABILITY[1]}"],
        "get_device_properties": _device_properties(),
        "is_bf16_supported": True,
        "is_initialized": True,
        "mem_get_info": (_memory(), _memory()),
        "memory_summary": "",
    }
    answers |= dict.fromkeys(_NO_OPS) | dict.fromkeys(_ZERO_QUERIES, 0)
    for name, value in (answers | {"is_available": True, "device_count": 1}).items():
        setattr(torch.cuda, name, _patched_query(getattr(torch.cuda, name), value, quietly=name in _NO_OPS))
    torch.set_default_device = _ignore_cuda(torch.set_default_device)
    torch.Generator = _generator_on_cpu(torch.Generator)
    torch.load = _load_onto_cpu(torch.load)
    torch.cuda.device = _Device  # transformers' pipelines enter it too
    _on_cpu(torch).__enter__()  # for the rest of the process


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
        return original(cls, *args, **_drop_gpu_options(_translate_bit_flags(kwargs)))

    return load


def _translate_bit_flags(kwargs: dict[str, Any]) -> dict[str, Any]:
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
