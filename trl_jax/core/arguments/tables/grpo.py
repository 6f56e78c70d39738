"""How each field of GRPOConfig is handled."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from trl_jax.core.arguments import rules
from trl_jax.core.arguments.table import Handling, fields
from trl_jax.core.arguments.tables.generation import GENERATION, whole_groups_only, without_sequence_axis
from trl_jax.core.arguments.values import show

LOSSES = ("grpo", "dr_grpo", "dapo", "bnpo", "cispo", "sapo", "luspo", "vespo")
SAMPLER_CORRECTIONS = ("token_truncate", "token_mask", "sequence_truncate", "sequence_mask")


def _named(known: tuple[str, ...], text: str) -> rules.Rule:
    """Of one of several names, refused in TRL's words."""

    def rule(name: str, value: Any, values: Mapping[str, Any]) -> str | None:
        return None if value in known else text.format(value)

    return rule


def _hub_repo(name: str, value: Any, values: Mapping[str, Any]) -> str | None:
    if value is None or values["log_completions"]:
        return None
    return (
        "log_completions_hub_repo is set, but log_completions is False. Enable log_completions to upload completions "
        "to the Hub, or unset log_completions_hub_repo."
    )


def _least_ratio(name: str, value: Any, values: Mapping[str, Any]) -> str | None:
    if problem := rules.number(0, optional=True)(name, value, values):
        return problem
    most = values["vllm_importance_sampling_clip_max"]
    if value is not None and most is not None and value >= most:
        return (
            f"vllm_importance_sampling_clip_min ({value}) must be less than vllm_importance_sampling_clip_max ({most})."
        )
    return None


def _correction(name: str, value: Any, values: Mapping[str, Any]) -> str | None:
    if value not in SAMPLER_CORRECTIONS:
        return (
            f"Unknown vLLM importance sampling level: {value}. Possible values are 'token_truncate', 'token_mask', "
            "'sequence_truncate', and 'sequence_mask'."
        )
    ends = (values["vllm_importance_sampling_clip_min"], values["vllm_importance_sampling_clip_max"])
    if values["vllm_importance_sampling_correction"] and value.endswith("truncate") and ends == (None, None):
        return (
            "At least one of `vllm_importance_sampling_clip_min` or `vllm_importance_sampling_clip_max` must be set "
            "when `vllm_importance_sampling_mode` is a `*_truncate` mode."
        )
    return None


_any_number = rules.number(-rules.MOST_FLOAT32, most=rules.MOST_FLOAT32)


def _least_entropy_coef(name: str, value: Any, values: Mapping[str, Any]) -> str | None:
    if problem := _any_number(name, value, values):
        return problem
    most = values["entropy_coef_max"]
    if not values["use_adaptive_entropy"] or _any_number("entropy_coef_max", most, values) or value <= most:
        return None
    return f"{show(name, value)} is above {show('entropy_coef_max', most)}: wanted at most that. Lower it."


GRPO: dict[str, Handling] = {
    **GENERATION,
    **without_sequence_axis("GRPOTrainer"),
    **whole_groups_only("GRPO"),
    **fields("cast_lm_head_to_fp32", "native"),
    **fields("max_tool_calling_iterations", "native", rule=rules.whole(1, optional=True)),
    # The loss
    **fields("loss_type", "native", rule=_named(LOSSES, f"Unknown loss type: {{}}. Should be one of {list(LOSSES)}")),
    **fields("importance_sampling_level", "native", rule=_named(
        ("token", "sequence"),
        "Unknown importance sampling level: {}. Possible values are 'token' and 'sequence'.")),
    **fields("scale_rewards", "native", rule=_named(
        ("batch", "group", "none"),
        "Invalid value for scale_rewards: {}. Must be one of 'batch', 'group', or 'none'.")),
    **fields("multi_objective_aggregation", "native", rule=_named(
        ("sum_then_normalize", "normalize_then_sum"),
        "Invalid multi_objective_aggregation: {}. Must be 'sum_then_normalize' or 'normalize_then_sum'.")),
    **fields("delta", "native", rule=rules.number(0, optional=True, most=rules.MOST_FLOAT32)),
    **fields("sapo_temperature_neg sapo_temperature_pos", "native",
              rule=rules.number(1e-9, most=rules.MOST_FLOAT32)),
    **fields("vespo_k_pos vespo_lambda_pos vespo_k_neg vespo_lambda_neg", "native",
              rule=rules.number(0, most=rules.MOST_FLOAT32)),
    **fields("off_policy_mask_threshold", "native",
              rule=rules.number(-rules.MOST_FLOAT32, optional=True, most=rules.MOST_FLOAT32)),
    **fields("use_bias_correction_kl use_adaptive_entropy", "native"),
    **fields("top_entropy_quantile", "native", rule=rules.number(0, most=1.0)),
    **fields("entropy_coef entropy_coef_max entropy_target", "native", rule=_any_number),
    **fields("entropy_coef_min", "native", rule=_least_entropy_coef),
    **fields("entropy_coef_delta", "native", rule=rules.number(0, most=rules.MOST_FLOAT32)),
    # Of what samples, where that is vLLM
    **fields("vllm_importance_sampling_correction vllm_importance_sampling_cap", "mapped"),
    **fields("vllm_importance_sampling_mode", "mapped", rule=_correction),
    **fields("vllm_importance_sampling_clip_max", "mapped", rule=rules.number(0, optional=True)),
    **fields("vllm_importance_sampling_clip_min", "mapped", rule=_least_ratio),
    # Completions that are shown
    **fields("log_completions_hub_repo", "native", rule=_hub_repo),
}  # fmt: skip
