"""Rules of devices, processes and memory; see `rules`."""

from __future__ import annotations

import os
from collections.abc import Mapping
from typing import Any

from trl_jax.core.arguments import deepspeed
from trl_jax.core.arguments.rules import HERE, a_dict
from trl_jax.core.arguments.values import as_dict, as_dict_or_file, as_words

DETERMINISTIC_FLAG = "--xla_gpu_deterministic_ops=true"
# accelerate's AcceleratorConfig: key -> its default, and what to do instead where another value would change the run.
ACCELERATOR = {
    "split_batches": (False, ""),
    "dispatch_batches": (None, ""),
    "even_batches": (True, ""),
    "use_seedable_sampler": (True, "the order of rows follows data_seed; leave it out."),
    "non_blocking": (False, ""),
    "gradient_accumulation_kwargs": (None, "set gradient_accumulation_steps."),
    "use_configured_state": (False, "there is no accelerate here to configure; leave it out."),
}
FSDP_WORDS = ("full_shard", "shard_grad_op", "no_shard", "hybrid_shard", "hybrid_shard_zero2", "offload", "auto_wrap")


def checkpointing_kwargs(name: str, value: Any, values: Mapping[str, Any]) -> str | None:
    if problem := a_dict(name, value, values):
        return problem
    unknown = [key for key in as_dict(name, value) if key != "use_reentrant"]
    if not unknown:
        return None
    return f"{name} holds {unknown}, which are not {HERE}: it takes use_reentrant only. Leave {unknown} out."


def offloading(name: str, value: Any, values: Mapping[str, Any]) -> str | None:
    if not value:
        return None
    if values["remat_policy"] not in ("auto", "nothing_saveable"):
        return f"{name}=True goes with remat_policy='auto' or 'nothing_saveable', not {values['remat_policy']!r}."
    if values["gradient_checkpointing"] or values["activation_checkpointing"]:
        return None
    return (
        f"{name}=True has the host keep what gradient_checkpointing=True keeps, and gradient_checkpointing is "
        f"{values['gradient_checkpointing']!r}. Set it to True."
    )


def deterministic(name: str, value: Any, values: Mapping[str, Any]) -> str | None:
    # A GPU is deterministic only if XLA was told so before it started; CPU and TPU always are.
    if not value or values["use_cpu"] or DETERMINISTIC_FLAG in os.environ.get("XLA_FLAGS", ""):
        return None
    return (
        f"{name}=True needs XLA_FLAGS={DETERMINISTIC_FLAG} in the environment before Python starts, and found"
        f" XLA_FLAGS={os.environ.get('XLA_FLAGS', '')!r}. Set it, or pass use_cpu=True."
    )


def accelerator(name: str, value: Any, values: Mapping[str, Any]) -> str | None:
    """Refuses keys that would change the run; how batches reach several processes means nothing to one."""
    try:
        config = as_dict_or_file(name, value)
    except ValueError as error:
        return str(error)
    for key, found in config.items():
        if key not in ACCELERATOR:
            return f"{name} holds {key!r}: wanted {', '.join(ACCELERATOR)}."
        default, instead = ACCELERATOR[key]
        if instead and found != default:
            return f"{name} sets {key}={found!r}, which is not {HERE}: {instead}"
    return None


def fsdp_words(name: str, value: Any, values: Mapping[str, Any]) -> str | None:
    unknown = [word for word in as_words(value) if word not in FSDP_WORDS]
    return f"{name} holds {unknown}: wanted some of {', '.join(FSDP_WORDS)}." if unknown else None


def deepspeed_config(name: str, value: Any, values: Mapping[str, Any]) -> str | None:
    if not value:
        return None
    try:
        return " ".join(deepspeed.conflicts(as_dict_or_file(name, value), values)) or None
    except ValueError as error:
        return str(error)
