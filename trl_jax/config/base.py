"""BaseConfig: the arguments that all trainers share, and how each of them is handled."""

from __future__ import annotations

import contextlib
import copy
import inspect
import json
import operator
import os
import warnings
from dataclasses import asdict, dataclass, fields, is_dataclass
from enum import Enum
from functools import cache
from math import prod
from pathlib import Path
from types import NoneType
from typing import Any, ClassVar

import numpy as np
from transformers import TrainingArguments
from transformers.trainer_utils import SchedulerType
from transformers.training_args import ParallelMode, trainer_log_levels

from trl_jax.config import devices, optimizers, rules
from trl_jax.config.arguments import Handling, arg, declared, defaults_of, handled, redeclared, validate
from trl_jax.config.devices import (
    end_other_processes,
    hidden_launcher_switches,
    launcher_dtype,
    launcher_sharding,
    mesh_sizes,
    processes_warning,
)
from trl_jax.config.optimizers import OPTIMIZERS, SCHEDULES
from trl_jax.config.renamed import RENAMED, OldNames, current_name
from trl_jax.config.rules import as_bool, as_pad_multiple, bool_error, bool_fields
from trl_jax.config.shared import TextArguments
from trl_jax.core.secrets import as_token, learn, masked, scrubbed

# ----------------------------------------------------------------------------------------------------
# transformers' TrainingArguments without torch; devices and processes are JAX's


# transformers passes these to torch in __post_init__; INHERITED handles them instead.
TORCH_ONLY = {
    **dict.fromkeys(("torch_compile_backend", "torch_compile_mode", "tf32", "fsdp", "fsdp_config", "deepspeed")),
    "torch_compile": False,
    "parallelism_config": None,
}


class Device(str):
    """Replaces torch.device for scripts that read `args.device`. Reading `type` starts JAX's backend.

    As a string it is "cpu", so that torch code in a script stays on the CPU.
    """

    __slots__ = ("_platform",)

    def __new__(cls, platform: str | None = None):
        """`platform` is JAX's name of the platform, or None for JAX's default."""
        self = super().__new__(cls, "cpu")
        self._platform = platform
        return self

    def __getnewargs__(self) -> tuple[str | None]:
        return (self._platform,)

    @property
    def type(self) -> str:
        """cpu, tpu or cuda (torch's name for GPUs, with which scripts compare)."""
        platform = self._platform
        if platform is None:
            import jax

            platform = jax.default_backend()
        return "cuda" if platform == "gpu" else platform

    @property
    def index(self) -> int | None:
        return None if self.type == "cpu" else 0

    def __str__(self) -> str:
        return self.type if self.index is None else f"{self.type}:{self.index}"

    def __format__(self, spec: str) -> str:
        return format(str(self), spec)


class JaxArguments(TrainingArguments):
    """TrainingArguments whose construction does not use torch, with properties that describe JAX's devices."""

    def __post_init__(self):
        saved = {name: getattr(self, name) for name in TORCH_ONLY}
        for name, unset in TORCH_ONLY.items():
            setattr(self, name, unset)
        with hidden_launcher_switches():
            super().__post_init__()
        for name, value in saved.items():
            setattr(self, name, value)

    def _validate_args(self):
        # With torch, transformers checks for a GPU with bfloat16 unless use_cpu is set; without torch, it refuses the
        # schedule reduce_lr_on_plateau.
        use_cpu, schedule = self.use_cpu, self.lr_scheduler_type
        self.use_cpu, self.lr_scheduler_type = True, SchedulerType.LINEAR
        try:
            super()._validate_args()
        finally:
            self.use_cpu, self.lr_scheduler_type = use_cpu, schedule

    @property
    def device(self) -> Device:
        return Device("cpu" if self.use_cpu else None)

    @property
    def n_gpu(self) -> int:
        """1 on an accelerator, regardless of their number, as in each of torchrun's processes; else 0."""
        return 0 if self.device.type == "cpu" else 1

    @property
    def parallel_mode(self) -> ParallelMode:
        return ParallelMode.DISTRIBUTED if self.world_size > 1 else ParallelMode.NOT_PARALLEL

    @property
    def world_size(self) -> int:
        """Number of devices over all processes; TRL has one process per device. Reading it starts JAX."""
        return prod(mesh_sizes(self).values())

    @property
    def data_parallel_size(self) -> int:
        """Number of shards (data x fsdp) that have per_device_train_batch_size examples each."""
        sizes = mesh_sizes(self)
        return sizes.get("data", 1) * sizes.get("fsdp", 1)

    @property
    def process_index(self) -> int:
        import jax

        return jax.process_index() if jax.distributed.is_initialized() else 0

    @property
    def local_process_index(self) -> int:
        """Always 0: there is one process per host."""
        return 0

    @contextlib.contextmanager
    def main_process_first(self, local: bool = True, desc: str = "work"):
        """Run the block in the first process before the others, so that they find its results in a shared cache."""
        from trl_jax.mesh.processes import barrier

        if self.process_index:
            barrier(f"main_process_first: {desc}")
        yield
        if not self.process_index:
            barrier(f"main_process_first: {desc}")

    @property
    def distributed_state(self) -> Any:
        """The part of accelerate's PartialState that scripts use. Reading it starts JAX."""
        from trl_jax.mesh.processes import ProcessState

        return ProcessState(self)

    @property
    def should_log(self) -> bool:
        return self.process_index == 0

    @property
    def should_save(self) -> bool:
        return self.process_index == 0

    @property
    def train_batch_size(self) -> int:
        return self.per_device_train_batch_size

    @property
    def eval_batch_size(self) -> int:
        return self.per_device_eval_batch_size


# ----------------------------------------------------------------------------------------------------
# How each field of TrainingArguments is handled. Our own fields declare it with `arg`.


_NO_LIGER = "XLA compiles its own kernels; results are equal."
_AS_BF16 = "float16 runs as bfloat16, which needs no loss scaling. Use the bf16 argument instead."
_STRATEGIES = ("no", "steps", "epoch")
SAMPLING_STRATEGIES = ("random", "sequential", "group_by_length")

INHERITED: dict[str, Handling] = {
    # Output, duration, batches
    **handled("output_dir run_name", "native", rule=rules.path),
    **handled("max_steps", "native", rule=rules.bounded(rules.MOST_STEPS)),
    **handled("num_train_epochs", "native", rule=rules.epochs),
    **handled("per_device_train_batch_size per_device_eval_batch_size", "mapped",
              rule=rules.whole(1, most=rules.MOST_EXAMPLES)),
    **handled("gradient_accumulation_steps", "native", rule=rules.accumulation),
    **handled("auto_find_batch_size", "native",
              help="Lower the training batch size until a step fits into memory. Evaluation keeps its batch size."),
    # Optimizer, schedule and order of rows
    **handled("optim", "native", rule=optimizers.optimizer, note=optimizers.optimizer_note,
              supported=tuple(OPTIMIZERS)),
    **handled("optim_args", "native", rule=optimizers.optimizer_args,
              help="Options of the optimizer, such as 'momentum=0.9,nesterov=true' for sgd."),
    **handled("lr_scheduler_type", "native", rule=optimizers.scheduler, supported=tuple(SCHEDULES)),
    **handled("train_sampling_strategy", "native", rule=rules.one_of(*SAMPLING_STRATEGIES),
              supported=SAMPLING_STRATEGIES),
    **handled("learning_rate weight_decay adam_epsilon", "native", rule=rules.number(0, most=rules.MOST_FLOAT32)),
    **handled("adam_beta1 adam_beta2", "native", rule=optimizers.beta),
    **handled("max_grad_norm", "native", rule=rules.number(-rules.MOST_FLOAT32, optional=True)),
    **handled("warmup_steps", "native", rule=rules.bounded(rules.MOST_STEPS)),
    **handled("optim_target_modules", "refused", "it is for GaLore and APOLLO, which are not supported; leave it out."),
    **handled("average_tokens_across_devices", "silent", "losses divide by the examples or tokens of the whole step"),
    **handled("label_smoothing_factor", "warned", "this loss has no labels to smooth."),
    **handled("neftune_noise_alpha", "native", rule=rules.number(0, optional=True, most=rules.MOST_FLOAT32)),
    # Precision, memory, compilation
    **handled("fp16", "mapped", _AS_BF16, help="Same as bf16: float16 runs as bfloat16, which needs no loss scaling."),
    **handled("fp16_full_eval", "mapped", _AS_BF16, help="Same as bf16_full_eval."),
    **handled("bf16_full_eval", "mapped", help="Also cast the weights to bfloat16 for evaluation."),
    **handled("tf32", "mapped", help="Compute float32 matrix products in TensorFloat-32 on NVIDIA GPUs."),
    **handled("use_cpu", "mapped", help="Run on the CPU even if JAX has an accelerator."),
    **handled("activation_checkpointing", "mapped", help="transformers' newer name of gradient_checkpointing."),
    **handled("activation_checkpointing_kwargs", "mapped", rule=devices.checkpointing_kwargs,
              help="As a dict or JSON. Takes use_reentrant only, which has no effect; see remat_policy instead."),
    **handled("gradient_checkpointing_kwargs", "mapped", rule=devices.checkpointing_kwargs,
              help="Deprecated: use activation_checkpointing_kwargs."),
    **handled("torch_compile", "silent", "every step is compiled"),
    **handled("torch_compile_backend torch_compile_mode", "warned", "XLA compiles every step."),
    **handled("liger_kernel_config", "warned", _NO_LIGER),
    **handled("use_cache", "native", help="Value of use_cache in the saved config; training does not depend on it."),
    # Logging and tracking
    **handled("logging_strategy", "native", rule=rules.one_of(*_STRATEGIES)),
    **handled("log_level log_level_replica", "native", rule=rules.one_of(*trainer_log_levels)),
    **handled("logging_first_step", "native"),
    **handled("save_steps eval_delay", "native", rule=rules.bounded(rules.MOST_INTERVAL)),
    **handled("eval_steps", "native", rule=rules.bounded(rules.MOST_INTERVAL, optional=True)),
    **handled("disable_tqdm", "native"),
    **handled("report_to", "native", rule=rules.words),
    **handled("project", "native", rule=rules.text()),
    **handled("trackio_space_id trackio_bucket_id", "native", rule=rules.text(optional=True)),
    **handled("trackio_static_space_id", "native"),
    **handled("log_on_each_node", "silent", "one process logs"),
    **handled("logging_nan_inf_filter", "silent", "a NaN is always logged as it is"),
    **handled("include_num_input_tokens_seen", "native", rule=rules.tokens_seen),
    # Evaluation
    **handled("eval_strategy", "native", rule=rules.one_of(*_STRATEGIES)),
    **handled("eval_on_start prediction_loss_only", "native"),
    **handled("eval_use_gather_object eval_accumulation_steps", "silent", "each batch is moved to the host"),
    **handled("eval_do_concat_batches batch_eval_metrics", "native"),
    **handled("include_for_metrics", "native", rule=rules.metric_inputs),
    # Saving, the Hub, resuming
    **handled("save_strategy", "native", rule=rules.one_of(*_STRATEGIES, "best")),
    **handled("load_best_model_at_end greater_is_better", "native"),
    **handled("metric_for_best_model hub_model_id hub_revision", "native", rule=rules.text(optional=True)),
    **handled("save_total_limit", "native", rule=rules.whole(-1, optional=True)),
    **handled("save_only_model", "native"),
    **handled("save_on_each_node", "silent", "one process saves"),
    **handled("enable_jit_checkpoint", "silent", "SIGTERM always saves before the run ends"),
    **handled("push_to_hub hub_token hub_private_repo hub_always_push", "native"),
    **handled("hub_strategy", "native", rule=rules.one_of("end", "every_save", "checkpoint", "all_checkpoints")),
    **handled("ignore_data_skip restore_callback_states_from_checkpoint", "native"),
    **handled("resume_from_checkpoint", "native",  # as in TRL, scripts pass it to train()
              help="Folder of the checkpoint to resume from, or True for the newest in output_dir."),
    # Reproducibility
    **handled("seed", "native", rule=rules.whole(0, most=2**32 - 1)),
    **handled("data_seed", "native", rule=rules.whole(-(2**63), optional=True, most=2**64 - 1)),  # torch's range
    **handled("full_determinism", "mapped", rule=devices.deterministic,
              help="Require deterministic operations. On a GPU, the environment must set XLA_FLAGS="
                   f"{devices.DETERMINISTIC_FLAG}; CPUs and TPUs are always deterministic."),
    # Data
    **handled("dataloader_drop_last", "native"),
    **handled("remove_unused_columns", "silent", "the loader takes the columns it needs and leaves the others"),
    **handled("length_column_name", "native", rule=rules.text()),
    **handled("dataloader_pin_memory dataloader_persistent_workers", "silent", "there are no worker processes"),
    **handled("dataloader_num_workers", "warned", "batches are made in this process, ahead of the step.",
              rule=rules.whole(0)),
    **handled("dataloader_prefetch_factor dataloader_multiprocessing_context", "warned",
              "batches are made in this process, ahead of the step."),
    **handled("dataloader_in_order", "warned", "batches always come in order."),
    **handled("label_names", "warned", "this trainer's batches have no columns of labels."),
    # Devices and launchers
    **handled("accelerator_config", "mapped", rule=devices.accelerator,
              help="accelerate's options, as a dict or the path of a JSON file. Options that would change the run are "
                   "refused, split_batches and even_batches on several devices only; the others have no effect."),
    **handled("parallelism_config", "mapped", rule=devices.parallelism_config,
              help="accelerate's ParallelismConfig, or a dict of its sizes. On the command line, use mesh_shape."),
    **handled("fsdp", "mapped", rule=devices.fsdp, is_off=operator.not_,
              help="Shard parameters, gradients and optimizer state over the devices, as torch's FSDP does: "
                   "'full_shard', 'shard_grad_op', 'no_shard', 'hybrid_shard' or 'hybrid_shard_zero2'."),
    **handled("fsdp_config", "mapped", help="Options of fsdp, as a dict or the path of a JSON file."),
    **handled("deepspeed", "mapped", rule=devices.deepspeed, note=devices.deepspeed_note, is_off=operator.not_,
              help="DeepSpeed config, as a dict or the path of a JSON file: stages 1 and 2 shard gradients and "
                   "optimizer state, stage 3 also the parameters. DeepSpeed itself is not used."),
    **handled("ddp_find_unused_parameters ddp_broadcast_buffers ddp_static_graph ddp_timeout", "silent",
              "collectives are XLA's"),
    **handled("ddp_bucket_cap_mb ddp_backend", "warned", "collectives are XLA's."),
    **handled("local_rank do_train do_eval do_predict", "silent", "scripts read it, the trainer does not"),
    **handled("debug", "mapped", rule=rules.debug_words, note=rules.debug_note,
              help="'underflow_overflow' ends the run at the first step with a NaN or infinite loss or gradient."),
    **handled("skip_memory_metrics", "mapped"),
}  # fmt: skip


# ----------------------------------------------------------------------------------------------------
# Arguments that all trainers share


# repr=False: a generated repr would print secrets.
@dataclass(repr=False)
class BaseConfig(JaxArguments, metaclass=OldNames):
    """Arguments that every trainer shares, with TRL's defaults.

    A subclass declares its own arguments with `arg`. Arguments of several trainers, such as max_length, are fields of
    the subclasses, at TRL's position.

    Raises:
        ValueError: at construction, for a value that this release does not support.
        TypeError: unknown argument.
        NotADirectoryError, PermissionError: output_dir cannot be written.
    """

    _VALID_DICT_FIELDS = JaxArguments._VALID_DICT_FIELDS + ["model_init_kwargs"]

    logging_steps: float = arg(
        10,
        help="Log every this many steps; a value below 1 is a fraction of all steps.",
        rule=rules.bounded(rules.MOST_INTERVAL),
    )
    gradient_checkpointing: bool = arg(
        True,
        help="Recompute activations in the backward pass: uses less memory and takes about 20%% more time.",
        how="mapped",
    )
    bf16: bool | None = arg(None, help="Compute in bfloat16 with float32 weights. If unset, on unless fp16 is set.")
    lr_scheduler_kwargs: dict | str | None = arg(
        None,
        help="Extra arguments of the schedule, as a dict or JSON, such as '{\"num_cycles\": 1}'.",
        rule=optimizers.scheduler_kwargs,
    )
    use_liger_kernel: bool = arg(False, help="Accepted without effect.", how="warned", why=_NO_LIGER)
    torch_empty_cache_steps: int | None = arg(
        None, help="Accepted without effect.", how="warned", why="JAX manages its own memory."
    )

    # Arguments that all of TRL's trainers add to transformers' arguments, in TRL's order.
    model_init_kwargs: dict[str, Any] | str | None = arg(
        None,
        help="Arguments for loading a model given by name, as a dict or JSON: revision, dtype, ...",
        rule=rules.a_dict,
    )
    trust_remote_code: bool = arg(
        False, help="Let a tokenizer's repository run its own code. A model's code never runs."
    )
    # Not in TRL, and keyword-only.
    batch_layout: str = arg(
        "auto",
        help="How the texts of a step are laid out: 'padded' (one text per row), 'packed' (texts end to "
        "end, without padding), 'shared' (packed, and a prompt that several texts share is computed "
        "once), or 'auto' (the fastest layout that is exact for the model). The results are the same.",
        how="mapped",
        rule=rules.one_of("auto", "padded", "packed", "shared"),
        kw_only=True,
    )
    remat_policy: str = arg(
        "auto",
        help="What gradient_checkpointing=True saves in the forward pass, named as in "
        "jax.checkpoint_policies: 'nothing_saveable' recomputes whole layers; "
        "'dots_with_no_batch_dims_saveable' saves matrix products, as gradient_checkpointing=False "
        "does; 'auto' saves them if they fit into device memory (on a CPU, into half of the host's "
        "memory), and saves nothing if compute_loss is overridden. The results are the same.",
        how="mapped",
        rule=rules.one_of("auto", "nothing_saveable", "dots_with_no_batch_dims_saveable"),
        kw_only=True,
    )
    mesh_shape: str | None = arg(
        None,
        help="Mesh axes (data, fsdp, tensor, sequence) and their sizes, such as 'data:2,fsdp:4,tensor:2'; "
        "-1 takes the remaining devices. Overrides fsdp, deepspeed and parallelism_config. If none "
        "of these is set, all devices are used for data parallelism. per_device_train_batch_size "
        "applies to each of data x fsdp shards.",
        how="mapped",
        rule=devices.mesh_shape,
        kw_only=True,
    )
    coordinator_address: str | None = arg(
        None,
        help="'host:port' of the first process, for a run on several hosts. If unset, taken from "
        "JAX_COORDINATOR_ADDRESS, Slurm, Open MPI or Cloud TPU.",
        rule=rules.text(optional=True),
        kw_only=True,
    )
    num_processes: int | None = arg(
        None,
        help="Number of processes, with coordinator_address. If unset, taken from JAX_NUM_PROCESSES or the scheduler.",
        rule=rules.whole(1, optional=True),
        kw_only=True,
    )
    process_id: int | None = arg(
        None,
        help="Index of this process, from 0, with coordinator_address. If unset, taken from "
        "JAX_PROCESS_ID or the scheduler.",
        rule=rules.whole(0, optional=True),
        kw_only=True,
    )
    initialization_timeout: int = arg(
        300,
        help="Seconds to wait for the other processes of a run on several hosts to join.",
        rule=rules.whole(1),
        kw_only=True,
    )
    max_minutes: float | None = arg(
        None,
        help="Stop after this many minutes of training, with a checkpoint to resume from.",
        rule=rules.number(0, optional=True),
        kw_only=True,
    )
    save_minutes: float | None = arg(
        None,
        help="Also save a checkpoint every this many minutes.",
        rule=rules.number(0, optional=True),
        kw_only=True,
    )
    log_json: str | None = arg(
        None,
        help="File to which each logged set of metrics is appended, as a line of JSON with its step and time.",
        rule=rules.text(optional=True),
        kw_only=True,
    )

    # Arguments of most trainers. Their positions differ, and fields of a base class come first, so each config class
    # declares its own; these are the values for classes without them.
    activation_offloading = disable_dropout = cast_lm_head_to_fp32 = False
    chat_template_path = dataset_num_proc = eos_token = max_length = pad_token = None
    pad_to_multiple_of = "auto"
    _launcher_dtype = "float32"
    counts_devices: ClassVar[bool] = True  # False: the run's devices are not this machine's, so sizes are set later
    contacts_servers: ClassVar[bool] = True  # False: of a plan, which leaves out the servers that generate

    def __init_subclass__(cls, **kwargs: Any):
        super().__init_subclass__(**kwargs)
        # Set on the class itself: otherwise @dataclass on a user-defined subclass would generate a __repr__ that prints
        # secrets.
        cls.__repr__ = cls.__repr__

    def __post_init__(self):
        learn({f.name: getattr(self, f.name) for f in fields(self)})
        self.hub_token = as_token("hub_token", self.hub_token)
        if self.bf16 is None and isinstance(self.fp16, bool):
            self.bf16 = not self.fp16
        if self.gradient_checkpointing is None:  # transformers' default, which means off
            self.gradient_checkpointing = False
        if not (self.bf16 or self.fp16):
            self._launcher_dtype = launcher_dtype()
        processes = end_other_processes()
        for name, value in launcher_sharding(vars(self)).items():
            setattr(self, name, value)
        notes = self.check()
        if processes is not None:
            import jax

            notes.append(processes_warning(processes, jax.local_device_count(), self.per_device_train_batch_size))
        if self.gradient_checkpointing is True and self.activation_checkpointing is None:
            # The user did not set it, and should see no FutureWarning about its old name.
            self.activation_checkpointing = True
        if isinstance(self.report_to, tuple | set):  # transformers would put it into a list
            self.report_to = [*self.report_to]
        super().__post_init__()
        for name in self._VALID_DICT_FIELDS:
            value = getattr(self, name)
            if isinstance(value, dict) and "token" in value:
                setattr(self, name, value | {"token": as_token("token", value["token"])})
        check_output_dir(self.output_dir)
        for note in notes:
            warnings.warn(note, stacklevel=self._frames_to_caller())
        self.pad_to_multiple_of = as_pad_multiple("pad_to_multiple_of", self.pad_to_multiple_of)
        if self.pad_token is not None:
            warnings.warn(
                f"pad_token={self.pad_token!r} is deprecated: set tokenizer.pad_token and pass the tokenizer"
                " to the trainer as processing_class.",
                FutureWarning,
                stacklevel=self._frames_to_caller(),
            )

    def __getattr__(self, name: str) -> Any:
        """Allow scripts to read an argument by its old name."""
        new = current_name(name)
        if new not in type(self).__dataclass_fields__:
            raise AttributeError(f"{type(self).__name__!r} object has no attribute {name!r}", name=name, obj=self)
        return getattr(self, new)

    def __setattr__(self, name: str, value: Any) -> None:
        """Set an argument, also by its old name. In boolean fields, strings such as "False" become bools."""
        new = current_name(name)
        if new in self.__dataclass_fields__ and name not in self.__dataclass_fields__:
            warnings.warn(f"{name} is an old name: {RENAMED[name]}", FutureWarning, stacklevel=2)
            name = new
        if isinstance(value, np.generic):  # JSON files have no NumPy numbers
            value = value.item()
        if isinstance(value, Enum) and not isinstance(value, str):
            value = value.value
        if name in bool_fields(self._released_class()) and not isinstance(value, bool):
            with contextlib.suppress(ValueError):  # `check` rejects it, together with other wrong values
                value = as_bool(name, value)
        super().__setattr__(name, value)

    def resolve_sizes(self) -> None:
        """Set the sizes that depend on the number of devices. Most configs have none."""

    def to_dict(self) -> dict[str, Any]:
        """The arguments as in transformers, with secrets hidden, also those in nested dicts."""
        copied = copy.copy(self)  # transformers modifies dicts among the arguments
        vars(copied).update({name: _copy_dicts(value) for name, value in vars(self).items()})
        is_plain = not is_dataclass(self.parallelism_config)  # transformers only accepts accelerate's class
        copied.parallelism_config = None if is_plain else self.parallelism_config
        values = super(BaseConfig, copied).to_dict()
        if is_plain:
            values["parallelism_config"] = _copy_dicts(self.parallelism_config)
        return masked(values)

    def to_json_string(self) -> str:
        return json.dumps(self.to_dict(), indent=2, default=str)

    def to_sanitized_dict(self) -> dict[str, Any]:
        return masked(super().to_sanitized_dict())

    def __str__(self) -> str:
        values = {n: f"<{n.upper()}>" if n.endswith("_token") else v for n, v in masked(asdict(self)).items()}
        lines = "".join(f"{name}={scrubbed(str(value))},\n" for name, value in sorted(values.items()))
        return f"{type(self).__name__}(\n{lines})"

    __repr__ = __str__

    def check(self) -> list[str]:
        """Check the current values against `argument_table` and return its warnings, one line each.

        Raises:
            ValueError: with one line for each value that the table refuses.
        """
        values = {f.name: getattr(self, f.name) for f in fields(self)}
        defaults = defaults_of(fields(self)) | defaults_of(fields(self._released_class()))
        bools = self._refused_bools()
        refusals, notes = validate(self.argument_table(), values | {name: defaults[name] for name in bools}, defaults)
        refusals = [*bools.values(), *refusals]
        if refusals:
            raise ValueError("\n".join(refusals))
        return notes

    @classmethod
    def argument_table(cls) -> dict[str, Handling]:
        """name -> how it is handled, for every field."""
        return _argument_table(cls)

    def _refused_bools(self) -> dict[str, str]:
        """name -> error, for each boolean field that `__setattr__` could not convert or that bypassed it."""
        return {
            name: scrubbed(bool_error(name, value, optional))
            for name, optional in bool_fields(self._released_class()).items()
            if not isinstance(value := vars(self)[name], bool | (NoneType if optional else bool))
        }

    @classmethod
    def _released_class(cls) -> type:
        """This class, or its nearest base class in trl_jax, with whose defaults values are compared."""
        return next(base for base in cls.__mro__ if base.__module__.startswith("trl_jax."))

    @staticmethod
    def _frames_to_caller() -> int:
        """The `stacklevel` of a warning that should point to the line that creates the config."""
        frame, depth = inspect.currentframe().f_back, 1
        while frame.f_code.co_name in ("__post_init__", "__init__", "__call__"):
            frame, depth = frame.f_back, depth + 1
        return depth

    @property
    def compute_dtype(self) -> str:
        """Dtype of the forward pass; the weights stay float32. fp16 means bfloat16, too."""
        return "bfloat16" if self.bf16 or self.fp16 else self._launcher_dtype

    @property
    def eval_dtype(self) -> str | None:
        """Dtype that the weights are cast to for evaluation; None keeps float32."""
        return "bfloat16" if self.bf16_full_eval or self.fp16_full_eval else None

    @property
    def keeps_columns(self) -> bool:
        """Whether reward functions of online trainers get all columns of the rows."""
        return not self.remove_unused_columns

    @property
    def restarts_epoch(self) -> bool:
        """Whether a resumed run restarts its epoch instead of continuing after the last step."""
        return self.ignore_data_skip

    @property
    def remats(self) -> list[bool | str]:
        """Values of the model's `remat` to try in this order; the step uses the first that fits into memory."""
        if self.activation_offloading:
            return ["offloaded"]
        if not self.gradient_checkpointing or self.remat_policy == "dots_with_no_batch_dims_saveable":
            return [False]
        return [True] if self.remat_policy == "nothing_saveable" else [False, True]

    def join_processes(self) -> None:
        """Connect the processes of a multi-process run. Does not start JAX's backend: with its threads running,
        `dataset_num_proc` could not fork."""
        from trl_jax.mesh.processes import join

        join(self.coordinator_address, self.num_processes, self.process_id, self.initialization_timeout)

    def jax_devices(self) -> list:
        """The devices of all processes that a run may use. Connects the processes and starts JAX."""
        import jax

        from trl_jax.mesh.processes import several

        self.join_processes()
        several()  # processes that have joined start their devices together
        return jax.devices("cpu") if self.use_cpu else jax.devices()


@cache
def _argument_table(cls: type[BaseConfig]) -> dict[str, Handling]:
    table = INHERITED | declared(TextArguments) | declared(cls)
    names = {field.name for field in fields(cls)}
    return {name: handling for name, handling in table.items() if name in names}


def inherited(name: str, **changes: Any) -> Any:
    """The field `name` of BaseConfig, declared again with `changes` as in `redeclared`."""
    return redeclared(BaseConfig.__dataclass_fields__[name], BaseConfig.argument_table()[name], **changes)


def _copy_dicts(value: Any) -> Any:
    """A deep copy of dicts, in which a quantization_config becomes a dict."""
    if not isinstance(value, dict):
        return value
    entries = {key: _copy_dicts(entry) for key, entry in value.items()}
    config = entries.get("quantization_config")
    if config is not None and not isinstance(config, dict):
        entries["quantization_config"] = config.to_dict()
    return entries


def check_output_dir(output_dir: str) -> None:
    """Raise now, instead of at the first checkpoint, if output_dir cannot be written. Creates nothing."""
    try:
        str(output_dir).encode()
    except UnicodeEncodeError as error:
        raise ValueError(f"output_dir={ascii(output_dir)} is not valid Unicode. Choose another output_dir.") from error
    folder = Path(output_dir).absolute()
    if "\0" in str(folder):
        raise ValueError(f"output_dir={str(output_dir)!r} has a null character. Choose another output_dir.")
    try:
        nearest = next(path for path in (folder, *folder.parents) if path.exists())
    except OSError as error:  # a name that is too long, or a loop of links
        raise ValueError(f"{rules.show('output_dir', output_dir)}: {error.strerror}. Choose another.") from error
    if not nearest.is_dir():
        raise NotADirectoryError(f"output_dir={output_dir!r}: {nearest} is a file. Choose another output_dir.")
    if not os.access(nearest, os.W_OK):
        raise PermissionError(f"output_dir={output_dir!r}: {nearest} is not writable. Choose another output_dir.")
