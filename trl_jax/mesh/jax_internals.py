"""The only uses of `jax._src`, for three things that JAX has no public API for."""

from __future__ import annotations

import importlib
from typing import Any


def devices_have_started() -> bool:
    """Whether JAX has started its devices, and with them its threads. Asking does not start them."""
    from jax._src import xla_bridge

    return xla_bridge.backends_are_initialized()


def coordination_state() -> Any:
    """The process's number, the number of processes, and the client of JAX's coordination service, which are set once
    JAX connects the processes."""
    from jax._src import distributed

    return distributed.global_state


def packed_attention() -> Any:
    """The module that calls cuDNN's attention with several texts per row; None if this JAX does not have it."""
    try:
        return importlib.import_module("jax._src.cudnn.fused_attention_stablehlo")
    except ImportError:
        return None
