"""The command `trl-jax plan`: reports the memory, FLOPs and communication of a run on devices you do not have."""

from __future__ import annotations

import copy
import json
import warnings
from dataclasses import replace
from pathlib import Path
from typing import TYPE_CHECKING, Any

from trl_jax.core.chips import topology
from trl_jax.core.trainers import DEFAULT, TRAINERS, TrainerNames
from trl_jax.scripts.plan.parser import PlanArguments, PlanParser

if TYPE_CHECKING:
    from trl_jax.core.chips import Topology
    from trl_jax.dryrun.plan import Run
    from trl_jax.run.arguments.base_config import BaseConfig
    from trl_jax.scripts.utils import DatasetMixtureConfig, ScriptArguments
    from trl_jax.trainer.model_config import ModelConfig


# Arguments that change neither the memory nor the time of a step or an evaluation.
NO_PART = frozenset(
    """
    output_dir logging_strategy logging_steps logging_first_step log_level log_level_replica disable_tqdm report_to
    run_name project trackio_space_id trackio_bucket_id trackio_static_space_id include_num_input_tokens_seen debug
    eval_steps eval_delay prediction_loss_only eval_do_concat_batches batch_eval_metrics include_for_metrics eval_report
    eval_subset_column bf16_full_eval fp16_full_eval
    save_strategy save_steps save_total_limit save_only_model use_cache load_best_model_at_end metric_for_best_model
    greater_is_better push_to_hub hub_token hub_model_id hub_private_repo hub_strategy hub_always_push hub_revision
    resume_from_checkpoint ignore_data_skip restore_callback_states_from_checkpoint
    auto_find_batch_size full_determinism skip_memory_metrics use_cpu coordinator_address num_processes process_id
    precompute_ref_batch_size sync_ref_model ref_model_mixup_alpha ref_model_sync_steps
    log_completions log_completions_hub_repo log_unique_prompts num_completions_to_print remove_unused_columns
    reward_timeout missing_eos_penalty reward_clip_range scale_rewards multi_objective_aggregation normalize_advantages
    mask_truncated_completions max_tool_calling_iterations use_transformers_continuous_batching
    top_k top_p min_p repetition_penalty use_vllm vllm_importance_sampling_cap vllm_importance_sampling_clip_max
    vllm_importance_sampling_clip_min vllm_importance_sampling_correction vllm_importance_sampling_mode
    """.split()
)


def main(
    plan_args: PlanArguments,
    script_args: ScriptArguments,
    training_args: BaseConfig,
    model_args: ModelConfig,
    dataset_args: DatasetMixtureConfig,
) -> None:
    """Print the plan, and write it to the file of `--json`. Trains nothing, downloads no weights.

    Raises:
        ValueError: the topology is unknown, or the run is one that training refuses.
    """
    from trl_jax.dryrun.compiler import prepare
    from trl_jax.dryrun.generation import Size
    from trl_jax.dryrun.plan import plan
    from trl_jax.dryrun.suggestions import suggestions_for
    from trl_jax.scripts.plan.text import suggestions_text, text

    target = topology(plan_args.topology)
    prepare(target)
    ignored = without_part(training_args)
    if ignored:
        names = ", ".join(f"--{name}" for name in ignored)
        warnings.warn(f"A plan is of a step and of a pass of evaluation; no part in it have {names}.", stacklevel=2)
    run = _run_of(TRAINERS[plan_args.trainer], target, script_args, training_args, model_args, dataset_args)

    if plan_args.generate is not None:
        run = replace(run, generation=Size.parsed(plan_args.generate))

    def planned(args: BaseConfig, compiles: bool = True) -> Any:
        return plan(run, args, target, compiles=compiles)

    result = planned(training_args)
    print(text(result), flush=True)
    suggestions = []
    if result.fits is False and plan_args.suggestions:
        for suggestion in suggestions_for(training_args, result, planned):
            suggestions.append(suggestion)
            print(suggestions_text(suggestion), flush=True)
    if plan_args.json is not None:
        figures = result.as_dict() | {"suggestions": [suggestion.as_dict() for suggestion in suggestions]}
        Path(plan_args.json).write_text(json.dumps(figures, indent=2) + "\n", encoding="utf-8")


def without_part(args: BaseConfig) -> list[str]:
    """The arguments of `NO_PART` that the config has and that differ from their defaults."""
    default = type(args)(args.output_dir, eval_strategy=args.eval_strategy, use_cpu=args.use_cpu)
    usual = vars(default) | {"output_dir": type(args)().output_dir, "use_cpu": False}
    return sorted(name for name in NO_PART & usual.keys() if vars(args)[name] != usual[name])


def _run_of(
    names: TrainerNames,
    target: Topology,
    script_args: ScriptArguments,
    training_args: BaseConfig,
    model_args: ModelConfig,
    dataset_args: DatasetMixtureConfig,
) -> Run:
    """The run to plan: checkpoint, adapter, and the rows if a dataset is named."""
    from trl_jax.data.rows.tokenizer import load_tokenizer
    from trl_jax.dryrun.abstract_run import Rows, evaluates, planned, task_of
    from trl_jax.dryrun.plan import Run
    from trl_jax.run.model.loading import find, quantization_of, tokenizer_folder
    from trl_jax.scripts.distillation import teacher_init_kwargs
    from trl_jax.scripts.reward_sources import RewardSources
    from trl_jax.scripts.training import check_flags, datasets_of, model_init_kwargs, split_of
    from trl_jax.trainer.utils import get_peft_config, get_quantization_config

    mixture = dataset_args if dataset_args.datasets else None
    has_rows = script_args.dataset_name is not None or mixture is not None
    check_flags(script_args, model_args, rows=names.rows, mixes=mixture is not None or not has_rows)
    args = copy.copy(training_args)
    args.model_init_kwargs = model_init_kwargs(training_args, model_args)
    trainer = names.load_trainer()
    head = task_of(trainer, planned(args, target, args.output_dir)).head
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
    splits = datasets_of(script_args, mixture)
    test = split_of(splits, script_args, "dataset_test_split") if evaluates(args) else None
    return replace(run, rows=Rows(split_of(splits, script_args, "dataset_train_split"), test, tokenizer))


def make_parser(prog: str | None = None) -> PlanParser:
    """Parser of (PlanArguments, ScriptArguments, the trainer's config, ModelConfig, DatasetMixtureConfig)."""
    return PlanParser(DEFAULT, prog)


if __name__ == "__main__":
    main(*make_parser().parse_args_and_config())
