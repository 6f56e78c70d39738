"""transformers' TrainingArguments without torch: its fields, one JAX device, an answer to every argument."""

import contextlib
import copy
import inspect
import os
import warnings
from dataclasses import asdict, dataclass, field, fields
from math import prod
from pathlib import Path
from typing import Any

from transformers import TrainingArguments
from transformers.trainer_utils import SchedulerType
from transformers.training_args import ParallelMode
from transformers.utils.generic import strtobool

from trl_jax.core import arguments
from trl_jax.core.renamed import translated, way_out
from trl_jax.core.secrets import as_token, learn, masked, scrubbed

# transformers hands these to torch inside __post_init__; the table says what becomes of them here.
TORCH_ONLY = {
    **dict.fromkeys(("torch_compile_backend", "torch_compile_mode", "tf32", "fsdp", "fsdp_config", "deepspeed")),
    "torch_compile": False,
    "parallelism_config": None,
}


class OldNames(type):
    """Of a configuration's class: arguments by the names they had in earlier releases of transformers are taken too."""

    def __call__(cls, *args, **kwargs):
        accepted = inspect.signature(cls.__init__).parameters
        # A subclass's own __init__ may take any name and hand it on.
        open_ended = any(p.kind is inspect.Parameter.VAR_KEYWORD for p in accepted.values())
        kwargs, environment, notes = translated(kwargs, accepted)
        for name in kwargs.keys() - accepted.keys() if not open_ended else ():
            raise TypeError(f"{cls.__name__} has no argument {name!r}: {way_out(name, accepted)}")
        os.environ.update(environment)
        for note in notes:
            warnings.warn(note, FutureWarning, stacklevel=2)
        return super().__call__(*args, **kwargs)


@dataclass(frozen=True)
class Device:
    """Where the run happens. JAX starts its backend when `type` is read, not before."""

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


# repr=False: a generated repr would print secrets.
@dataclass(repr=False)
class BaseConfig(TrainingArguments, metaclass=OldNames):
    """Arguments that every trainer shares, with TRL's defaults.

    Raises ValueError at construction for what this release does not do, TypeError for an unknown name,
    NotADirectoryError or PermissionError where output_dir cannot be written.
    """

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

    def __init_subclass__(cls, **kwargs: Any):
        super().__init_subclass__(**kwargs)
        # Its own, even if inherited: a script's @dataclass would otherwise generate one, which prints secrets.
        cls.__repr__ = cls.__repr__

    def __post_init__(self):
        learn({f.name: getattr(self, f.name) for f in fields(self)})
        self.hub_token = as_token("hub_token", self.hub_token)
        if self.bf16 is None:
            self.bf16 = not self.fp16
        notes = self.check()
        if self.gradient_checkpointing is True and self.activation_checkpointing is None:
            # The default is ours, so the FutureWarning about its old name would not be the user's to heed.
            self.activation_checkpointing = True
        self._without_torch(super().__post_init__)
        for name in self._VALID_DICT_FIELDS:
            given = getattr(self, name)
            if isinstance(given, dict) and "token" in given:
                setattr(self, name, given | {"token": as_token("token", given["token"])})
        check_output_dir(self.output_dir)
        for note in notes:
            warnings.warn(note, stacklevel=self._frames_to_caller())

    def to_dict(self) -> dict[str, Any]:
        """The arguments as transformers writes them, without secrets: those in dictionaries are hidden, too."""
        twin = copy.copy(self)  # transformers changes the dictionaries that the arguments hold
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
        """Ask the table about the values as they now are: its warnings, or ValueError on a refusal."""
        values = {f.name: getattr(self, f.name) for f in fields(self)}
        refusals, notes = arguments.judge(values, arguments.defaults_of(fields(self._released_kind())))
        if strtobool(os.environ.get("ACCELERATE_USE_DEEPSPEED", "false")):
            refusals.append(
                "ACCELERATE_USE_DEEPSPEED is set in the environment, but there is no DeepSpeed here: start"
                " the script with python, not with accelerate launch."
            )
        if int(os.environ.get("WORLD_SIZE", "1")) > 1:
            refusals.append(
                f"WORLD_SIZE={os.environ['WORLD_SIZE']} is set in the environment: several processes were started, but"
                " one takes all devices of a host. Start the script once a host, with python."
            )
        if refusals:
            raise ValueError("\n".join(refusals))
        return notes

    @classmethod
    def _released_kind(cls) -> type:
        """The class of trl_jax that this is or derives from: its defaults are the ones to be away from."""
        return next(kind for kind in cls.__mro__ if kind.__module__.startswith("trl_jax."))

    def _without_torch(self, post_init) -> None:
        """Run transformers' own post-init with what it would hand to torch set aside."""
        aside = {name: getattr(self, name) for name in TORCH_ONLY}
        for name, nothing in TORCH_ONLY.items():
            setattr(self, name, nothing)
        post_init()
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

    @staticmethod
    def _frames_to_caller() -> int:
        """How far a warning must reach to point at the line that builds the configuration."""
        frame, depth = inspect.currentframe().f_back, 1
        while frame.f_code.co_name in ("__post_init__", "__init__", "__call__"):
            frame, depth = frame.f_back, depth + 1
        return depth

    @property
    def compute_dtype(self) -> str:
        """What the forward pass computes in, over float32 weights: float16 means bfloat16 here."""
        return "bfloat16" if self.bf16 or self.fp16 else "float32"

    @property
    def eval_dtype(self) -> str | None:
        """What the weights themselves are cast to for evaluation; None leaves them float32."""
        return "bfloat16" if self.bf16_full_eval or self.fp16_full_eval else None

    @property
    def device(self) -> Device:
        return Device(use_cpu=self.use_cpu)

    def jax_devices(self) -> list:
        """All that a run may use, of every process; JAX starts here, so processes find each other first."""
        import jax

        from trl_jax.engine.processes import join

        join(self.coordinator_address, self.num_processes, self.process_id)
        return jax.devices("cpu") if self.use_cpu else jax.devices()

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
        from trl_jax.trainer.devices import mesh_sizes

        return prod(mesh_sizes(self).values())

    @property
    def process_index(self) -> int:
        import jax

        return jax.process_index() if jax.distributed.is_initialized() else 0

    @property
    def local_process_index(self) -> int:
        """A host has one process."""
        return 0

    @contextlib.contextmanager
    def main_process_first(self, local: bool = True, desc: str = "work"):
        """The first process goes ahead; the others wait for it, and find what it left in a cache they share."""
        from trl_jax.engine.processes import barrier

        if self.process_index:
            barrier(f"main_process_first: {desc}")
        yield
        if not self.process_index:
            barrier(f"main_process_first: {desc}")

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


def _unshared(value: Any) -> Any:
    return {key: _unshared(entry) for key, entry in value.items()} if isinstance(value, dict) else value


def check_output_dir(output_dir: str) -> None:
    """Say now, and not at the first checkpoint, that output_dir cannot be written. Creates nothing."""
    folder = Path(output_dir).absolute()
    nearest = next(path for path in (folder, *folder.parents) if path.exists())
    if not nearest.is_dir():
        raise NotADirectoryError(
            f"output_dir={output_dir!r}: {nearest} is a file. Choose another output_dir."
        )
    if not os.access(nearest, os.W_OK):
        raise PermissionError(
            f"output_dir={output_dir!r}: {nearest} is not writable. Choose another output_dir."
        )
