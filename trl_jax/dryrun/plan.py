"""What a run would need of devices that are not there: its step compiled ahead of time, beside arithmetic."""

from __future__ import annotations

import math
import tempfile
from dataclasses import dataclass, field, replace
from typing import Any, NamedTuple

from trl_jax.core.chips import Topology
from trl_jax.core.packed import BLOCK
from trl_jax.dryrun import abstract_run, step_flops, step_memory, trace
from trl_jax.dryrun.compiler import Compiled, compiled, no_compiler
from trl_jax.hub.auto import Checkpoint
from trl_jax.hub.peft.lora_config import LoraConfig
from trl_jax.hub.peft.quantization import BitsAndBytesConfig
from trl_jax.nn.attention import cudnn, splash
from trl_jax.nn.attention.padded import QUERY_BLOCK
from trl_jax.run import layout_choice
from trl_jax.run.model_loading import outlined
from trl_jax.trainer.base_trainer import BaseTrainer
from trl_jax.trainer.reward_config import RewardConfig

_BY_ROW = f"plain XLA, {QUERY_BLOCK} queries of a row at a time against the keys before them"
_ALONG = "{}, {} queries of a stream at a time against the blocks of keys that any of them sees"


class Evaluation(NamedTuple):
    """A pass of evaluation on the way: what a device computes at once, and what is on it meanwhile."""

    one: step_memory.Pass
    memory: step_memory.Memory
    compiled: Compiled | None


class Part(NamedTuple):
    """Of a run: `peak` is the most bytes at once, by the compiler where there is one, else by arithmetic (which
    `reckoned` is); `fits` is None where no one knows."""

    name: str
    peak: int
    reckoned: int
    fits: bool | None
    compiled: Compiled | None


@dataclass(frozen=True)
class Plan:
    """Bytes, FLOPs and seconds are a device's, and a step's.

    lengths: of rows or streams, and how many of the steps looked at have each. places, tokens: means over steps on all
    devices, of what is computed on and of real text. remat: whole layers are computed twice.
    `compiled` is None where there is no compiler, and `why` says so. `evaluation` is None where the run has none.
    """

    model: str
    parameters: int
    trained: int
    topology: Topology
    mesh: dict[str, int]
    layout: str
    attention: str
    remat: bool | str
    lengths: dict[int, int]
    places: float
    tokens: float
    one: step_memory.Pass
    memory: step_memory.Memory
    flops: int
    why: str | None
    compiled: Compiled | None
    bound: step_flops.Bound | None
    settings: dict[str, Any] = field(default_factory=dict)

    evaluation: Evaluation | None = None

    @property
    def parts(self) -> list[Part]:
        """The step and, where there is one, the evaluation."""
        told = [("a step", self.memory, self.compiled)]
        if self.evaluation is not None:
            told.append(("evaluation", self.evaluation.memory, self.evaluation.compiled))
        return [_part(name, memory, compiled, self.topology) for name, memory, compiled in told]

    @property
    def largest(self) -> Part:
        """The one that decides: which does not fit, or has the higher peak."""
        return max(self.parts, key=lambda part: (part.fits is False, part.peak))

    @property
    def peak(self) -> int:
        return self.largest.peak

    @property
    def fits(self) -> bool | None:
        """None where no one knows: a pretended device has no memory of its own."""
        return self.largest.fits

    def as_dict(self) -> dict[str, Any]:
        """For JSON."""
        return _plain(vars(self) | {"peak": self.peak, "fits": self.fits})


def _part(name: str, memory: step_memory.Memory, compiled: Compiled | None, topology: Topology) -> Part:
    peak, fits = (memory.peak, None) if compiled is None else (compiled.peak, compiled.fits)
    if topology.chip is not None and compiled is None:
        fits = peak <= topology.chip.memory
    return Part(name, peak, memory.peak, fits, compiled)


def _plain(value: Any) -> Any:
    """Dicts, lists and numbers."""
    if isinstance(value, tuple) and type(value) is not tuple:
        value = value._asdict()
    if isinstance(value, dict):
        return {str(key): _plain(entry) for key, entry in value.items()}
    return [_plain(entry) for entry in value] if isinstance(value, list | tuple) else value


@dataclass(frozen=True)
class Run:
    """What is planned: a checkpoint, whose weights are not looked at, on these rows; maybe an adapter on it, and how
    weights beside that are held."""

    checkpoint: Checkpoint
    rows: abstract_run.Rows = abstract_run.Rows()
    adapter: LoraConfig | None = None
    quantization: BitsAndBytesConfig | None = None


def plan(run: Run, args: RewardConfig, topology: Topology, *, compiles: bool = True) -> Plan:
    """Plan a run.

    Args:
        compiles: False leaves it at arithmetic.

    Raises:
        ValueError: what RewardTrainer refuses, or a text has no bound.
    """
    with tempfile.TemporaryDirectory() as folder:
        planned = abstract_run.planned(args, topology, folder)
        model = outlined(run.checkpoint, planned, run.adapter, run.quantization)
        trainer = abstract_run.trainer_of(model, planned, run.rows)
        found = trace.batches(trainer)
    why, tx = no_compiler(topology) if compiles else "nothing was compiled", trainer.parts.training.made_optimizer()
    given, compiles = trace.given(trainer, tx, found.largest), why is None
    evaluation = _evaluation(trainer, given, topology, compiles) if abstract_run.evaluates(args) else None
    for remat in args.remats:
        made = _planned(run.checkpoint.name, topology, trainer, found, given, remat, compiles)
        if made.parts[0].fits is not False:
            break
    return replace(made, why=why, evaluation=evaluation)


def _planned(
    model: str,
    topology: Topology,
    trainer: BaseTrainer,
    found: trace.Surveyed,
    given: step_memory.Given,
    remat: bool | str,
    compiles: bool,
) -> Plan:
    args, tx = trainer.args, trainer.parts.training.made_optimizer()
    result = compiled(trace.traced(trainer, tx, given, remat=remat), topology) if compiles else None
    layout = trainer.loader(trainer.train_dataset, training=True).layout
    one, arch, maps = trace.one_pass(trainer, given), trace.arch_of(trainer), trace.maps(trainer)
    causal, gradients = trainer.model.backend.causal, trace.gradients(trainer, given)
    flops = step_flops.flops(maps, found.largest, arch, causal=causal, remat=remat)
    return Plan(
        model=model,
        parameters=trainer.model.num_parameters(),
        trained=trainer.model.num_parameters(only_trainable=True),
        topology=topology,
        mesh=trace.mesh_of(trainer),
        layout=layout,
        attention=_attention(topology.platform, trainer, arch, layout),
        remat=remat,
        lengths=found.lengths,
        places=found.places,
        tokens=found.tokens,
        one=one,
        memory=step_memory.memory(given, gradients, one, arch, maps, dtype=args.compute_dtype, remat=remat),
        flops=flops // math.prod(trace.mesh_of(trainer).values()),
        why=None,
        compiled=result,
        bound=_bound(topology, result, given),
        settings=_settings(args),
    )


def _attention(platform: str, trainer: BaseTrainer, arch: Any, layout: str) -> str:
    """What computes it, in words."""
    args, backend = trainer.args, trainer.model.backend
    windowed = layout_choice.windowed(args, backend)
    if platform == "gpu":
        plain = backend.causal and not windowed and arch.softcap is None
        plain = plain and cudnn.takes(arch.head_dim, args.compute_dtype)
        return "cuDNN's flash attention, text by text" if plain else f"{_BY_ROW}, text by text"
    if layout == "padded":
        return _BY_ROW
    splashes = platform == "tpu" and not (windowed and layout == "shared")
    return _ALONG.format(*(("splash attention", splash.BLOCK) if splashes else ("plain XLA", BLOCK)))


def _evaluation(trainer: BaseTrainer, step: step_memory.Given, topology: Topology, compiles: bool) -> Evaluation:
    given = trace.given_evaluation(trainer, step, trace.largest_evaluated(trainer))
    one, arch, maps = trace.one_pass(trainer, given), trace.arch_of(trainer), trace.maps(trainer)
    memory = step_memory.evaluation_memory(given, one, arch, maps, dtype=trainer.args.compute_dtype)
    result = compiled(trace.traced_evaluation(trainer, given), topology) if compiles else None
    return Evaluation(one, memory, result)


def _bound(topology: Topology, result: Compiled | None, given: step_memory.Given) -> step_flops.Bound | None:
    if topology.chip is None or result is None or not result.fits:
        return None
    return step_flops.bound(topology.chip, result, step_memory.on_device((given.params, given.state)))


def _settings(args: RewardConfig) -> dict[str, Any]:
    names = "per_device_train_batch_size gradient_accumulation_steps max_length gradient_checkpointing".split()
    return {name: vars(args)[name] for name in names} | {"compute": args.compute_dtype}
