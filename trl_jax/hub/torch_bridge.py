"""Calls of torch, where it is installed: exporting models, reading pickles, tensors.

torch is imported inside functions only.
"""

from __future__ import annotations

import contextlib
import importlib
import importlib.util
import pickle
import sys
import zipfile
from collections.abc import Callable, Iterator
from functools import cache
from pathlib import Path
from typing import Any
from unittest.mock import patch

import ml_dtypes
import numpy as np

# ----------------------------------------------------------------------------------------------------
# The calls of torch, where it is installed, for transformers' own models and for pickled files.


PICKLED = "pytorch_model.bin"


def available() -> bool:
    return importlib.util.find_spec("torch") is not None


def _class_of(head: str) -> Any:
    """transformers' class of models with this head."""
    import transformers

    names = {"score": "AutoModelForSequenceClassification", "lm": "AutoModelForCausalLM"}
    return getattr(transformers, names[head])


def load_model(folder: Path, dtype: str, seed: int, config: Any = None, head: str = "score") -> Any:
    """The model with a head as TRL has it after `set_seed(seed)`: tensors that the checkpoint lacks are drawn in the
    same order. `config` is its config object; None reads the folder's."""
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
            raise _not_tensors(folder / PICKLED, error) from error
    fixed = {name for name, parameter in unloaded(model.config, head).named_parameters() if not parameter.requires_grad}
    for name, parameter in model.named_parameters():
        parameter.requires_grad_(name not in fixed)  # loading forgets it
    if model._can_set_experts_implementation():
        model.set_experts_implementation("grouped_mm")  # the one that does not copy an expert for every token
    return model


def unloaded(config: Any, head: str = "score") -> Any:
    """The model without memory for its parameters."""
    import torch

    with torch.device("meta"):
        return _class_of(head).from_config(config, trust_remote_code=False)


def empty(parameter: Any, dtype: str) -> None:
    """Give up a parameter's values: memory that is never written takes no space."""
    import torch

    parameter.data = torch.empty(parameter.shape, dtype=getattr(torch, dtype))


def members(module: Any, kind: str) -> set[int]:
    """The ids of the parameters in the module's parts of a kind of torch.nn."""
    import torch

    kinds = getattr(torch.nn, kind)
    return {id(parameter) for part in module.modules() if isinstance(part, kinds) for parameter in part.parameters()}


def as_dtype(values: Any, dtype: str) -> Any:
    """An array as torch's tensor of this dtype."""
    import torch

    return torch.from_numpy(np.array(values, np.float32)).to(getattr(torch, dtype))


def export(module: Any, rows: int, length: int, dtype: str, training: bool, head: str = "score") -> Any:
    """The module as torch.export has it, down to ATen operations, any number of rows and tokens if it can be."""
    import torch

    # Half precision as in TRL: torch's autocast decides operation by operation. It must be on around both steps.
    half = contextlib.nullcontext() if dtype == "float32" else torch.autocast("cpu", getattr(torch, dtype))
    example = torch.ones((2, rows, length), dtype=torch.int64)
    free = {"rows": {1: torch.export.Dim.AUTO, 2: torch.export.Dim.AUTO}}
    module.train(training)
    try:
        with half, scanned(module):
            exported = torch.export.export(of_rows(module, head), (example,), dynamic_shapes=free, strict=False)
            return exported.run_decompositions()
    except Exception as error:  # torch's tracer fails with errors of many types
        mode = " with dropout on (disable_dropout=True leaves it off)" if training else ""
        raise ValueError(
            f"model_type {module.config.model_type!r} cannot be exported{mode} for {rows} rows of {length} tokens; "
            f"torch.export says: {str(error).strip()[:400]}"
        ) from error
    finally:
        module.eval()


def of_rows(module: Any, head: str) -> Any:
    """The model as a module of one input, ids above mask."""
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
    """ "aten.add.Tensor", "operator.mul", "torch.sym_max"."""
    import torch

    target = node.target
    if isinstance(target, torch._ops.OpOverload):
        return str(target)
    module = target.__module__.removeprefix("_")
    return f"{module}.{target.__name__}"


def plain(value: Any) -> Any:
    """An argument of an operation without torch's classes."""
    import torch

    if isinstance(value, torch.fx.Node):
        from trl_jax.exported.aten import Ref

        return Ref(value.name)
    if isinstance(value, list | tuple):
        return tuple(plain(entry) for entry in value)
    return dtype_name(value) if isinstance(value, torch.dtype) else value


def recorded(value: Any) -> Any:
    """The dtype of a tensor, those of several, None for a number."""
    import torch

    if isinstance(value, list | tuple):
        return tuple(recorded(part) for part in value)
    return dtype_name(value.dtype) if isinstance(value, torch.Tensor) else None


def dtype_name(dtype: Any) -> str:
    return str(dtype).removeprefix("torch.")


def as_tensors(values: Any) -> Any:
    """Arrays as torch's tensors, in dicts, lists and tuples too; other values stay as they are."""
    if isinstance(values, dict):
        return {name: as_tensors(value) for name, value in values.items()}
    if isinstance(values, list | tuple):
        return type(values)(map(as_tensors, values))
    return _as_tensor(np.asarray(values)) if isinstance(values, np.ndarray) else values


def _as_tensor(values: np.ndarray) -> Any:
    import torch

    if values.dtype == ml_dtypes.bfloat16:
        return torch.from_numpy(values.view(np.int16)).view(torch.bfloat16)
    return torch.from_numpy(values)


def as_array(values: Any) -> np.ndarray:
    """A tensor as NumPy's array, in its own dtype."""
    import torch

    if values.dtype is torch.bfloat16:  # NumPy has no such dtype of its own
        return values.contiguous().view(torch.int16).numpy().view(ml_dtypes.bfloat16)
    return values.contiguous().numpy()


def unpickled(path: Path) -> dict[str, Any]:
    """The tensors of a file by name; nothing in it is run."""
    import torch

    try:
        content = torch.load(path, map_location="cpu", weights_only=True, mmap=zipfile.is_zipfile(path))
    except MemoryError:
        raise
    except Exception as error:  # from zip archives, pickles and torch's own checks alike
        raise _not_tensors(path, error) from error
    if not isinstance(content, dict) or not all(isinstance(value, torch.Tensor) for value in content.values()):
        raise ValueError(f"{path} holds a {type(content).__name__} that is not tensors by name: wanted a state dict.")
    return dict(content)


def _not_tensors(path: Path, error: Exception) -> ValueError:
    return ValueError(
        f"{path} is not a PyTorch file of nothing but tensors ({type(error).__name__}); nothing in it was run. "
        "Download it again, or get the checkpoint as safetensors."
    )


# ----------------------------------------------------------------------------------------------------
# Recurrences over tokens as one operation of an exported program.


_SCANS = "torch._higher_order_ops.associative_scan"


@contextlib.contextmanager
def scanned(module: Any) -> Iterator[None]:
    """While this lasts, the code of `module` that has an associative scan takes it, and it is one operation."""
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
    """torch's associative_scan, but for linear recurrences, which go to an operation of ours."""

    def scan(combine_fn: Callable, xs: Any, dim: int, reverse: bool = False, combine_mode: str = "pointwise") -> Any:
        if reverse or not _is_linear_recurrence(combine_fn):
            return original(combine_fn, xs, dim, reverse=reverse, combine_mode=combine_mode)
        decay, drive = xs
        return decay.cumprod(dim), _linear_recurrence()(decay, drive, dim)

    return scan


def _is_linear_recurrence(combine: Callable) -> bool:
    """Whether it joins two steps of h -> a h + b, tried on numbers."""
    try:
        return tuple(combine((2, 3), (5, 7))) == (10, 22) and tuple(combine((-3, 4), (11, 2))) == (-33, 46)
    except (TypeError, AttributeError):  # it takes nothing but tensors
        return False


@cache
def _linear_recurrence() -> Callable:
    """torch's name for `nn.aten.recurrences`' operation."""
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
