"""BaseConfig: the arguments that all trainers share, and how each of them is handled."""

from __future__ import annotations

import contextlib
import copy
import inspect
import os
import warnings
from collections.abc import Mapping
from dataclasses import asdict, dataclass, field, fields
from math import prod
from pathlib import Path
from types import NoneType
from typing import Any, ClassVar

from transformers import TrainingArguments
from transformers.trainer_utils import SchedulerType
from transformers.training_args import ParallelMode

from trl_jax.config.devices import end_other_processes, launcher_aside, mesh_sizes, note_of, sharding_of_launcher
from trl_jax.config.renamed import RENAMED, OldNames, todays_name
from trl_jax.config.rules import Handling, as_bool, as_pad_multiple, bool_fields, defaults_of, validate, wanted_bool
from trl_jax.config.tables import BASE, COMMON
from trl_jax.core.secrets import as_token, learn, masked, scrubbed

# ----------------------------------------------------------------------------------------------------
# Fields that configs of several trainers have, in TRL's names; each config puts them where TRL's has them.


def router_aux_loss_coef() -> Any:
    return _field(None, "Weight of the loss that balances experts. Unset, as in the model; 0 is off.")


def chat_template_path(*, kw_only: bool = False) -> Any:
    text = "File with the chat template to use, or a tokenizer that has it."
    return field(default=None, kw_only=kw_only, metadata={"help": text})


def disable_dropout(default: bool = True) -> Any:
    return _field(default, "Train without dropout.")


def dataset_num_proc() -> Any:
    return _field(None, "Processes that tokenise the dataset.")


def eos_token() -> Any:
    return _field(None, "Token that ends a text. Unset, the tokenizer's own.")


def max_length_with_answer() -> Any:
    return _field(1024, "Longest prompt with its answer in tokens, the rest is cut off. None cuts nothing.")


def max_prompt_length() -> Any:
    text = "Deprecated: tokens of a prompt, of which the last ones stay. Unset, all."
    return field(default=None, kw_only=True, metadata={"help": text})


def truncation_mode() -> Any:
    text = "Part of a text beyond max_length that stays. 'keep_end' is deprecated."
    return _field("keep_start", text, choices=["keep_end", "keep_start"])


def pad_to_multiple_of(unchanged: str = "Losses") -> Any:
    """
    Args:
        unchanged: the results that do not depend on it.
    """
    return _field(
        "auto",
        "Round row lengths up to a multiple of it. 'auto' rounds up to a short ladder of lengths (32 tokens apart, "
        f"from 256 on four an octave), so that few shapes compile; None rounds nothing. {unchanged} do not depend on "
        "it.",
    )


def precompute_ref_log_probs() -> Any:
    return _field(False, "Compute the reference's log-probabilities once, before training, and keep them on the disk.")


def precompute_ref_batch_size(unit: str) -> Any:
    return _field(None, f"{unit} of a batch then. Unset, those of training or evaluation.")


def sync_ref_model() -> Any:
    return _field(False, "Move the reference towards the policy every ref_model_sync_steps steps (TR-DPO).")


def ref_model_mixup_alpha() -> Any:
    return _field(0.6, "The policy's share of the new reference, from 0.0 to 1.0.")


def ref_model_sync_steps() -> Any:
    return _field(512, "Steps between two moves of the reference.")


def activation_offloading() -> Any:
    return _field(False, "Keep what gradient checkpointing keeps, each layer's input, in the host's memory.")


def pad_token() -> Any:
    return _field(None, "Deprecated: set it on the tokenizer instead.")


def _field(default: Any, text: str, **metadata: Any) -> Any:
    return field(default=default, metadata={"help": text} | metadata)


def warn_of_prompt_length(most: int | None, stacklevel: int) -> None:
    """Warn that `max_prompt_length` is deprecated; `stacklevel` as in `warn_of_keep_end`."""
    if most is not None:
        text = (
            f"max_prompt_length={most} is deprecated, and TRL no longer has it: long prompts lose their beginning. "
            "max_length is for prompt and answer together."
        )
        warnings.warn(text, FutureWarning, stacklevel=stacklevel + 1)


def warn_of_keep_end(mode: str, stacklevel: int) -> None:
    """Warn that `truncation_mode="keep_end"` is deprecated.

    Args:
        stacklevel: of the line that made the config, counted from the caller of this function.
    """
    if mode == "keep_end":
        text = "truncation_mode='keep_end' is deprecated: use truncation_mode='keep_start', the default."
        warnings.warn(text, FutureWarning, stacklevel=stacklevel + 1)


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
# The arguments that all trainers share, and a table that handles each of them.


# repr=False: a generated repr would print secrets.
@dataclass(repr=False)
class BaseConfig(JaxArguments, metaclass=OldNames):
    """Arguments that every trainer shares, with TRL's defaults.

    `argument_table` says of each field how it is handled; a trainer's own config extends it. The fields of most
    trainers, such as max_length, are those of a subclass that declares them, and their values are checked there, too.
    Besides the fields of TrainingArguments:

        model_init_kwargs: how to load a model given by name (dict, or JSON in a string).
        trust_remote_code: lets a tokenizer's repository run its own code; a model's own code is never run.
        batch_layout: how the texts of a step lie in memory; the numbers do not depend on it. "padded" gives each text a
            row as long as the longest, "packed" lays texts end to end, "shared" does so with the prompt that texts of
            an example share only once. "auto" takes the quickest that is exact for the model. Not in TRL.
        remat_policy: what `gradient_checkpointing` keeps of the forward pass, by the name of one of
            jax.checkpoint_policies; the numbers do not depend on it. "nothing_saveable" computes whole layers twice,
            "dots_with_no_batch_dims_saveable" keeps their matrix products, as gradient_checkpointing=False does; "auto"
            keeps those where the compiled step then fits into the device's memory (on a CPU: into half of the host's).
            With a `compute_loss` of a script's own, "auto" keeps nothing. Not in TRL.
        mesh_shape: how several devices are used, as "data:2,fsdp:4,tensor:2"; -1 is what is left. It beats `fsdp`,
            `deepspeed` and `parallelism_config`. Without any of these, examples are divided over all devices.
            `per_device_train_batch_size` counts for each of data x fsdp. Not in TRL.
        coordinator_address, num_processes, process_id: of a run with a process on each of several hosts; each that is
            None is taken from JAX_COORDINATOR_ADDRESS, JAX_NUM_PROCESSES or JAX_PROCESS_ID, from SLURM, Open MPI or
            Cloud TPU. Not in TRL.

    Raises:
        ValueError: at construction, for a value that this release does not support.
        TypeError: an unknown name.
        NotADirectoryError, PermissionError: output_dir cannot be written.
    """

    argument_table: ClassVar[Mapping[str, Handling]] = BASE
    _VALID_DICT_FIELDS = JaxArguments._VALID_DICT_FIELDS + ["model_init_kwargs"]

    logging_steps: float = field(
        default=10, metadata={"help": "Steps between two log lines; below 1, a share of all steps."}
    )
    gradient_checkpointing: bool = field(
        default=True,
        metadata={"help": "Recompute activations in the backward pass: less memory, about 20%% more time."},
    )
    bf16: bool | None = field(
        default=None,
        metadata={"help": "Compute in bfloat16 over float32 weights. Unset, it is on unless fp16 is set."},
    )
    lr_scheduler_kwargs: dict | str | None = field(
        default=None,
        metadata={"help": "Extra arguments of the schedule, as a dict or JSON: '{\"num_cycles\": 1}'."},
    )
    use_liger_kernel: bool = field(default=False, metadata={"help": "Accepted without effect."})
    torch_empty_cache_steps: int | None = field(default=None, metadata={"help": "Accepted without effect."})

    # Arguments of every trainer of TRL after transformers' own, in TRL's order.
    model_init_kwargs: dict[str, Any] | str | None = field(
        default=None,
        metadata={"help": "How to load a model given by name, as a dict or JSON: revision, dtype, ..."},
    )
    trust_remote_code: bool = field(
        default=False,
        metadata={"help": "Let a tokenizer's repository run its own code. A model's code is never run."},
    )
    # Not in TRL, and keyword-only.
    batch_layout: str = field(
        default="auto",
        kw_only=True,
        metadata={
            "help": "How the texts of a step lie in memory: 'padded' rows; 'packed' end to end; 'shared', packed with "
            "a shared prompt only once; 'auto', the quickest that is exact. The numbers are the same."
        },
    )

    remat_policy: str = field(
        default="auto",
        kw_only=True,
        metadata={
            "help": "What gradient_checkpointing=True keeps of the forward pass, by JAX's names: 'nothing_saveable'; "
            "'dots_with_no_batch_dims_saveable', the matrix products; 'auto', the products where they fit into "
            "memory. The numbers are the same."
        },
    )

    mesh_shape: str | None = field(
        default=None,
        kw_only=True,
        metadata={
            "help": "How several devices are used, as 'data:2,fsdp:4,tensor:2'; unset, examples are divided over all."
        },
    )

    coordinator_address: str | None = field(
        default=None,
        kw_only=True,
        metadata={"help": "'host:port' of the first of several processes, where no scheduler tells it."},
    )
    num_processes: int | None = field(
        default=None, kw_only=True, metadata={"help": "How many processes the run has, with coordinator_address."}
    )
    process_id: int | None = field(
        default=None, kw_only=True, metadata={"help": "Which of them this is, from 0, with coordinator_address."}
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
        """Check the current values against the table; returns its warnings, one line each.

        Raises:
            ValueError: the table refuses a value; there is a line for each.
        """
        values = {f.name: getattr(self, f.name) for f in fields(self)}
        table = {**BASE, **{name: line for name, line in COMMON.items() if name in values}} | self.argument_table
        defaults = defaults_of(fields(self)) | defaults_of(fields(self._released_kind()))
        bools = self._refused_bools()
        refusals, notes = validate(table, values | {name: defaults[name] for name in bools}, defaults)
        refusals = [*bools.values(), *refusals]
        if refusals:
            raise ValueError("\n".join(refusals))
        return notes

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
