"""Arguments of several trainers, declared once. Each config lists them at TRL's position: `shared("max_length")`."""

from __future__ import annotations

import warnings
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

from trl_jax.config import devices, rules
from trl_jax.config.arguments import arg, redeclared
from trl_jax.config.rules import show

# ----------------------------------------------------------------------------------------------------
# Rules


def truncation(name: str, value: Any, values: Mapping[str, Any]) -> str | None:
    if value in ("keep_start", "keep_end"):
        return None
    return f"Unsupported truncation mode: {value}, expected 'keep_start' or 'keep_end'"


def synced(name: str, value: Any, values: Mapping[str, Any]) -> str | None:
    if value and values.get("precompute_ref_log_probs"):  # online trainers have no such argument
        return (
            "You cannot use `sync_ref_model=True` together with `precompute_ref_log_probs=True`: log-probabilities "
            "computed before training are those of a reference that stays as it is. Leave one of the two out."
        )
    return None


def mixup_alpha(name: str, value: Any, values: Mapping[str, Any]) -> str | None:
    if isinstance(value, int | float) and 0 <= value <= 1:
        return None
    return f"{show(name, value)}: wanted the policy's share of the new reference, from 0.0 to 1.0."


# ----------------------------------------------------------------------------------------------------
# Declarations


@dataclass
class TextArguments:
    """Arguments that `BaseTrainer` reads. They are checked in every config that has a field of that name."""

    chat_template_path: str | None = arg(
        None, help="File with the chat template to use, or a tokenizer that has it.", rule=rules.path
    )
    disable_dropout: bool = arg(True, help="Train without dropout.")
    dataset_num_proc: int | None = arg(
        None,
        help="Processes that tokenise the dataset.",
        rule=rules.whole(0, optional=True, most=rules.MOST_PROCESSES),
    )
    eos_token: str | None = arg(
        None, help="Token that ends a text. Unset, the tokenizer's own.", rule=rules.text(optional=True)
    )
    max_length: int | None = arg(
        1024,
        help="Longest prompt with its answer in tokens; the rest is cut off. None cuts nothing.",
        rule=rules.whole(1, optional=True),
    )
    pad_to_multiple_of: int | str | None = arg(
        "auto",
        help="Round row lengths up to a multiple of it. 'auto' rounds up to a short ladder of lengths (32 tokens "
        "apart, from 256 on four an octave), so that few shapes compile; None rounds nothing. Losses and scores do "
        "not depend on it.",
        how="mapped",
        rule=rules.pad_multiple,
    )
    activation_offloading: bool = arg(
        False,
        help="Keep what gradient checkpointing keeps, each layer's input, in the host's memory. Replaces remat_policy.",
        how="mapped",
        rule=devices.offloading,
    )
    pad_token: str | None = arg(
        None, help="Deprecated: set it on the tokenizer instead.", rule=rules.text(optional=True)
    )


@dataclass
class LanguageModelArguments(TextArguments):
    """Arguments of several trainers of language models, and of those with a reference."""

    router_aux_loss_coef: float | None = arg(
        None,
        help="Weight of the loss that balances experts. Unset, as in the model; 0 is off.",
        rule=rules.number(0, optional=True, most=rules.MOST_FLOAT32),
    )
    max_prompt_length: int | None = arg(
        None,
        help="Deprecated: tokens of a prompt to keep, the last ones. Unset, all.",
        rule=rules.whole(1, optional=True),
        kw_only=True,
    )
    truncation_mode: str = arg(
        "keep_start",
        help="Part of a text beyond max_length to keep. 'keep_end' is deprecated.",
        choices=["keep_end", "keep_start"],
        rule=truncation,
    )
    precompute_ref_log_probs: bool = arg(
        False, help="Compute the reference's log-probabilities once, before training, and keep them on the disk."
    )
    precompute_ref_batch_size: int | None = arg(
        None,
        help="Rows of a batch then. Unset, those of training or evaluation.",
        rule=rules.whole(1, optional=True, most=rules.MOST_EXAMPLES),
    )
    sync_ref_model: bool = arg(
        False,
        help="Move the reference towards the policy every ref_model_sync_steps steps (TR-DPO, "
        "https://huggingface.co/papers/2404.09656).",
        rule=synced,
    )
    ref_model_mixup_alpha: float = arg(
        0.6, help="The policy's share of the new reference, from 0.0 to 1.0.", rule=mixup_alpha
    )
    ref_model_sync_steps: int = arg(512, help="Steps between two moves of the reference.", rule=rules.whole(1))


def shared(name: str, **changes: Any) -> Any:
    """The field `name` of `LanguageModelArguments`; `changes` as in `redeclared`."""
    field = LanguageModelArguments.__dataclass_fields__[name]
    return redeclared(field, field.metadata["help"].handling, **changes)


# ----------------------------------------------------------------------------------------------------
# Warnings of deprecated values


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
