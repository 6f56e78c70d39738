"""Plan a run: memory, time and communication, and what to change if it does not fit."""

from __future__ import annotations

import bisect
import copy
import tempfile
from collections.abc import Callable, Iterator
from dataclasses import dataclass, field, replace
from typing import Any, NamedTuple

from trl_jax.config.base import BaseConfig
from trl_jax.core.outputs import BLOCK
from trl_jax.core.trainers import names_of_config
from trl_jax.data.checks import has_images
from trl_jax.generation.generator import Limit
from trl_jax.hub.auto import Checkpoint
from trl_jax.hub.generate import check_generates
from trl_jax.hub.peft_config import AdapterConfig
from trl_jax.hub.pretrained import PreTrainedModel
from trl_jax.hub.quantization import BitsAndBytesConfig
from trl_jax.nn.attention import cudnn, splash
from trl_jax.nn.attention.attention import QUERY_BLOCK
from trl_jax.plan import generation, trace
from trl_jax.plan.chips import Topology
from trl_jax.plan.compile import Bound, Compiled, bound, compiled, device_bytes, gpu_room, no_compiler
from trl_jax.plan.generation import CompiledPrograms, Generation, Programs, Size, abstract_weights
from trl_jax.trainer.base_trainer import BaseTrainer
from trl_jax.training import layout as layout_choice
from trl_jax.training.devices import usable_memory
from trl_jax.training.model import outlined, with_images
from trl_jax.training.reference import PREFIX

_BY_ROWS = f"plain XLA, per row, in blocks of {QUERY_BLOCK} queries"
_ALONG_PACKED = "{}, along packed rows, in blocks of {} queries"


class Memory(NamedTuple):
    """Bytes per device of the arguments of a step or an evaluation, from their shapes and shardings.

    parameters: including frozen ones and a reference model.
    """

    parameters: int
    moments: int
    batch: int

    @classmethod
    def of(cls, arguments: trace.StepArguments) -> Memory:
        """The memory of these arguments."""
        weights = (arguments.params, arguments.frozen)
        return cls(device_bytes(weights), device_bytes(arguments.state), device_bytes(arguments.batch))


class Evaluation(NamedTuple):
    """An evaluation during training: the pass of one device, its memory, and the compiler's figures."""

    one: trace.Pass
    memory: Memory
    compiled: Compiled | None


class Phase(NamedTuple):
    """A step, an evaluation or a generation of the run.

    peak: peak bytes per device; if nothing was compiled, bytes of the arguments only.
    fits: None if unknown.
    """

    name: str
    peak: int
    fits: bool | None
    compiled: Compiled | None


@dataclass(frozen=True)
class Plan:
    """The figures of one run. Bytes, FLOPs and seconds are per device and step.

    mesh: sizes of the axes with more than one device.
    lengths: length of (packed) rows in tokens -> number of surveyed steps with it.
    places, tokens: mean tokens per step on all devices together, with padding and without.
    one: the pass that a device computes at once.
    remat: whether layers are recomputed in the backward pass.
    why: why `compiled` is None.
    bound: None if the chip or the compiler's figures are unknown.
    evaluation: None if the run does not evaluate.
    generation: in online training, or if requested.
    scorer: bytes of a reward model.
    unread: bytes of a reference model that only generation reads, so it is not an argument of a step or an evaluation.
    servers_generate: whether completions come from servers, so there is no generation to plan.
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
    one: trace.Pass
    memory: Memory
    why: str | None
    compiled: Compiled | None
    bound: Bound | None
    settings: dict[str, Any] = field(default_factory=dict)

    evaluation: Evaluation | None = None
    generation: Generation | None = None
    scorer: int = 0
    unread: int = 0
    servers_generate: bool = False

    @property
    def phases(self) -> list[Phase]:
        """The step and, if the run has them, the evaluation and the generation."""
        phases = [self._phase("a step", sum(self.memory), self.compiled, self.unread)]
        if self.evaluation is not None:
            memory, compiled = sum(self.evaluation.memory), self.evaluation.compiled
            phases.append(self._phase("evaluation", memory, compiled, self.unread))
        if self.generation is not None:
            most, other_bytes = self.generation.most, self.generation.other_bytes
            phases.append(self._phase("generation", self.memory.parameters + self.memory.moments, most, other_bytes))
        return phases

    def _phase(self, name: str, arguments: int, compiled: Compiled | None, other_bytes: int) -> Phase:
        """A phase, including the reward model.

        Args:
            arguments: bytes of the arguments.
            other_bytes: bytes in memory that are not in the compiled program.
        """
        chip, peak = self.topology.chip, (arguments if compiled is None else compiled.peak + other_bytes) + self.scorer
        fits = None if chip is None else peak <= chip.memory
        if fits:
            fits = compiled and compiled.fits and (compiled.room is None or peak <= compiled.room)
        return Phase(name, peak, fits, compiled)

    @property
    def largest(self) -> Phase:
        """The phase that decides whether the run fits: one that does not fit, else the one with the highest peak."""
        return max(self.phases, key=lambda phase: (phase.fits is False, phase.peak))

    @property
    def peak(self) -> int:
        """Peak bytes per device."""
        return self.largest.peak

    @property
    def fits(self) -> bool | None:
        """Whether the run fits; None if nothing was compiled, and for simulated devices, which have no memory limit."""
        return self.largest.fits

    def as_dict(self) -> dict[str, Any]:
        """The plan as nested dicts, lists, numbers and strings, for JSON."""
        return _to_json(vars(self) | {"peak": self.peak, "fits": self.fits})


def _to_json(value: Any) -> Any:
    """Turn named tuples into dicts and other tuples into lists, recursively."""
    if isinstance(value, tuple) and type(value) is not tuple:
        value = value._asdict()
    if isinstance(value, dict):
        return {str(key): _to_json(entry) for key, entry in value.items()}
    return [_to_json(entry) for entry in value] if isinstance(value, list | tuple) else value


@dataclass(frozen=True)
class Run:
    """The run to plan.

    checkpoint: its weights are not read.
    adapter, quantization: of the base weights, if any.
    trainer: None for the trainer that the config belongs to.
    scorer: a reward model.
    teacher: the teacher, in distillation.
    generation: an additional generation to plan, for a trainer that does not generate.
    """

    checkpoint: Checkpoint
    rows: trace.Rows = trace.Rows()
    adapter: AdapterConfig | None = None
    quantization: BitsAndBytesConfig | None = None
    trainer: type[BaseTrainer] | None = None
    scorer: Checkpoint | None = None
    teacher: Checkpoint | None = None
    generation: Size | None = None


def plan(run: Run, args: BaseConfig, topology: Topology, *, compiles: bool = True) -> Plan:
    """Plan a run.

    Args:
        compiles: False counts the arguments without compiling.

    Raises:
        ValueError: the trainer rejects the arguments, or there is neither a dataset nor a max_length.
        TypeError: `run.trainer` is None, and the config is not one of trl_jax's.
    """
    trainer_cls = names_of_config(args).load_trainer() if run.trainer is None else run.trainer
    if run.rows.train is not None and has_images(run.rows.train):
        teacher = None if run.teacher is None else with_images(run.teacher)
        run = replace(run, checkpoint=with_images(run.checkpoint), teacher=teacher)
    with tempfile.TemporaryDirectory() as folder:
        planned = trace.planned_config(args, topology, folder)
        model = outlined(run.checkpoint, planned, run.adapter, run.quantization)
        teacher = None if run.teacher is None else outlined(run.teacher, planned, None, None)
        trainer = trace.trainer_of(trainer_cls, model, planned, run.rows, teacher)
        online_steps = generation.longest_steps(trainer)
        survey = trace.survey_steps(trainer, online_steps)
    why, tx = no_compiler(topology) if compiles else "nothing was compiled", trainer.parts.training.build_optimizer()
    arguments, compiles = trace.step_arguments(trainer, tx, survey.largest), why is None
    evaluation = _evaluation(trainer, arguments, topology, compiles) if trace.evaluates(args) else None
    user_loss = trainer.parts.train_step.user_loss is not None  # it remats layers if the arguments allow it
    for remat in args.remats[-1:] if user_loss else args.remats:
        planned_run = _plan_with_remat(run.checkpoint.name, topology, trainer, survey, arguments, remat, compiles)
        if planned_run.phases[0].fits is not False:
            break
    extras = {"evaluation": evaluation, "scorer": _unsharded_bytes(run.scorer)}
    reference = trainer.parts.setup.reference
    task = trainer.parts.setup.task
    if reference is not None and not (task.compared or task.compares_distributions):
        extras["unread"] = device_bytes({path: arguments.frozen[path] for path in reference.arrays})
    sizes = [] if run.generation is None else [run.generation]
    if generation.uses_servers(trainer):
        extras["servers_generate"] = True
    elif trainer.parts.setup.online:
        sizes = generation.sizes(trainer.parts, evaluates=trace.evaluates(args))
    elif online_steps is not None:
        sizes += online_steps.sizes(trainer.parts.setup)
    if sizes:
        models = [trainer.model] if online_steps is None else online_steps.models
        plans = [_generation(trainer, m, arguments, sizes, topology, compiles, extras["scorer"]) for m in models]
        extras["generation"] = max(plans, key=lambda plan: plan.other_bytes + (plan.most.peak if plan.most else 0))
    return replace(planned_run, why=why, **extras)


def _unsharded_bytes(checkpoint: Checkpoint | None) -> int:
    """Bytes of a model that is not sharded."""
    if checkpoint is None:
        return 0
    arrays = checkpoint.outline(None, None, sharded=False).arrays
    return sum(leaf.size * leaf.dtype.itemsize for leaf in arrays.values())


def _plan_with_remat(
    model: str,
    topology: Topology,
    trainer: BaseTrainer,
    survey: trace.Survey,
    arguments: trace.StepArguments,
    remat: bool | str,
    compiles: bool,
) -> Plan:
    args, tx = trainer.args, trainer.parts.training.build_optimizer()
    result = compiled(trace.trace_step(trainer, tx, arguments, remat=remat), topology) if compiles else None
    return Plan(
        model=model,
        parameters=trainer.model.num_parameters(),
        trained=trainer.model.num_parameters(only_trainable=True),
        topology=topology,
        mesh=trace.mesh_of(trainer),
        layout=survey.layout,
        attention=_attention(topology.platform, trainer, survey.layout),
        remat=remat,
        lengths=survey.lengths,
        places=survey.places,
        tokens=survey.tokens,
        one=trace.device_pass(trainer, arguments),
        memory=Memory.of(arguments),
        why=None,
        compiled=result,
        bound=_bound(topology, result, arguments),
        settings=_settings(args),
    )


def _attention(platform: str, trainer: BaseTrainer, layout: str) -> str:
    """Describe the attention kernel."""
    args, backend, arch = trainer.args, trainer.model.backend, trace.arch_of(trainer)
    windowed = layout_choice.windowed(args, backend)
    if platform == "gpu":
        flash = backend.traits.causal and not windowed and arch.softcap is None and not arch.sinks
        flash = flash and cudnn.supports_head_dim(arch.head_dim, args.compute_dtype)
        return "cuDNN flash attention" if flash else f"{_BY_ROWS}, text by text"
    if layout == "padded":
        return _BY_ROWS
    # Completions are attended text by text, also in windowed layers.
    by_text = trainer.parts.setup.online
    splash_runs = platform == "tpu" and (by_text or not (windowed and layout == "shared"))
    return _ALONG_PACKED.format(*(("splash attention", splash.BLOCK) if splash_runs else ("plain XLA", BLOCK)))


def _evaluation(trainer: BaseTrainer, step: trace.StepArguments, topology: Topology, compiles: bool) -> Evaluation:
    arguments = trace.evaluation_arguments(trainer, step, trace.largest_evaluated(trainer))
    result = compiled(trace.trace_evaluation(trainer, arguments), topology) if compiles else None
    return Evaluation(trace.device_pass(trainer, arguments), Memory.of(arguments), result)


def _generation(
    trainer: BaseTrainer,
    model: PreTrainedModel,
    step: trace.StepArguments,
    sizes: list[Size],
    topology: Topology,
    compiles: bool,
    scorer: int,
) -> Generation:
    """Plan the largest of these generations. If there are two, the second is for evaluation.

    Args:
        model: samples the completions: the run's model or its teacher.
        scorer: bytes of a reward model.
    """
    check_generates(model)
    run, dtype = trainer.parts.setup, trainer.args.compute_dtype
    placed = step.frozen | step.params
    paths = {path: path if model is trainer.model else PREFIX + path for path in model.arrays}
    arrays = {path: placed[full_path] for path, full_path in paths.items()}
    with trace.on_device(trainer):
        head_dtype = "float32" if trainer.args.cast_lm_head_to_fp32 else dtype
        weights = abstract_weights(model.graph, arrays, dtype, head_dtype, topology)
    evaluates, size = max(enumerate(sizes), key=lambda pair: pair[1].tokens)
    at_once = size
    if run.online:
        # Traced on this machine's device: the cache has the same shapes on every platform.
        limit = _limit(trainer.args, topology, device_bytes((placed, step.state)) + scorer)
        at_once = size.at_once(weights, limit.after_copies(weights, arrays))
    with trace.on_device(trainer):
        exact = topology.platform == "cpu" and topology.devices == 1 and dtype == "float32"
        programs = Programs(weights, at_once, vocabulary=run.vocab_size, exact=exact)
        compiled = programs.compiled(topology) if compiles else CompiledPrograms(None, None, None, 0)
    others = {path: leaf for path, leaf in placed.items() if path not in paths.values()}
    other_bytes = device_bytes((step.state, others))
    return Generation(
        size, at_once, compiled.cache, compiled.copied, compiled.most, compiled.decode, other_bytes, bool(evaluates)
    )


def _limit(args: BaseConfig, topology: Topology, used: int) -> Limit:
    """The limit of a run's generation on a device that already holds `used` bytes, as in `training.rollout`."""
    if topology.chip is None:
        return Limit(args.max_completions_per_device)
    memory = gpu_room(topology) if topology.platform == "gpu" else int(topology.chip.memory)
    return Limit(args.max_completions_per_device, max(usable_memory(memory) - used, 0))


def _bound(topology: Topology, result: Compiled | None, arguments: trace.StepArguments) -> Bound | None:
    if topology.chip is None or result is None or not result.fits:
        return None
    return bound(topology.chip, result, device_bytes((arguments.params, arguments.state)))


def _settings(args: BaseConfig) -> dict[str, Any]:
    settings = {
        "per_device_train_batch_size": args.per_device_train_batch_size,
        "gradient_accumulation_steps": args.gradient_accumulation_steps,
        "max_length": args.max_length,
        "gradient_checkpointing": args.gradient_checkpointing,
        "compute": args.compute_dtype,
    }
    names = (
        "generation_batch_size", "num_generations", "max_prompt_length", "max_completion_length",
        "max_tool_calling_iterations",
    )  # fmt: skip
    return settings | {name: vars(args)[name] for name in names if name in vars(args)}


# Suggestions: each one is planned, too

PlanConfig = Callable[[BaseConfig], Plan]


class Suggestion(NamedTuple):
    """Arguments to change, by name, and the plan of the run with them."""

    settings: dict[str, Any]
    plan: Plan

    @property
    def name(self) -> str:
        """The settings as flags."""
        return " ".join(f"--{name} {value}" for name, value in self.settings.items())

    def as_dict(self) -> dict[str, Any]:
        """The suggestion as nested dicts, for JSON."""
        return {"settings": self.settings, "plan": self.plan.as_dict()}


def suggestions_for(args: BaseConfig, plan: Plan, plan_config: PlanConfig) -> Iterator[Suggestion]:
    """Plan each suggestion separately and, if none is enough, all of them together.

    For batch sizes and max_length, the largest value that fits is suggested, or else the smallest.

    Args:
        plan: the plan of `args`, which does not fit.
        plan_config: plans a config.
    """
    together: dict[str, Any] = {}
    enough = False
    for settings in switches(args, plan):
        together |= settings
        suggestion = _suggest(args, settings, plan_config)
        enough |= bool(suggestion.plan.fits)
        yield suggestion
    sizes_of = {"a step": batch_sizes(args), "evaluation": eval_batch_sizes(args)}
    sizes_of["generation"] = generations(args, plan)
    for sizes in (*(sizes_of[phase.name] for phase in plan.phases if phase.fits is False), max_lengths(args)):
        suggestion = _largest(args, sizes, plan_config)
        if suggestion is not None:
            together |= suggestion.settings
            enough |= bool(suggestion.plan.fits)
            yield suggestion
    if not enough and together:
        yield _suggest(args, together, plan_config)


def switches(args: BaseConfig, plan: Plan) -> list[dict[str, Any]]:
    """Settings that leave the examples of a step unchanged, are not set yet, and help the phase that does not fit."""
    settings, step = [], plan.phases[0].fits is False
    if step and not args.gradient_checkpointing:
        settings.append({"gradient_checkpointing": True})
    if args.compute_dtype != "bfloat16":
        settings.append({"bf16": True})
    if plan.mesh.get("data", 1) > 1:
        others = [f"{axis}:{size}" for axis, size in plan.mesh.items() if axis not in ("data", "fsdp")]
        shards = plan.mesh["data"] * plan.mesh.get("fsdp", 1)
        settings.append({"mesh_shape": ",".join([f"fsdp:{shards}", *others])})
    if step and args.gradient_checkpointing and not args.activation_offloading and plan.topology.platform == "tpu":
        settings.append({"activation_offloading": True})
    return settings


def batch_sizes(args: BaseConfig) -> list[dict[str, Any]]:
    """per_device_train_batch_size halved down to one, with gradient_accumulation_steps doubled: the same steps."""
    size, passes = args.per_device_train_batch_size, args.gradient_accumulation_steps
    divisors = [2**power for power in range(1, size.bit_length()) if size % 2**power == 0]
    generation_steps = vars(args).get("steps_per_generation")  # if it were unchanged, generations would become smaller
    return [
        {"per_device_train_batch_size": size // divisor, "gradient_accumulation_steps": passes * divisor}
        | ({} if generation_steps is None else {"steps_per_generation": generation_steps * divisor})
        for divisor in divisors
    ]


def eval_batch_sizes(args: BaseConfig) -> list[dict[str, Any]]:
    """per_device_eval_batch_size halved, down to one."""
    size = args.per_device_eval_batch_size
    return [{"per_device_eval_batch_size": size >> power} for power in range(1, size.bit_length())]


def generations(args: BaseConfig, plan: Plan) -> list[dict[str, Any]]:
    """Halved generations of whole micro-batches and groups; if evaluation generates more, halved evaluation batches."""
    largest = plan.generation
    if largest is None or "generation_batch_size" not in vars(args):
        return []
    if largest.evaluates:
        return eval_batch_sizes(args)
    micro = args.per_device_train_batch_size * plan.mesh.get("data", 1) * plan.mesh.get("fsdp", 1)
    halves = [largest.size.completions / 2**power for power in range(1, largest.size.completions.bit_length())]
    sizes = [int(size) for size in halves if size % micro == 0 and size % args.num_generations == 0]
    if args.generation_batch_size is not None and args.steps_per_generation is None:
        return [{"generation_batch_size": size} for size in sizes]
    return [{"steps_per_generation": size // micro} for size in sizes]


def max_lengths(args: BaseConfig) -> list[dict[str, Any]]:
    """max_length or max_completion_length halved, down to 256. Longer texts are then truncated or dropped."""
    name = "max_completion_length" if "max_completion_length" in vars(args) else "max_length"
    longest = vars(args).get(name)
    lengths = [] if longest is None else [longest >> power for power in range(1, 16)]
    return [{name: length} for length in lengths if length >= 256]


def _largest(args: BaseConfig, sizes: list[dict[str, Any]], plan_config: PlanConfig) -> Suggestion | None:
    """The first of these sizes, in decreasing order, that fits, else the last; None if there are none."""
    suggestions = {}

    def fits(index: int) -> bool:
        suggestions[index] = _suggest(args, sizes[index], plan_config)
        return bool(suggestions[index].plan.fits)

    first = bisect.bisect_left(range(len(sizes)), True, key=fits)
    return suggestions[min(first, len(sizes) - 1)] if sizes else None


def _suggest(args: BaseConfig, settings: dict[str, Any], plan_config: PlanConfig) -> Suggestion:
    return Suggestion(settings, plan_config(_with_settings(args, settings)))


def _with_settings(args: BaseConfig, settings: dict[str, Any]) -> BaseConfig:
    changed = copy.copy(args)
    for name, value in settings.items():
        setattr(changed, name, value)
    return changed
