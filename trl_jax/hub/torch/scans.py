"""Recurrences over tokens as one operation of an exported program.

transformers computes the state spaces of Mamba, where its kernels are not installed, by a loop over tokens, which torch
exports token by token; only for torch.compile it goes through torch's associative_scan. One of the files that may
import torch, inside functions.
"""

from __future__ import annotations

import contextlib
import importlib
import sys
from collections.abc import Callable, Iterator
from functools import cache
from typing import Any
from unittest.mock import patch

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
