"""Arguments of several trainers, declared once. Each config lists them at TRL's position: `shared("max_length")`."""

from __future__ import annotations

import warnings
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

from trl_jax.config import devices, rules
from trl_jax.config.arguments import arg, redeclared
from trl_jax.config.rules import must_be

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
            "computed before training belong to a reference that does not change. Leave one of the two out."
        )
    return None


def mixup_alpha(name: str, value: Any, values: Mapping[str, Any]) -> str | None:
    if isinstance(value, int | float) and 0 <= value <= 1:
        return None
    return must_be(name, "a number from 0.0 to 1.0, the weight of the policy in the updated reference", value)


# ----------------------------------------------------------------------------------------------------
# Declarations


@dataclass
class TextArguments:
    """Arguments that `BaseTrainer` reads. They are checked in every config that has a field of this name."""

    chat_template_path: str | None = arg(
        None, help="Chat template file, or a tokenizer (folder or Hub id) whose chat template is used.", rule=rules.path
    )
    disable_dropout: bool = arg(True, help="Train without dropout.")
    dataset_num_proc: int | None = arg(
        None,
        help="Number of processes that tokenize the dataset.",
        rule=rules.whole(0, optional=True, most=rules.MOST_PROCESSES),
    )
    eos_token: str | None = arg(
        None, help="Token that ends each text. If unset, the tokenizer's EOS token.", rule=rules.text(optional=True)
    )
    max_length: int | None = arg(
        1024,
        help="Maximum length of prompt and completion together, in tokens; longer texts are truncated. "
        "None truncates nothing.",
        rule=rules.whole(1, optional=True),
    )
    pad_to_multiple_of: int | str | None = arg(
        "auto",
        help="Round row lengths up to a multiple of this number. 'auto' rounds up to one of a few lengths "
        "(multiples of 32 up to 256, then four per doubling), so that few shapes are compiled; None "
        "does not round. Losses and scores do not depend on it.",
        how="mapped",
        rule=rules.pad_multiple,
    )
    activation_offloading: bool = arg(
        False,
        help="Keep what gradient checkpointing saves, each layer's input, in host memory. Replaces remat_policy.",
        how="mapped",
        rule=devices.offloading,
    )
    pad_token: str | None = arg(
        None, help="Deprecated: set it on the tokenizer instead.", rule=rules.text(optional=True)
    )


@dataclass
class LanguageModelArguments(TextArguments):
    """Arguments shared by language model trainers, including trainers with a reference model."""

    router_aux_loss_coef: float | None = arg(
        None,
        help="Weight of the load-balancing loss of mixture-of-experts models. If unset, the model's own "
        "value; 0 turns it off.",
        rule=rules.number(0, optional=True, most=rules.MOST_FLOAT32),
    )
    max_prompt_length: int | None = arg(
        None,
        help="Deprecated: number of tokens to keep of a prompt, counted from its end. If unset, all.",
        rule=rules.whole(1, optional=True),
        kw_only=True,
    )
    truncation_mode: str = arg(
        "keep_start",
        help="Which part of a text longer than max_length to keep. 'keep_end' is deprecated.",
        choices=["keep_end", "keep_start"],
        rule=truncation,
    )
    precompute_ref_log_probs: bool = arg(
        False, help="Compute the reference model's log-probabilities once, before training, and store them on disk."
    )
    precompute_ref_batch_size: int | None = arg(
        None,
        help="Batch size for precompute_ref_log_probs. Defaults to the training or evaluation batch size.",
        rule=rules.whole(1, optional=True, most=rules.MOST_EXAMPLES),
    )
    sync_ref_model: bool = arg(
        False,
        help="Move the reference model toward the policy every ref_model_sync_steps steps (TR-DPO, "
        "https://huggingface.co/papers/2404.09656).",
        rule=synced,
    )
    ref_model_mixup_alpha: float = arg(
        0.6, help="Weight of the policy in the updated reference model, from 0.0 to 1.0.", rule=mixup_alpha
    )
    ref_model_sync_steps: int = arg(512, help="Steps between two updates of the reference model.", rule=rules.whole(1))


def shared(name: str, **changes: Any) -> Any:
    """The field `name` of `LanguageModelArguments`; `changes` as in `redeclared`."""
    field = LanguageModelArguments.__dataclass_fields__[name]
    return redeclared(field, field.metadata["help"].handling, **changes)


# ----------------------------------------------------------------------------------------------------
# Warnings about deprecated values


def warn_about_prompt_length(max_prompt_length: int | None, stacklevel: int) -> None:
    """Warn that `max_prompt_length` is deprecated; `stacklevel` as in `warn_about_keep_end`."""
    if max_prompt_length is not None:
        text = (
            f"max_prompt_length={max_prompt_length} is deprecated, and TRL no longer has it: longer prompts lose their "
            "beginning. Use max_length, which limits prompt and completion together."
        )
        warnings.warn(text, FutureWarning, stacklevel=stacklevel + 1)


def warn_about_keep_end(mode: str, stacklevel: int) -> None:
    """Warn that `truncation_mode="keep_end"` is deprecated.

    Args:
        stacklevel: of the line that creates the config, relative to the caller of this function.
    """
    if mode == "keep_end":
        text = "truncation_mode='keep_end' is deprecated: use truncation_mode='keep_start', the default."
        warnings.warn(text, FutureWarning, stacklevel=stacklevel + 1)
