"""BaseConfig: the arguments that all trainers share, and how each of them is handled."""

from __future__ import annotations

import contextlib
import copy
import inspect
import operator
import os
import warnings
from dataclasses import asdict, dataclass, fields
from functools import cache
from math import prod
from pathlib import Path
from types import NoneType
from typing import Any, ClassVar

from transformers import TrainingArguments
from transformers.trainer_utils import SchedulerType
from transformers.training_args import ParallelMode, trainer_log_levels

from trl_jax.config import devices, optimizers, rules
from trl_jax.config.arguments import Handling, arg, declared, defaults_of, handled, redeclared, validate
from trl_jax.config.devices import end_other_processes, launcher_aside, mesh_sizes, note_of, sharding_of_launcher
from trl_jax.config.optimizers import OPTIMIZERS, SCHEDULES
from trl_jax.config.renamed import RENAMED, OldNames, todays_name
from trl_jax.config.rules import as_bool, as_pad_multiple, bool_fields, wanted_bool
from trl_jax.config.shared import TextArguments
from trl_jax.core.secrets import as_token, learn, masked, scrubbed

# ----------------------------------------------------------------------------------------------------
# transformers' TrainingArguments without torch: devices and processes are JAX's.


# transformers hands these to torch inside __post_init__; here the table of arguments handles them.
TORCH_ONLY = {
    **dict.fromkeys(("torch_compile_backend", "torch_compile_mode", "tf32", "fsdp", "fsdp_config", "deepspeed")),
    "torch_compile": False,
    "parallelism_config": None,
}


@dataclass(frozen=True)
class Device:
    """Stands in for torch.device where scripts read `args.device`. JAX starts its backend when `type` is read."""

    use_cpu: bool

    @property
    def type(self) -> str:
        """One of cpu, cuda (torch's word for a GPU, which scripts compare with) and tpu."""
        if self.use_cpu:
            return "cpu"
        import jax

        backend = jax.default_backend()
        return "cuda" if backend == "gpu" else backend

    @property
    def index(self) -> int | None:
        return None if self.type == "cpu" else 0

    def __str__(self) -> str:
        return self.type if self.index is None else f"{self.type}:{self.index}"


class JaxArguments(TrainingArguments):
    """TrainingArguments whose construction asks torch for nothing, and whose properties answer for JAX."""

    def __post_init__(self):
        aside = {name: getattr(self, name) for name in TORCH_ONLY}
        for name, nothing in TORCH_ONLY.items():
            setattr(self, name, nothing)
        with launcher_aside():
            super().__post_init__()
        for name, value in aside.items():
            setattr(self, name, value)

    def _validate_args(self):
        # With torch installed, transformers asks it for a bfloat16 GPU unless the run is on the CPU; without, it has no
        # schedule that follows a plateau.
        use_cpu, schedule = self.use_cpu, self.lr_scheduler_type
        self.use_cpu, self.lr_scheduler_type = True, SchedulerType.LINEAR
        try:
            super()._validate_args()
        finally:
            self.use_cpu, self.lr_scheduler_type = use_cpu, schedule

    @property
    def device(self) -> Device:
        return Device(use_cpu=self.use_cpu)

    @property
    def n_gpu(self) -> int:
        """1 on an accelerator, as for each of torchrun's processes, however many there are."""
        return 0 if self.device.type == "cpu" else 1

    @property
    def parallel_mode(self) -> ParallelMode:
        return ParallelMode.DISTRIBUTED if self.world_size > 1 else ParallelMode.NOT_PARALLEL

    @property
    def world_size(self) -> int:
        """Devices of the run, over all processes: TRL has a process for each. JAX starts when it is read."""
        return prod(mesh_sizes(self).values())

    @property
    def data_parallel_size(self) -> int:
        """How many devices, or groups of them, have per_device_train_batch_size examples each: data x fsdp."""
        sizes = mesh_sizes(self)
        return sizes.get("data", 1) * sizes.get("fsdp", 1)

    @property
    def process_index(self) -> int:
        import jax

        return jax.process_index() if jax.distributed.is_initialized() else 0

    @property
    def local_process_index(self) -> int:
        """Always 0: a host has one process."""
        return 0

    @contextlib.contextmanager
    def main_process_first(self, local: bool = True, desc: str = "work"):
        """Run the block in the first process before the others, which then find its results in a shared cache."""
        from trl_jax.mesh.processes import barrier

        if self.process_index:
            barrier(f"main_process_first: {desc}")
        yield
        if not self.process_index:
            barrier(f"main_process_first: {desc}")

    @property
    def distributed_state(self) -> Any:
        """The part of accelerate's PartialState that scripts use. JAX starts when it is read."""
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
# How each field of TrainingArguments is handled; fields of our own say it where they are declared, with `arg`.


_NO_LIGER = "XLA brings the kernels; results are equal."
_AS_BF16 = "float16 is run as bfloat16, which needs no loss scaling. Pass the bf16 argument to say so."
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
    **handled("auto_find_batch_size", "native"),
    # Optimiser, schedule and order of rows
    **handled("optim", "native", rule=optimizers.optimizer, note=optimizers.optimizer_note,
              supported=tuple(OPTIMIZERS)),
    **handled("optim_args", "native", rule=optimizers.optimizer_args),
    **handled("lr_scheduler_type", "native", rule=optimizers.scheduler, supported=tuple(SCHEDULES)),
    **handled("train_sampling_strategy", "native", rule=rules.one_of(*SAMPLING_STRATEGIES),
              supported=SAMPLING_STRATEGIES),
    **handled("learning_rate weight_decay adam_epsilon", "native", rule=rules.number(0, most=rules.MOST_FLOAT32)),
    **handled("adam_beta1 adam_beta2", "native", rule=optimizers.beta),
    **handled("max_grad_norm", "native", rule=rules.number(-rules.MOST_FLOAT32, optional=True)),
    **handled("warmup_steps", "native", rule=rules.bounded(rules.MOST_STEPS)),
    **handled("optim_target_modules", "refused", "it belongs to GaLore and APOLLO; leave it out."),
    **handled("average_tokens_across_devices", "silent", "a loss divides by the whole step's examples or tokens"),
    **handled("label_smoothing_factor", "warned", "this loss has no labels to smooth."),
    **handled("neftune_noise_alpha", "native", rule=rules.number(0, optional=True, most=rules.MOST_FLOAT32)),
    # Precision, memory, compilation
    **handled("fp16 fp16_full_eval", "mapped", _AS_BF16),
    **handled("bf16_full_eval tf32 use_cpu activation_checkpointing", "mapped"),
    **handled("activation_checkpointing_kwargs gradient_checkpointing_kwargs", "mapped",
              rule=devices.checkpointing_kwargs),
    **handled("torch_compile", "silent", "every step is compiled"),
    **handled("torch_compile_backend torch_compile_mode", "warned", "XLA compiles every step."),
    **handled("liger_kernel_config", "warned", _NO_LIGER),
    **handled("use_cache", "native"),
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
    **handled("eval_use_gather_object eval_accumulation_steps", "silent", "each batch goes to the host"),
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
    **handled("resume_from_checkpoint", "native"),  # as in TRL, a script hands it to train()
    # Reproducibility
    **handled("seed", "native", rule=rules.whole(0, most=2**32 - 1)),
    **handled("data_seed", "native", rule=rules.whole(-(2**63), optional=True, most=2**64 - 1)),  # as torch takes it
    **handled("full_determinism", "mapped", rule=devices.deterministic),
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
    **handled("accelerator_config", "mapped", rule=devices.accelerator),
    **handled("parallelism_config", "mapped", rule=devices.parallelism_config),
    **handled("fsdp", "mapped", rule=devices.fsdp, is_off=operator.not_),
    **handled("fsdp_config", "mapped"),
    **handled("deepspeed", "mapped", rule=devices.deepspeed, note=devices.deepspeed_note, is_off=operator.not_),
    **handled("ddp_find_unused_parameters ddp_broadcast_buffers ddp_static_graph ddp_timeout", "silent",
              "collectives are XLA's"),
    **handled("ddp_bucket_cap_mb ddp_backend", "warned", "collectives are XLA's."),
    **handled("local_rank do_train do_eval do_predict", "silent", "scripts read it, the trainer does not"),
    **handled("debug", "mapped", rule=rules.debug_words, note=rules.debug_note),
    **handled("skip_memory_metrics", "mapped"),
}  # fmt: skip


# ----------------------------------------------------------------------------------------------------
# The arguments that all trainers share.


# repr=False: a generated repr would print secrets.
@dataclass(repr=False)
class BaseConfig(JaxArguments, metaclass=OldNames):
    """Arguments that every trainer shares, with TRL's defaults.

    A subclass declares its own arguments with `arg`. Those of most trainers, such as max_length, are fields of the
    subclasses that have them, at TRL's position.

    Raises:
        ValueError: at construction, for a value that this release does not support.
        TypeError: an unknown name.
        NotADirectoryError, PermissionError: output_dir cannot be written.
    """

    _VALID_DICT_FIELDS = JaxArguments._VALID_DICT_FIELDS + ["model_init_kwargs"]

    logging_steps: float = arg(
        10, help="Steps between two log lines; below 1, a share of all steps.", rule=rules.bounded(rules.MOST_INTERVAL)
    )
    gradient_checkpointing: bool = arg(
        True,
        help="Recompute activations in the backward pass: less memory, about 20%% more time.",
        how="mapped",
    )
    bf16: bool | None = arg(None, help="Compute in bfloat16 over float32 weights. Unset, it is on unless fp16 is set.")
    lr_scheduler_kwargs: dict | str | None = arg(
        None,
        help="Extra arguments of the schedule, as a dict or JSON: '{\"num_cycles\": 1}'.",
        rule=optimizers.scheduler_kwargs,
    )
    use_liger_kernel: bool = arg(False, help="Accepted without effect.", how="warned", why=_NO_LIGER)
    torch_empty_cache_steps: int | None = arg(
        None, help="Accepted without effect.", how="warned", why="JAX manages its own memory."
    )

    # Arguments of every trainer of TRL after transformers' own, in TRL's order.
    model_init_kwargs: dict[str, Any] | str | None = arg(
        None,
        help="How to load a model given by name, as a dict or JSON: revision, dtype, ...",
        rule=rules.a_dict,
    )
    trust_remote_code: bool = arg(
        False, help="Let a tokenizer's repository run its own code. A model's code is never run."
    )
    # Not in TRL, and keyword-only.
    batch_layout: str = arg(
        "auto",
        help="How the texts of a step are arranged in memory: 'padded', a row for each text, as long as the longest; "
        "'packed', end to end; 'shared', packed, with a prompt that several texts share only once; 'auto', the fastest "
        "that is exact for the model. The numbers are the same.",
        how="mapped",
        rule=rules.one_of("auto", "padded", "packed", "shared"),
        kw_only=True,
    )
    remat_policy: str = arg(
        "auto",
        help="What gradient_checkpointing=True keeps of the forward pass, by the names of jax.checkpoint_policies: "
        "'nothing_saveable' computes whole layers twice; 'dots_with_no_batch_dims_saveable' keeps the matrix products, "
        "as gradient_checkpointing=False does; 'auto' keeps the products where they fit into the device's memory (on a "
        "CPU: half of the host's), and nothing with a compute_loss of your own. The numbers are the same.",
        how="mapped",
        rule=rules.one_of("auto", "nothing_saveable", "dots_with_no_batch_dims_saveable"),
        kw_only=True,
    )
    mesh_shape: str | None = arg(
        None,
        help="How several devices are used, as 'data:2,fsdp:4,tensor:2'; -1 is what is left. Overrides fsdp, deepspeed "
        "and parallelism_config. Unset, and without these, examples are divided over all devices. "
        "per_device_train_batch_size counts for each of data x fsdp.",
        how="mapped",
        rule=devices.mesh_shape,
        kw_only=True,
    )
    coordinator_address: str | None = arg(
        None,
        help="'host:port' of the first process, where each of several hosts has one. Unset, from "
        "JAX_COORDINATOR_ADDRESS, SLURM, Open MPI or Cloud TPU.",
        rule=rules.text(optional=True),
        kw_only=True,
    )
    num_processes: int | None = arg(
        None,
        help="Number of processes, with coordinator_address. Unset, from JAX_NUM_PROCESSES or the scheduler.",
        rule=rules.whole(1, optional=True),
        kw_only=True,
    )
    process_id: int | None = arg(
        None,
        help="Index of this process, from 0, with coordinator_address. Unset, from JAX_PROCESS_ID or the scheduler.",
        rule=rules.whole(0, optional=True),
        kw_only=True,
    )

    # Arguments of most trainers. Their positions differ, and fields of a base class come first, so each config class
    # declares those it has; these are the values for a class without them.
    activation_offloading = disable_dropout = cast_lm_head_to_fp32 = False
    chat_template_path = dataset_num_proc = eos_token = max_length = pad_token = None
    pad_to_multiple_of = "auto"
    counts_devices: ClassVar[bool] = True  # False: the run's devices are not this machine's, and sizes wait for them

    def __init_subclass__(cls, **kwargs: Any):
        super().__init_subclass__(**kwargs)
        # Set on the class itself: a script's @dataclass would otherwise generate one, which prints secrets.
        cls.__repr__ = cls.__repr__

    def __post_init__(self):
        learn({f.name: getattr(self, f.name) for f in fields(self)})
        self.hub_token = as_token("hub_token", self.hub_token)
        if self.bf16 is None and isinstance(self.fp16, bool):
            self.bf16 = not self.fp16
        if self.gradient_checkpointing is None:  # off in transformers, where it is the default
            self.gradient_checkpointing = False
        processes = end_other_processes()
        for name, value in sharding_of_launcher(vars(self)).items():
            setattr(self, name, value)
        notes = self.check()
        if processes is not None:
            import jax

            notes.append(note_of(processes, jax.local_device_count(), self.per_device_train_batch_size))
        if self.gradient_checkpointing is True and self.activation_checkpointing is None:
            # The default is ours: the user could do nothing about a FutureWarning of its old name.
            self.activation_checkpointing = True
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
        """Answer an old name of an argument, which scripts read, too."""
        new = todays_name(name)
        if new not in type(self).__dataclass_fields__:
            raise AttributeError(f"{type(self).__name__!r} object has no attribute {name!r}", name=name, obj=self)
        return getattr(self, new)

    def __setattr__(self, name: str, value: Any) -> None:
        """Set an argument, also by an old name, which would otherwise change nothing; texts such as "False" become
        bools in boolean fields."""
        new = todays_name(name)
        if new in self.__dataclass_fields__ and name not in self.__dataclass_fields__:
            warnings.warn(f"{name} is an old name: {RENAMED[name]}", FutureWarning, stacklevel=2)
            name = new
        if name in bool_fields(self._released_kind()) and not isinstance(value, bool):
            with contextlib.suppress(ValueError):  # `check` refuses it, together with other values
                value = as_bool(name, value)
        super().__setattr__(name, value)

    def settle_sizes(self) -> None:
        """Set the sizes that depend on how many devices the run has; most configs have none."""

    def to_dict(self) -> dict[str, Any]:
        """The arguments as transformers writes them, without secrets: those in dictionaries are hidden, too."""
        twin = copy.copy(self)  # transformers changes the dictionaries among the arguments
        vars(twin).update({name: _unshared(value) for name, value in vars(self).items()})
        return masked(super(BaseConfig, twin).to_dict())

    def to_sanitized_dict(self) -> dict[str, Any]:
        return masked(super().to_sanitized_dict())

    def __str__(self) -> str:
        values = {n: f"<{n.upper()}>" if n.endswith("_token") else v for n, v in masked(asdict(self)).items()}
        lines = "".join(f"{name}={scrubbed(str(value))},\n" for name, value in sorted(values.items()))
        return f"{type(self).__name__}(\n{lines})"

    __repr__ = __str__

    def check(self) -> list[str]:
        """Check the current values against `argument_table`; returns its warnings, one line each.

        Raises:
            ValueError: the table refuses a value; there is a line for each.
        """
        values = {f.name: getattr(self, f.name) for f in fields(self)}
        defaults = defaults_of(fields(self)) | defaults_of(fields(self._released_kind()))
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
        """name -> refusal of each boolean field that `__setattr__` could not convert, or that was set past it."""
        return {
            name: scrubbed(wanted_bool(name, value, optional))
            for name, optional in bool_fields(self._released_kind()).items()
            if not isinstance(value := vars(self)[name], bool | (NoneType if optional else bool))
        }

    @classmethod
    def _released_kind(cls) -> type:
        """This class or the nearest base class that trl_jax defines: values are compared with its defaults."""
        return next(kind for kind in cls.__mro__ if kind.__module__.startswith("trl_jax."))

    @staticmethod
    def _frames_to_caller() -> int:
        """The `stacklevel` with which a warning points at the line that builds the configuration."""
        frame, depth = inspect.currentframe().f_back, 1
        while frame.f_code.co_name in ("__post_init__", "__init__", "__call__"):
            frame, depth = frame.f_back, depth + 1
        return depth

    @property
    def compute_dtype(self) -> str:
        """Dtype of the forward pass, over float32 weights: float16 means bfloat16 here."""
        return "bfloat16" if self.bf16 or self.fp16 else "float32"

    @property
    def eval_dtype(self) -> str | None:
        """Dtype to which the weights themselves are cast for evaluation; None leaves them float32."""
        return "bfloat16" if self.bf16_full_eval or self.fp16_full_eval else None

    @property
    def remats(self) -> list[bool | str]:
        """Values of the model's `remat` to try, in this order: the step takes the first that fits into memory."""
        if self.activation_offloading:
            return ["offloaded"]
        if not self.gradient_checkpointing or self.remat_policy == "dots_with_no_batch_dims_saveable":
            return [False]
        return [True] if self.remat_policy == "nothing_saveable" else [False, True]

    def join_processes(self) -> None:
        """Let the processes of a run of several find each other. JAX is not asked for a device: it would start threads,
        beside which `dataset_num_proc` could not fork."""
        from trl_jax.mesh.processes import join

        join(self.coordinator_address, self.num_processes, self.process_id)

    def jax_devices(self) -> list:
        """All devices that a run may use, of every process; JAX starts here, so processes find each other first."""
        import jax

        self.join_processes()
        return jax.devices("cpu") if self.use_cpu else jax.devices()


@cache
def _argument_table(kind: type[BaseConfig]) -> dict[str, Handling]:
    table = INHERITED | declared(TextArguments) | declared(kind)
    names = {field.name for field in fields(kind)}
    return {name: line for name, line in table.items() if name in names}


def inherited(name: str, **changes: Any) -> Any:
    """The field `name` of BaseConfig again; `changes` as in `redeclared`."""
    return redeclared(BaseConfig.__dataclass_fields__[name], BaseConfig.argument_table()[name], **changes)


def _unshared(value: Any) -> Any:
    """A copy of dictionaries, in which the config of a quantization is one, too."""
    if not isinstance(value, dict):
        return value
    entries = {key: _unshared(entry) for key, entry in value.items()}
    config = entries.get("quantization_config")
    if config is not None and not isinstance(config, dict):
        entries["quantization_config"] = config.to_dict()
    return entries


def check_output_dir(output_dir: str) -> None:
    """Raise now, and not at the first checkpoint, where output_dir cannot be written. Creates nothing."""
    try:
        str(output_dir).encode()
    except UnicodeEncodeError as error:
        raise ValueError(f"output_dir={ascii(output_dir)} is no Unicode text: choose another output_dir.") from error
    folder = Path(output_dir).absolute()
    nearest = next(path for path in (folder, *folder.parents) if path.exists())
    if not nearest.is_dir():
        raise NotADirectoryError(f"output_dir={output_dir!r}: {nearest} is a file. Choose another output_dir.")
    if not os.access(nearest, os.W_OK):
        raise PermissionError(f"output_dir={output_dir!r}: {nearest} is not writable. Choose another output_dir.")
