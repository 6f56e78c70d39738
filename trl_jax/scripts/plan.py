"""The command `trl-jax plan`: memory, FLOPs and communication of a run on devices that you do not have."""

from __future__ import annotations

import argparse
import copy
import json
import sys
import warnings
from collections.abc import Iterable
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import TYPE_CHECKING, Any

from trl_jax.config.generation import uses_server
from trl_jax.core.files import write_whole
from trl_jax.core.trainers import DEFAULT, TrainerNames, plannable
from trl_jax.plan.chips import known_chips, topology
from trl_jax.scripts.data import DatasetMixtureConfig
from trl_jax.scripts.train import SCRIPT_ARGUMENTS, RewardSources, fit_to_release
from trl_jax.scripts.utils import ScriptArguments, TrlParser, read_config, take_config
from trl_jax.trainer.model_config import ModelConfig

if TYPE_CHECKING:
    from trl_jax.config.base import BaseConfig
    from trl_jax.plan.chips import Topology
    from trl_jax.plan.compile import Compiled
    from trl_jax.plan.plan import Phase, Plan, Run, Suggestion


# Arguments that affect neither the memory nor the time of a step or an evaluation. (use_vllm and vllm_mode='server'
# leave out the generation.)
IGNORED_ARGUMENTS = frozenset(
    """
    output_dir logging_strategy logging_steps logging_first_step log_level log_level_replica disable_tqdm report_to
    run_name project trackio_space_id trackio_bucket_id trackio_static_space_id include_num_input_tokens_seen debug
    eval_steps eval_delay prediction_loss_only eval_do_concat_batches batch_eval_metrics include_for_metrics eval_report
    eval_subset_column bf16_full_eval fp16_full_eval
    save_strategy save_steps save_total_limit save_only_model use_cache load_best_model_at_end metric_for_best_model
    greater_is_better push_to_hub hub_token hub_model_id hub_private_repo hub_strategy hub_always_push hub_revision
    resume_from_checkpoint ignore_data_skip restore_callback_states_from_checkpoint
    auto_find_batch_size full_determinism skip_memory_metrics use_cpu coordinator_address num_processes process_id
    initialization_timeout max_minutes save_minutes log_json
    precompute_ref_batch_size sync_ref_model ref_model_mixup_alpha ref_model_sync_steps
    log_completions log_completions_hub_repo log_multimodal log_unique_prompts num_completions_to_print
    remove_unused_columns
    reward_timeout missing_eos_penalty reward_clip_range scale_rewards multi_objective_aggregation normalize_advantages
    mask_truncated_completions max_tool_calling_iterations use_transformers_continuous_batching
    top_k top_p min_p repetition_penalty use_vllm vllm_importance_sampling_cap vllm_importance_sampling_clip_max
    vllm_importance_sampling_clip_min vllm_importance_sampling_correction vllm_importance_sampling_mode vllm_mode
    vllm_server_base_url vllm_server_host vllm_server_port vllm_server_timeout vllm_structured_outputs_regex
    vllm_server_restart_timeout vllm_weights_dir generate_ahead
    """.split()
)


def main(
    plan_args: PlanArguments,
    script_args: ScriptArguments,
    training_args: BaseConfig,
    model_args: ModelConfig,
    dataset_args: DatasetMixtureConfig,
) -> None:
    """Print the plan, and write it to the file of `--json`. Does not train or download weights.

    Raises:
        ValueError: the topology is unknown, or training would refuse the arguments.
    """
    from trl_jax.plan.compile import prepare
    from trl_jax.plan.generation import Size
    from trl_jax.plan.plan import plan, suggestions_for

    target = topology(plan_args.topology)
    prepare(target)
    ignored = ignored_arguments(training_args)
    if ignored:
        names = ", ".join(f"--{name}" for name in ignored)
        warnings.warn(f"The plan covers a step and an evaluation pass; it does not depend on {names}.", stacklevel=2)
    run = _build_run(plannable()[plan_args.trainer], target, script_args, training_args, model_args, dataset_args)

    if plan_args.generate is not None:
        run = replace(run, generation=Size.parse(plan_args.generate))

    def plan_config(args: BaseConfig) -> Any:
        return plan(run, args, target)

    result = plan_config(training_args)
    print(text(result), flush=True)
    suggestions = []
    if result.fits is False and plan_args.suggestions:
        for suggestion in suggestions_for(training_args, result, plan_config):
            suggestions.append(suggestion)
            print(suggestions_text(suggestion), flush=True)
    if plan_args.json is not None:
        figures = result.as_dict() | {"suggestions": [suggestion.as_dict() for suggestion in suggestions]}
        write_whole(Path(plan_args.json), json.dumps(figures, indent=2) + "\n")


def ignored_arguments(args: BaseConfig) -> list[str]:
    """The arguments in `IGNORED_ARGUMENTS` that are set; use_vllm and vllm_mode are not ignored if servers generate."""
    default = type(args)(args.output_dir, eval_strategy=args.eval_strategy, use_cpu=args.use_cpu)
    defaults = vars(default) | {"output_dir": type(args)().output_dir, "use_cpu": False}
    ignored = IGNORED_ARGUMENTS - {"use_vllm", "vllm_mode"} if uses_server(vars(args)) else IGNORED_ARGUMENTS
    return sorted(name for name in ignored & defaults.keys() if vars(args)[name] != defaults[name])


def _build_run(
    names: TrainerNames,
    target: Topology,
    script_args: ScriptArguments,
    training_args: BaseConfig,
    model_args: ModelConfig,
    dataset_args: DatasetMixtureConfig,
) -> Run:
    """The run to plan: checkpoint, adapter, and rows if a dataset is given."""
    from trl_jax.data.chat import load_tokenizer
    from trl_jax.plan.plan import Run
    from trl_jax.plan.trace import Rows, evaluates, planned_config, task_of
    from trl_jax.scripts.train import check_flags, get_split, load_datasets, model_init_kwargs, teacher_init_kwargs
    from trl_jax.trainer.utils import get_peft_config, get_quantization_config
    from trl_jax.training.model import find, quantization_of, tokenizer_folder

    mixture = dataset_args if dataset_args.datasets else None
    has_rows = script_args.dataset_name is not None or mixture is not None
    check_flags(script_args, model_args, rows=names.rows, mixes=mixture is not None or not has_rows)
    args = copy.copy(training_args)
    args.model_init_kwargs = model_init_kwargs(training_args, model_args)
    trainer = names.load_trainer()
    head = task_of(trainer, planned_config(args, target, args.output_dir)).head
    checkpoint = find(model_args.model_name_or_path, args, head)
    quantization = quantization_of(get_quantization_config(model_args), args)
    run = Run(checkpoint, adapter=get_peft_config(model_args), quantization=quantization, trainer=trainer)
    scorer = script_args.reward_model_name_or_path if isinstance(script_args, RewardSources) else None
    if scorer is not None:
        run = replace(run, scorer=find(scorer, args, "score"))
    if "teacher_model_name_or_path" in vars(args):
        kwargs = teacher_init_kwargs(args, model_args)
        run = replace(run, teacher=find(args.teacher_model_name_or_path, args, "lm", dtype="auto", init_kwargs=kwargs))
    if not has_rows:
        return run
    code = training_args.trust_remote_code
    tokenizer = load_tokenizer(tokenizer_folder(checkpoint), checkpoint.config, trust_remote_code=code)
    splits = load_datasets(script_args, mixture)
    test = get_split(splits, script_args, "dataset_test_split") if evaluates(args) else None
    return replace(run, rows=Rows(get_split(splits, script_args, "dataset_train_split"), test, tokenizer))


def make_parser(prog: str | None = None) -> PlanParser:
    """Parser of (PlanArguments, ScriptArguments, the trainer's config, ModelConfig, DatasetMixtureConfig)."""
    return PlanParser(DEFAULT, prog)


# Flags


@dataclass
class PlanArguments:
    """The flags of `trl-jax plan` itself."""

    _argument_group_name = "plan"

    topology: str = field(metadata={"help": f"Devices to plan for. {known_chips()}"})
    json: str | None = field(default=None, metadata={"help": "JSON file to write the figures to."})
    suggestions: bool = field(
        default=True,
        metadata={
            "help": "If the run does not fit, plan settings that might make it fit, one by one.",
            "aliases": ["--levers"],  # its former name
        },
    )
    generate: str | None = field(
        default=None,
        metadata={
            "help": "Also plan a generation: 64x256+128 means 64 prompts of 256 tokens and 128 new tokens each. Online "
            "trainers such as grpo are planned with their own generation."
        },
    )
    trainer: str = field(
        default=DEFAULT, metadata={"help": "Training command to plan. It determines which flags are accepted."}
    )


class PlanParser(TrlParser):
    """Parser of (PlanArguments, ScriptArguments, the trainer's config, ModelConfig, DatasetMixtureConfig).

    The config is that of `--trainer`, on the command line or in the YAML file, or else of the argument `trainer`.
    """

    def __init__(self, trainer: str, prog: str | None = None):
        self.trainer, config = trainer, plannable()[trainer].load_config()
        script = SCRIPT_ARGUMENTS.get("grpo" if trainer == "online_dpo" else trainer, ScriptArguments)
        kinds = (PlanArguments, script, _deviceless(config), ModelConfig, DatasetMixtureConfig)
        super().__init__(kinds, prog=prog)
        self.usage = "%(prog)s --model_name_or_path MODEL --topology v5e:4x4\n       [--config FILE.yaml] [flags]"
        self.description = (
            "Check whether a run fits on devices that you do not have, for example:\n\n"
            "  trl-jax plan --model_name_or_path meta-llama/Llama-3.1-8B --topology v5e:4x4 \\\n"
            "      --fsdp full_shard --max_length 1024 --per_device_train_batch_size 1\n\n"
            "Compiles the training step for these devices, from config.json alone, and reports memory, collectives, a "
            f"lower bound on the time of a step, and whether it fits. The flags are those of `trl-jax {trainer}`. "
            "Without --dataset_name, every text is assumed to have --max_length tokens and to share no prompt. "
            f"--trainer plans another trainer: {', '.join(plannable())}."
        )
        fit_to_release(self, config.argument_table())

    def parse_args_and_config(self, args: Iterable[str] | None = None, **options: Any) -> tuple[Any, ...]:
        args = list(sys.argv[1:] if args is None else args)
        trainer = _requested_trainer(args)
        if trainer in (None, self.trainer):
            # A plan gets the teacher from this flag, whereas a script passes it to GKDTrainer.
            with warnings.catch_warnings():
                warnings.filterwarnings("ignore", message="teacher_model_name_or_path=")
                return super().parse_args_and_config(args, **options)
        if trainer not in tuple(plannable()):
            raise ValueError(f"--trainer {trainer} is unknown: expected one of {', '.join(plannable())}.")
        return PlanParser(trainer, self.prog).parse_args_and_config(args, **options)


def _deviceless(config: type) -> type:
    """The config class for a run on devices that this machine does not have."""
    return type(config.__name__, (config,), {"counts_devices": False, "__module__": config.__module__})


def _requested_trainer(args: list[str]) -> str | None:
    """The value of --trainer in the flags, or else in their YAML file."""
    flags, path = take_config(args)
    parser = argparse.ArgumentParser(add_help=False, allow_abbrev=False)
    parser.add_argument("--trainer", nargs="?")
    trainer = parser.parse_known_args(flags)[0].trainer
    return read_config(path).get("trainer") if trainer is None and path is not None else trainer


# Report

_GIB = 2**30
_REMAT = {False: "matrix products saved", True: "layers recomputed", "offloaded": "layer inputs on the host"}


def text(plan: Plan) -> str:
    """The plan as text: header, memory table, collectives, FLOPs, evaluation, generation and verdict."""
    parts = [_header(plan), _memory(plan), _collectives(plan), _compute(plan), _evaluation(plan), _generation(plan)]
    parts.append(verdict(plan))
    return "\n".join(part for part in parts if part)


def _header(plan: Plan) -> str:
    chip, settings = plan.topology.chip, plan.settings
    memory = "simulated, memory unknown" if chip is None else f"{_size(chip.memory)} each"
    devices = f"{plan.topology.devices} device(s), {memory}"
    mesh = ",".join(f"{axis}:{size}" for axis, size in plan.mesh.items()) or "none"
    remat = _REMAT[plan.remat]
    lengths = ", ".join(f"{length:,} (x{count})" for length, count in plan.lengths.items())
    batch, trained = plan.one, "" if plan.trained == plan.parameters else f" ({plan.trained:,} trained)"
    return (
        f"{plan.model}: {plan.parameters:,} parameters{trained} on {plan.topology.name}: {devices}; mesh {mesh}.\n"
        f"A step: {plan.layout}, {batch.passes} pass(es) of {batch.rows} x {batch.length:,} tokens per device; "
        f"{settings['compute']} over float32 weights, {remat}. Row lengths: {lengths}.\n"
        f"Attention: {plan.attention}."
    )


def _memory(plan: Plan) -> str:
    rows, compiled = {f"  {name}": count for name, count in plan.memory._asdict().items()}, plan.compiled
    if compiled is not None:
        rows["arguments of the step"], rows["temporaries"] = compiled.arguments, compiled.temporary
        rows["peak"] = compiled.peak
    lines = [f"{name:<26}{_size(count):>12}".rstrip() for name, count in rows.items()]
    return "\n".join(["bytes per device", *lines])


def _collectives(plan: Plan) -> str:
    return "" if plan.topology.devices == 1 else _collective_lines(plan.compiled, "per step")


def _collective_lines(compiled: Compiled | None, per: str) -> str:
    """One line per kind of collective; empty if the compiler gave no cost, for example because a step does not fit."""
    if compiled is None or compiled.cost is None:
        return ""
    collectives = compiled.cost.collectives
    lines = [
        f"  {c.kind:<20}{f'{c.group} devices':<12}{c.dtype:<6}{c.count:>6,} x{_size(c.bytes):>12}"
        f"{_size(c.sent):>12} sent"
        for c in collectives
    ]
    total = f"collectives {per}, {_size(sum(collective.bytes for collective in collectives))}:"
    return "\n".join([total, *lines]) if collectives else f"No collectives {per}."


def _compute(plan: Plan) -> str:
    cost, bound = plan.compiled and plan.compiled.cost, plan.bound
    lines = [f"A step computes {plan.places:,.0f} tokens, {plan.tokens:,.0f} of them text."]
    if cost is not None:
        note = f" (a lower bound: {cost.unknown} loops of unknown length are counted once)" if cost.unknown else ""
        lines[0] += f" Matrix products: {_flops(cost.flops)} per device{note}."
    if bound is not None:
        parts = ", ".join(f"{name} {_seconds(value)}" for name, value in bound._asdict().items())
        note = f"A step takes at least {_seconds(bound.step)} according to the chip's published figures"
        lines.append(f"{note} ({parts}). This is a lower bound, not a forecast.")
    if plan.compiled is not None:
        lines.append(f"Compiled in {plan.compiled.seconds:,.0f} s.")
    return "\n".join(lines)


def _evaluation(plan: Plan) -> str:
    if plan.evaluation is None:
        return ""
    batch, phase = plan.evaluation.one, plan.phases[1]
    return (
        f"Evaluation: a pass of {batch.rows} x {batch.length:,} tokens per device, with the optimizer state in memory: "
        f"{_peak(phase)}."
    )


def _peak(phase: Phase) -> str:
    return f"{'at least' if phase.compiled is None else 'peak'} {_size(phase.peak)}"


def _generation(plan: Plan) -> str:
    if plan.servers_generate:
        return (
            "Generation: servers generate the completions (vllm_mode='server'). Their memory and time are not planned."
        )
    if plan.generation is None:
        return ""
    (size, at_once, cache, *_), phase = plan.generation, plan.phases[-1]
    part = "" if at_once == size else f", {at_once.completions} at once"
    cached = "" if cache is None else f" a cache of {_size(cache)} per device,"
    scorer = f" and {_size(plan.scorer)} of reward model" if plan.scorer else ""
    summary = (
        f"Generation: {size.completions} completions of {size.prompts} prompt(s){part}, with room for "
        f"{size.prompt_places:,} and {size.new_places:,} tokens:{cached} with the optimizer "
        f"state{scorer} in memory: {_peak(phase)}."
    )
    if plan.settings.get("max_tool_calling_iterations"):
        summary += " With tools, the cache of the turn before is kept where memory allows it; this is not counted."
    if plan.topology.devices == 1:
        return summary
    return f"{summary}\n{_collective_lines(plan.generation.decode, 'per token of each completion')}".rstrip("\n")


def verdict(plan: Plan) -> str:
    """One sentence: whether the run fits, and how much memory it needs."""
    chip, compiled = plan.topology.chip, plan.largest.compiled
    if chip is None:
        return "Whether it fits is unknown: simulated devices have no memory limit."
    arguments = f"weights, optimizer state and batch alone take {_size(plan.peak)} of {_size(chip.memory)}"
    if plan.fits is None:
        return f"Whether it fits is unknown: {arguments}. {plan.why}."
    answer = "It fits" if plan.fits else "It does not fit"
    answer += f" in {plan.largest.name}" if not plan.fits and plan.largest.name != "a step" else ""
    if compiled is None:
        return f"{answer}: {arguments}."
    room = f"{_size(chip.memory)}" if compiled.room is None else f"the {_size(compiled.room)} that a program may use"
    return f"{answer}: {_size(plan.peak)} of {room}."


def suggestions_text(suggestion: Suggestion) -> str:
    """One line: the flags of a suggestion and the verdict."""
    plan = suggestion.plan
    took = f", compiled in {plan.compiled.seconds:,.0f} s" if plan.compiled else ""
    return f"- {suggestion.name}: {verdict(plan)[:-1]}{took}."


def _size(count: int | None) -> str:
    return "" if count is None else f"{count / _GIB:,.2f} GiB" if count >= _GIB / 10 else f"{count / 2**20:,.2f} MiB"


def _flops(count: float) -> str:
    return f"{count / 1e12:,.2f} TFLOP" if count >= 1e10 else f"{count / 1e9:,.3f} GFLOP"


def _seconds(value: float) -> str:
    return f"{value:,.2f} s" if value >= 1 else f"{1000 * value:,.2f} ms"


if __name__ == "__main__":
    main(*make_parser().parse_args_and_config())
