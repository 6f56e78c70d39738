"""Reads the sizes of the mesh's axes (data, fsdp, tensor, sequence) from the arguments.

They have accelerate's and DeepSpeed's names; `mesh_shape` is ours and beats them. A size of -1 takes the rest.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass, fields
from math import prod
from typing import Any

from trl_jax.core.arguments.device_rules import deepspeed_config, fsdp_words
from trl_jax.core.arguments.rules import HERE, Rule
from trl_jax.core.arguments.values import as_dict_or_file, as_words, show

AXES = ("data", "fsdp", "tensor", "sequence")
LEFT = -1  # all devices that the other axes leave
_HOSTS = "hosts"

# FSDP's strategy -> sizes, and whether optimizer state and gradients are divided though parameters are not.
_FSDP = {
    "full_shard": ({"fsdp": LEFT}, False),
    "shard_grad_op": ({"data": LEFT}, True),
    "no_shard": ({"data": LEFT}, False),
    "hybrid_shard": ({"data": _HOSTS, "fsdp": LEFT}, False),
    "hybrid_shard_zero2": ({"data": LEFT}, True),
}
_FSDP_INERT = frozenset(
    """
    version state_dict_type auto_wrap_policy transformer_layer_cls_to_wrap backward_prefetch forward_prefetch
    use_orig_params sync_module_states cpu_ram_efficient_loading limit_all_gathers xla xla_fsdp_v2 xla_fsdp_grad_ckpt
    xla_fsdp_settings offload_params mixed_precision_policy
    """.split()
)
_SIZES = {
    "dp_replicate_size": "data", "dp_shard_size": "fsdp", "tp_size": "tensor", "cp_size": "sequence",
    "sp_size": "sequence",
}  # fmt: skip


@dataclass(frozen=True)
class Parallel:
    """The mesh that the arguments ask for.

    Attributes:
        argument: the name of the one that asks for it, for errors.
        sizes: by axis; LEFT for all that is left, "hosts" for the number of hosts.
        moments: whether optimizer state and gradients are divided over `data` (ZeRO 1 and 2).
        whole_below: arrays of fewer numbers are not divided; None leaves that to the mesh.
        batch: examples of a whole step, where a DeepSpeed file has it.
    """

    argument: str
    sizes: Mapping[str, int | str]
    moments: bool = False
    whole_below: int | None = None
    batch: int | None = None


def asked(values: Mapping[str, Any]) -> Parallel:
    """Read the mesh from mesh_shape, else parallelism_config, else fsdp, else deepspeed, else divide the data over all.

    Raises:
        ValueError: a word, key or size at fault, by name.
    """
    base = of_fsdp(values["fsdp"], values["fsdp_config"]) or of_deepspeed(values["deepspeed"])
    base = base or Parallel("", {"data": LEFT})
    for found in (of_mesh_shape(values["mesh_shape"]), of_config(values["parallelism_config"])):
        if found is not None:
            return Parallel(found.argument, found.sizes, base.moments, base.whole_below, base.batch)
    return base


def of_mesh_shape(value: str | Mapping[str, int] | None) -> Parallel | None:
    """Read axes and sizes such as "data:2,fsdp:4"; one size may be -1."""
    if not value:
        return None
    parts = value.items() if isinstance(value, Mapping) else [part.partition(":")[::2] for part in value.split(",")]
    sizes: dict[str, int] = {}
    for axis, size in parts:
        axis = axis.strip()
        if axis not in AXES or axis in sizes or not str(size).strip().removeprefix("-").isdecimal():
            raise ValueError(
                f"{show('mesh_shape', value)}: {axis!r} is none of {', '.join(AXES)}, is there twice or has no size. "
                "Wanted axes and sizes, as in 'data:2,fsdp:4'."
            )
        sizes[axis] = int(size)
    if any(size < 1 and size != LEFT for size in sizes.values()) or list(sizes.values()).count(LEFT) > 1:
        raise ValueError(f"{show('mesh_shape', value)}: wanted sizes of at least 1, and -1 for one axis at most.")
    return Parallel("mesh_shape", sizes)


def of_config(value: Any) -> Parallel | None:
    """Read accelerate's ParallelismConfig, or a dict of its sizes; `data` takes the rest."""
    if not value:
        return None
    config = value if isinstance(value, Mapping) else vars(value)
    unknown = [key for key in config if key.endswith("_size") and key not in _SIZES]
    if unknown:
        raise ValueError(f"parallelism_config holds {unknown[0]!r}: wanted {', '.join(_SIZES)}.")
    sizes: dict[str, int | str] = {"data": LEFT}
    for key, axis in _SIZES.items():
        size = config.get(key) or 1
        if not isinstance(size, int) or size < 1:
            raise ValueError(f"parallelism_config sets {key}={size!r}: wanted a whole number of at least 1.")
        if size > 1:
            sizes[axis] = size * (sizes[axis] if isinstance(sizes.get(axis), int) and sizes[axis] > 1 else 1)
    return Parallel("parallelism_config", sizes) if len(sizes) > 1 or sizes["data"] != LEFT else None


def of_fsdp(value: Any, config: Any) -> Parallel | None:
    if not value:
        return None
    if problem := fsdp_words("fsdp", value, {}):
        raise ValueError(problem)
    known = as_dict_or_file("fsdp_config", config)
    known = {key.removeprefix("fsdp_"): found for key, found in known.items()}
    _check_fsdp_config(known)
    named = [word for word in as_words(value) if word in _FSDP]
    if "offload" in as_words(value) or known.get("cpu_offload"):
        raise ValueError(f"fsdp asks for offload, which is not {HERE}: leave it out; fsdp divides the memory.")
    if len(named) > 1:
        raise ValueError(f"{show('fsdp', value)} holds {' and '.join(named)}: wanted one of them.")
    word = named[0] if named else "full_shard"
    if word == "full_shard" and str(known.get("reshard_after_forward", True)).lower() in ("false", "shard_grad_op"):
        word = "shard_grad_op"
    sizes, moments = _FSDP[word]
    return Parallel("fsdp", sizes, moments, known.get("min_num_params") or None)


def _check_fsdp_config(config: Mapping[str, Any]) -> None:
    known = {"min_num_params", "reshard_after_forward", "activation_checkpointing", "cpu_offload", *_FSDP_INERT}
    unknown = sorted(set(config) - known)
    if unknown:
        raise ValueError(f"fsdp_config holds {unknown[0]!r}, which is not {HERE}. Leave it out.")


_SECTIONS = frozenset(
    """
    zero_optimization train_batch_size train_micro_batch_size_per_gpu gradient_accumulation_steps gradient_clipping
    bf16 fp16 optimizer scheduler
    """.split()
)


def of_deepspeed(value: Any) -> Parallel | None:
    """Read a DeepSpeed config: stage 0 divides nothing, 1 and 2 the optimizer's state, 3 the model too."""
    if not value:
        return None
    config = as_dict_or_file("deepspeed", value)
    zero = config.get("zero_optimization", {})
    stage = zero.get("stage", 0)
    if stage not in (0, 1, 2, 3):
        raise ValueError(f"deepspeed sets zero_optimization.stage to {stage!r}: wanted 0, 1, 2 or 3.")
    for key in ("offload_optimizer", "offload_param"):
        if zero.get(key, {}).get("device", "none") != "none":
            raise ValueError(f"deepspeed sets zero_optimization.{key}, which is not {HERE}. Leave it out.")
    batch = config.get("train_batch_size")
    sizes = {"fsdp": LEFT} if stage == 3 else {"data": LEFT}
    return Parallel("deepspeed", sizes, stage in (1, 2), batch=batch if isinstance(batch, int) else None)


def _rule(read: Callable[[Any, Mapping[str, Any]], Any]) -> Rule:
    """Make a rule of a reader that raises ValueError."""

    def rule(name: str, value: Any, values: Mapping[str, Any]) -> str | None:
        try:
            read(value, values)
        except ValueError as error:
            return str(error)
        return None

    return rule


mesh_shape = _rule(lambda value, _: of_mesh_shape(value))
parallelism_config = _rule(lambda value, _: of_config(value))


def fsdp(name: str, value: Any, values: Mapping[str, Any]) -> str | None:
    if value and values["deepspeed"]:
        return "fsdp and deepspeed are both set: each says how to divide a model. Leave one of them out."
    return _rule(lambda value, values: of_fsdp(value, values["fsdp_config"]))(name, value, values)


def deepspeed(name: str, value: Any, values: Mapping[str, Any]) -> str | None:
    return deepspeed_config(name, value, values) or _rule(lambda value, _: of_deepspeed(value))(name, value, values)


def deepspeed_note(name: str, value: Any, values: Mapping[str, Any]) -> str | None:
    others = sorted(set(as_dict_or_file("deepspeed", value)) - _SECTIONS)
    return f"deepspeed: {', '.join(others)} have no effect in trl_jax: XLA does without them." if others else None


def settled(parallel: Parallel, devices: int, hosts: int = 1) -> dict[str, int]:
    """The size of each axis on this many devices.

    Raises:
        ValueError: the sizes do not divide the devices.
    """
    sizes = {axis: hosts if size == _HOSTS else size for axis, size in parallel.sizes.items()}
    named = prod(size for size in sizes.values() if size != LEFT)
    left = LEFT in sizes.values()
    if devices % named or (not left and named != devices and (named > devices or hosts > 1)):
        asked_for = " x ".join(f"{axis} {size}" for axis, size in sizes.items() if size != LEFT)
        raise ValueError(
            f"{parallel.argument} asks for {asked_for} = {named} devices, and there are {devices}. Make the product "
            f"{devices}, or say 'data:-1' in mesh_shape for what is left."
        )
    return {axis: devices // named if size == LEFT else size for axis, size in sizes.items()}


def mesh_sizes(args: Any) -> dict[str, int]:
    """The size of each mesh axis that a config names or implies.

    Raises:
        ValueError: the sizes do not fit the number of devices, or the batch size of a DeepSpeed file.
    """
    wanted = asked({f.name: getattr(args, f.name) for f in fields(args)})
    devices = args.jax_devices()
    sizes = settled(wanted, len(devices), len({device.process_index for device in devices}))
    shards = sizes.get("data", 1) * sizes.get("fsdp", 1)
    examples = shards * args.per_device_train_batch_size * args.gradient_accumulation_steps
    if wanted.batch not in (None, examples):
        raise ValueError(
            f"deepspeed sets train_batch_size to {wanted.batch}, but {shards} devices x per_device_train_batch_size x "
            f'gradient_accumulation_steps = {examples}. Write "auto" in the file.'
        )
    return sizes
