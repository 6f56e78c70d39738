"""Devices and processes from the arguments: mesh sizes, FSDP and DeepSpeed configs, launchers."""

from __future__ import annotations

import contextlib
import dataclasses
import os
import sys
from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass, fields
from math import prod
from typing import Any

from transformers.utils import strtobool

from trl_jax.config.rules import HERE, Rule, a_dict, as_dict, as_dict_or_file, as_words, must_be

# ----------------------------------------------------------------------------------------------------
# Sizes of the mesh axes


AXES = ("data", "fsdp", "tensor", "sequence")
LEFT = -1  # all remaining devices
_HOSTS = "hosts"

# FSDP's strategy -> sizes, and whether only optimizer state and gradients are sharded
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
    """The mesh that the arguments define.

    Attributes:
        argument: the name of the argument that defines it, for errors.
        sizes: by axis; LEFT for all remaining devices, "hosts" for the number of hosts.
        moments: whether optimizer state and gradients are sharded over `data` (ZeRO 1 and 2).
        whole_below: arrays with fewer elements are not sharded; None leaves that to the mesh.
        batch: examples in a whole step, if a DeepSpeed file sets it.
    """

    argument: str
    sizes: Mapping[str, int | str]
    moments: bool = False
    whole_below: int | None = None
    batch: int | None = None


def requested_mesh(values: Mapping[str, Any]) -> Parallel:
    """The mesh of mesh_shape, parallelism_config, fsdp or deepspeed, in this order; else data parallelism.

    Raises:
        ValueError: a wrong word, key or size; the error names it.
    """
    base = parse_fsdp(values["fsdp"], values["fsdp_config"]) or parse_deepspeed(values["deepspeed"])
    base = base or Parallel("", {"data": LEFT})
    for mesh in (parse_mesh_shape(values["mesh_shape"]), parse_parallelism_config(values["parallelism_config"])):
        if mesh is not None:
            return Parallel(mesh.argument, mesh.sizes, base.moments, base.whole_below, base.batch)
    return base


def parse_mesh_shape(value: str | Mapping[str, int] | None) -> Parallel | None:
    """Read axes and sizes such as "data:2,fsdp:4"; one size may be -1."""
    if not value:
        return None
    if not isinstance(value, str | Mapping):
        raise ValueError(must_be("mesh_shape", "axes and sizes such as 'data:2,fsdp:4', or None", value))
    parts = value.items() if isinstance(value, Mapping) else [part.partition(":")[::2] for part in value.split(",")]
    sizes: dict[str, int] = {}
    for axis, size in parts:
        axis = str(axis).strip()
        if axis not in AXES or axis in sizes or not str(size).strip().removeprefix("-").isdecimal():
            raise ValueError(
                f"mesh_shape must be axes and sizes such as 'data:2,fsdp:4', got {value!r}: {axis!r} is not one of "
                f"{', '.join(AXES)}, occurs twice or has no size."
            )
        sizes[axis] = int(size)
    if any(size < 1 and size != LEFT for size in sizes.values()) or list(sizes.values()).count(LEFT) > 1:
        raise ValueError(f"mesh_shape must have sizes of at least 1, and -1 for at most one axis, got {value!r}.")
    return Parallel("mesh_shape", sizes)


def parse_parallelism_config(value: Any) -> Parallel | None:
    """Read accelerate's ParallelismConfig, or a dict of its sizes; `data` takes the remaining devices."""
    if not value:
        return None
    if not isinstance(value, Mapping) and not dataclasses.is_dataclass(value):
        raise ValueError(must_be("parallelism_config", "a ParallelismConfig, a dict of its sizes or None", value))
    config = value if isinstance(value, Mapping) else vars(value)
    unknown = [key for key in config if key not in _SIZES] if isinstance(value, Mapping) else []
    if unknown:
        raise ValueError(f"The keys of parallelism_config must be among {', '.join(_SIZES)}, got {unknown[0]!r}.")
    sizes: dict[str, int | str] = {"data": LEFT}
    for key, axis in _SIZES.items():
        size = config.get(key) or 1
        if not isinstance(size, int) or size < 1:
            raise ValueError(f"{key} of parallelism_config must be a whole number of at least 1, got {size!r}.")
        if size > 1:
            sizes[axis] = size * (sizes[axis] if isinstance(sizes.get(axis), int) and sizes[axis] > 1 else 1)
    return Parallel("parallelism_config", sizes) if len(sizes) > 1 or sizes["data"] != LEFT else None


def parse_fsdp(value: Any, config: Any) -> Parallel | None:
    if not value:
        return None
    if problem := fsdp_words("fsdp", value, {}):
        raise ValueError(problem)
    options = as_dict_or_file("fsdp_config", config)
    options = {key.removeprefix("fsdp_"): option for key, option in options.items()}
    _check_fsdp_config(options)
    strategies = [word for word in as_words(value) if word in _FSDP]
    if "offload" in as_words(value) or options.get("cpu_offload"):
        raise ValueError(f"fsdp=offload is not {HERE}. Leave it out: fsdp already shards the memory over the devices.")
    if len(strategies) > 1:
        raise ValueError(f"fsdp must name one strategy, got {' and '.join(strategies)}.")
    strategy = strategies[0] if strategies else "full_shard"
    reshards = str(options.get("reshard_after_forward", True)).lower()
    if strategy == "full_shard" and reshards in ("false", "shard_grad_op"):
        strategy = "shard_grad_op"
    sizes, moments = _FSDP[strategy]
    return Parallel("fsdp", sizes, moments, options.get("min_num_params") or None)


def _check_fsdp_config(config: Mapping[str, Any]) -> None:
    valid = {"min_num_params", "reshard_after_forward", "activation_checkpointing", "cpu_offload", *_FSDP_INERT}
    unknown = sorted(set(config) - valid)
    if unknown:
        raise ValueError(f"fsdp_config has the key {unknown[0]!r}, which is not {HERE}. Leave it out.")


_SECTIONS = frozenset(
    """
    zero_optimization train_batch_size train_micro_batch_size_per_gpu gradient_accumulation_steps gradient_clipping
    bf16 fp16 optimizer scheduler
    """.split()
)


def parse_deepspeed(value: Any) -> Parallel | None:
    """Read a DeepSpeed config: stage 0 shards nothing, 1 and 2 the optimizer state, 3 also the model."""
    if not value:
        return None
    config = as_dict_or_file("deepspeed", value)
    zero = config.get("zero_optimization", {})
    stage = zero.get("stage", 0)
    if stage not in (0, 1, 2, 3):
        raise ValueError(f"zero_optimization.stage of deepspeed must be 0, 1, 2 or 3, got {stage!r}.")
    for key in ("offload_optimizer", "offload_param"):
        if zero.get(key, {}).get("device", "none") != "none":
            raise ValueError(f"deepspeed sets zero_optimization.{key}, which is not {HERE}. Leave it out.")
    batch = config.get("train_batch_size")
    sizes = {"fsdp": LEFT} if stage == 3 else {"data": LEFT}
    return Parallel("deepspeed", sizes, stage in (1, 2), batch=batch if isinstance(batch, int) else None)


def _rule(read: Callable[[Any, Mapping[str, Any]], Any]) -> Rule:
    """Make a rule from a reader that raises ValueError."""

    def rule(name: str, value: Any, values: Mapping[str, Any]) -> str | None:
        try:
            read(value, values)
        except ValueError as error:
            return str(error)
        return None

    return rule


mesh_shape = _rule(lambda value, _: parse_mesh_shape(value))
parallelism_config = _rule(lambda value, _: parse_parallelism_config(value))


def fsdp(name: str, value: Any, values: Mapping[str, Any]) -> str | None:
    if not isinstance(value, bool | str | list | tuple | None):
        return must_be(name, f"True, or some of {', '.join(FSDP_WORDS)}", value)
    if value and values["deepspeed"]:
        return "fsdp and deepspeed are both set, but each defines how to shard the model. Leave one of them out."
    return _rule(lambda value, values: parse_fsdp(value, values["fsdp_config"]))(name, value, values)


def deepspeed(name: str, value: Any, values: Mapping[str, Any]) -> str | None:
    return deepspeed_config(name, value, values) or _rule(lambda value, _: parse_deepspeed(value))(name, value, values)


def deepspeed_note(name: str, value: Any, values: Mapping[str, Any]) -> str | None:
    others = sorted(map(str, set(as_dict_or_file("deepspeed", value)) - _SECTIONS))
    return f"deepspeed: {', '.join(others)} have no effect in trl_jax." if others else None


def mesh_axis_sizes(parallel: Parallel, devices: int, hosts: int = 1) -> dict[str, int]:
    """The size of each axis on this many devices.

    Raises:
        ValueError: the sizes do not divide the devices.
    """
    sizes = {axis: hosts if size == _HOSTS else size for axis, size in parallel.sizes.items()}
    product = prod(size for size in sizes.values() if size != LEFT)
    has_remaining = LEFT in sizes.values()
    if devices % product or (not has_remaining and product != devices and (product > devices or hosts > 1)):
        requested = " x ".join(f"{axis} {size}" for axis, size in sizes.items() if size != LEFT)
        raise ValueError(
            f"{parallel.argument} asks for {requested} = {product} devices, but there are {devices}. Make the product "
            f"{devices}, or use 'data:-1' in mesh_shape for the remaining devices."
        )
    return {axis: devices // product if size == LEFT else size for axis, size in sizes.items()}


def mesh_sizes(args: Any) -> dict[str, int]:
    """The size of each mesh axis that a config names or implies.

    Raises:
        ValueError: the sizes do not fit the number of devices, or the batch size of a DeepSpeed file; or
            `accelerator_config` divides batches over the devices in another way.
    """
    parallel = requested_mesh({f.name: getattr(args, f.name) for f in fields(args)})
    devices = args.jax_devices()
    sizes = mesh_axis_sizes(parallel, len(devices), len({device.process_index for device in devices}))
    shards = sizes.get("data", 1) * sizes.get("fsdp", 1)
    examples = shards * args.per_device_train_batch_size * args.gradient_accumulation_steps
    if parallel.batch not in (None, examples):
        raise ValueError(
            f"deepspeed sets train_batch_size to {parallel.batch}, but {shards} devices x per_device_train_batch_size "
            f'x gradient_accumulation_steps = {examples}. Write "auto" in the file.'
        )
    if shards > 1:
        _check_division(args, shards)
    return sizes


def _check_division(args: Any, shards: int) -> None:
    """Refuse accelerate's options that change which rows a step on several devices has."""
    config, batch_size = accelerator_options(args), args.per_device_train_batch_size
    if config["split_batches"]:
        raise ValueError(
            f"accelerator_config sets split_batches=True, which would divide per_device_train_batch_size={batch_size} "
            f"by the {shards} devices that share the batch. It is not {HERE}: leave it out, and divide "
            "per_device_train_batch_size and per_device_eval_batch_size by the number of devices."
        )
    if not config["even_batches"] and not args.dataloader_drop_last:
        raise ValueError(
            f"accelerator_config sets even_batches=False, which is not {HERE} on {shards} devices: they fill an "
            "epoch's last batch with the epoch's first rows. Leave it out, or set dataloader_drop_last=True."
        )


# ----------------------------------------------------------------------------------------------------
# Rules for devices, processes and memory


DETERMINISTIC_FLAG = "--xla_gpu_deterministic_ops=true"
# accelerate's AcceleratorConfig: key -> its default, and what to do instead if another value would change the run
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
    return f"{name} has the keys {unknown}, which are not {HERE}: it takes use_reentrant only. Leave them out."


def offloading(name: str, value: Any, values: Mapping[str, Any]) -> str | None:
    if not value:
        return None
    if values["remat_policy"] not in ("auto", "nothing_saveable"):
        return f"{name}=True requires remat_policy='auto' or 'nothing_saveable', got {values['remat_policy']!r}."
    if values["gradient_checkpointing"] or values["activation_checkpointing"]:
        return None
    return (
        f"{name}=True requires gradient_checkpointing=True, whose saved activations it moves to the host, got "
        f"{values['gradient_checkpointing']!r}."
    )


def deterministic(name: str, value: Any, values: Mapping[str, Any]) -> str | None:
    # A GPU is deterministic only if this flag is set before XLA starts; CPU and TPU always are.
    if not value or values["use_cpu"] or DETERMINISTIC_FLAG in os.environ.get("XLA_FLAGS", ""):
        return None
    return (
        f"{name}=True requires XLA_FLAGS={DETERMINISTIC_FLAG} in the environment before Python starts, got"
        f" XLA_FLAGS={os.environ.get('XLA_FLAGS', '')!r}. Set it, or pass use_cpu=True."
    )


def accelerator(name: str, value: Any, values: Mapping[str, Any]) -> str | None:
    """Rejects keys that would change the run. Whether `split_batches` and `even_batches` do depends on the number of
    devices: see `mesh_sizes`."""
    try:
        config = as_dict_or_file(name, value)
    except ValueError as error:
        return str(error)
    for key, setting in config.items():
        if key not in ACCELERATOR:
            return f"The keys of {name} must be among {', '.join(ACCELERATOR)}, got {key!r}."
        default, advice = ACCELERATOR[key]
        if advice and setting != default:
            return f"{name} sets {key}={setting!r}, which is not {HERE}: {advice}"
    return None


def accelerator_options(args: Any) -> dict[str, Any]:
    """The values of `accelerator_config`, and defaults for those that it leaves out. transformers turns the argument
    into an AcceleratorConfig only if accelerate is installed."""
    defaults = {key: default for key, (default, _) in ACCELERATOR.items()}
    return defaults | as_dict_or_file("accelerator_config", args.accelerator_config)


def fsdp_words(name: str, value: Any, values: Mapping[str, Any]) -> str | None:
    unknown = [word for word in as_words(value) if word not in FSDP_WORDS]
    return must_be(name, f"some of {', '.join(FSDP_WORDS)}", unknown) if unknown else None


def deepspeed_config(name: str, value: Any, values: Mapping[str, Any]) -> str | None:
    if not value:
        return None
    try:
        return " ".join(conflicts(as_dict_or_file(name, value), values)) or None
    except ValueError as error:
        return str(error)


# ----------------------------------------------------------------------------------------------------
# Conflicts between a DeepSpeed config and the arguments


# Key in the file -> the argument with the same meaning
_SAME = {
    "train_micro_batch_size_per_gpu": "per_device_train_batch_size",
    "gradient_accumulation_steps": "gradient_accumulation_steps",
    "gradient_clipping": "max_grad_norm",
    "bf16.enabled": "bf16",
    "optimizer.params.lr": "learning_rate",
    "optimizer.params.weight_decay": "weight_decay",
    "optimizer.params.eps": "adam_epsilon",
}
_ADAM = ("Adam", "AdamW")


def conflicts(config: Mapping[str, Any], values: Mapping[str, Any]) -> list[str]:
    """A line for each setting in the file that differs from the arguments; "auto" means the argument's value."""
    differences = []
    for path, argument in _SAME.items():
        setting = _lookup(config, path)
        if setting not in (None, "auto") and setting != values[argument]:
            differences.append(
                f"deepspeed sets {path} to {setting!r}, but {argument} is {values[argument]!r}. Make them equal, or "
                f'write "auto" in the file.'
            )
    return differences + _other_conflicts(config, values)


def _other_conflicts(config: Mapping[str, Any], values: Mapping[str, Any]) -> list[str]:
    differences = []
    total = config.get("train_batch_size", "auto")
    product = values["per_device_train_batch_size"] * values["gradient_accumulation_steps"]
    if total != "auto" and (not isinstance(total, int) or total % product):
        differences.append(
            f"deepspeed sets train_batch_size to {total!r}, but it is devices x per_device_train_batch_size x "
            f'gradient_accumulation_steps, a multiple of {product}. Write "auto" in the file.'
        )
    if _lookup(config, "fp16.enabled") is True:
        differences.append("deepspeed sets fp16, but trl_jax has no loss scaling. Set bf16 in the file instead.")
    if _lookup(config, "optimizer.type") not in (None, "auto", *_ADAM):
        differences.append(
            f"deepspeed sets the optimizer {_lookup(config, 'optimizer.type')!r}. Leave it out and set optim instead."
        )
    if "scheduler" in config and _lookup(config, "scheduler.type") not in ("auto", "WarmupDecayLR"):
        differences.append(
            f"deepspeed sets the scheduler {_lookup(config, 'scheduler.type')!r}. Leave it out and set "
            "lr_scheduler_type instead."
        )
    return differences


def _lookup(config: Mapping[str, Any], path: str) -> Any:
    for key in path.split("."):
        if not isinstance(config, Mapping) or key not in config:
            return None
        config = config[key]
    return config


# ----------------------------------------------------------------------------------------------------
# Scripts started by torchrun, accelerate launch or deepspeed: their config and their processes


_RANKS = ("RANK", "LOCAL_RANK", "WORLD_SIZE", "LOCAL_WORLD_SIZE")
_SHARDING = ("deepspeed", "fsdp", "fsdp_config", "mesh_shape", "parallelism_config")
_LAUNCHER_SWITCHES = ("ACCELERATE_USE_DEEPSPEED", "ACCELERATE_USE_FSDP")
_STRATEGIES = {"1": "full_shard", "2": "shard_grad_op", "3": "no_shard", "4": "hybrid_shard", "5": "hybrid_shard_zero2"}


def launcher_sharding(values: Mapping[str, Any]) -> dict[str, Any]:
    """The sharding arguments of accelerate's launcher, for DeepSpeed or FSDP; {} if the script sets its own."""
    if any(values.get(name) for name in _SHARDING):
        return {}
    if _is_on("ACCELERATE_USE_DEEPSPEED"):
        file = os.environ.get("ACCELERATE_DEEPSPEED_CONFIG_FILE", "none")
        return {"deepspeed": _env_deepspeed_config() if file.lower() in ("none", "") else file}
    if _is_on("ACCELERATE_USE_FSDP"):
        strategy = os.environ.get("FSDP_SHARDING_STRATEGY", "none").lower()
        if strategy == "none":  # FSDP2
            strategy = "full_shard" if _is_on("FSDP_RESHARD_AFTER_FORWARD", "true") else "shard_grad_op"
        return {"fsdp": _STRATEGIES.get(strategy, strategy)}
    return {}


def launcher_dtype() -> str:
    """The dtype of accelerate's launcher, which applies if a script sets both bf16 and fp16 to False.

    Raises:
        ValueError: it is fp8.
    """
    precision = os.environ.get("ACCELERATE_MIXED_PRECISION", "no").lower()
    if precision == "fp8":
        raise ValueError(
            "ACCELERATE_MIXED_PRECISION=fp8 is not in this release of trl_jax: launch with --mixed_precision bf16."
        )
    return "bfloat16" if precision in ("bf16", "fp16") else "float32"


@contextlib.contextmanager
def hidden_launcher_switches() -> Iterator[None]:
    """Hide the launcher's settings within the block: transformers would import DeepSpeed because of them."""
    hidden = {name: os.environ.pop(name) for name in _LAUNCHER_SWITCHES if name in os.environ}
    try:
        yield
    finally:
        os.environ.update(hidden)


@contextlib.contextmanager
def without_launcher() -> Iterator[None]:
    """Hide the launcher within the block. With it, creating a config would end all processes but one."""
    hidden = {name: os.environ.pop(name) for name in (*_RANKS, *_LAUNCHER_SWITCHES) if name in os.environ}
    try:
        yield
    finally:
        os.environ.update(hidden)


def end_other_processes() -> int | None:
    """End this process unless it is the launcher's first, which then continues alone.

    Returns the number of processes, or None if no launcher has started several.

    Raises:
        ValueError: the processes are on several hosts, or communicate already.
        SystemExit: with code 0, in all processes but the first.
    """
    rank, local, world, local_world = (os.environ.get(name) for name in _RANKS)
    if int(world or 1) < 2:
        return None
    if local is None or local_world != world:
        raise ValueError(
            f"WORLD_SIZE={world} is set in the environment, so several processes were started, but one process drives "
            "all devices of a host. Start the script once per host, with python."
        )
    if _processes_communicate():
        raise ValueError(
            f"WORLD_SIZE={world} is set in the environment and the script has initialized torch.distributed, but one "
            "process drives all devices of a host. Start the script with python."
        )
    if int(rank or local) > 0:
        raise SystemExit(0)
    os.environ.update(dict(zip(_RANKS, ("0", "0", "1", "1"), strict=True)))
    return int(world)


def processes_warning(processes: int, devices: int, rows: int) -> str:
    """The warning about processes that have ended; `rows` is the number of rows per process in a step."""
    text = f"{processes} processes were started. One process drives all devices of a host, so the others have ended."
    if processes == devices:
        return text
    total = processes * rows
    suggestion = f"per_device_train_batch_size={total // devices}" if total % devices == 0 else "another batch size"
    return (
        f"{text} JAX has {devices} device{'s' if devices > 1 else ''}, so a step has {devices} x {rows} rows instead "
        f"of {processes} x {rows}. Set {suggestion} for the same batch."
    )


def _env_deepspeed_config() -> dict[str, Any]:
    """The DeepSpeed config that `accelerate config` wrote into the environment."""
    zero: dict[str, Any] = {"stage": int(os.environ.get("ACCELERATE_DEEPSPEED_ZERO_STAGE", "2"))}
    for key in ("optimizer", "param"):
        device = os.environ.get(f"ACCELERATE_DEEPSPEED_OFFLOAD_{key.upper()}_DEVICE", "none")
        if device != "none":
            zero[f"offload_{key}"] = {"device": device}
    return {"zero_optimization": zero}


def _is_on(name: str, default: str = "false") -> bool:
    return bool(strtobool(os.environ.get(name, default)))


def _processes_communicate() -> bool:
    distributed = sys.modules.get("torch.distributed")
    return distributed is not None and distributed.is_available() and distributed.is_initialized()
