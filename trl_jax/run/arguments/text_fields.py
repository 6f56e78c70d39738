"""Fields that configs of several trainers have, in TRL's names; each config puts them where TRL's has them."""

from __future__ import annotations

import warnings
from dataclasses import field
from typing import Any


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
