"""TRL's collators of prompts with their completions, for scripts that make batches of their own."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np

from trl_jax.trainer.collators.padded import as_kind, check_kind, padded


@dataclass
class DataCollatorForPreference:
    """Rows with `prompt_ids`, `chosen_ids` and `rejected_ids` to padded arrays: TRL's collator of DPOTrainer.

    A call gives `input_ids`, `attention_mask` and `completion_mask`, int64 `[2P, T]`, prompts with chosen answers above
    those with rejected ones; and float32 `ref_chosen_logps` and `ref_rejected_logps` `[P]` where rows have them.

    Args:
        pad_token_id: fills rows on the right.
        max_length: longest prompt with its answer, in tokens; None cuts nothing.
        truncation_mode: "keep_start" cuts the end off, "keep_end" the beginning.
        pad_to_multiple_of: T is rounded up to a multiple of it.
        return_tensors: "pt", torch's tensors, or "np", NumPy's arrays; None is "pt" where torch is installed.

    Raises:
        ValueError: another `truncation_mode` or `return_tensors`.
    """

    pad_token_id: int
    max_length: int | None = None
    truncation_mode: str = "keep_start"
    pad_to_multiple_of: int | None = None
    return_tensors: str | None = None

    def __post_init__(self):
        check_kind(self.return_tensors)
        if self.truncation_mode not in ("keep_start", "keep_end"):
            raise ValueError(
                f"Unsupported truncation mode: {self.truncation_mode}, expected 'keep_start' or 'keep_end'"
            )

    def __call__(self, examples: list[dict[str, Any]], return_tensors: str | None = None) -> dict[str, Any]:
        part = slice(self.max_length)
        if self.truncation_mode == "keep_end" and self.max_length is not None:
            part = slice(-self.max_length, None)
        rows = [(row["prompt_ids"], row[f"{side}_ids"]) for side in ("chosen", "rejected") for row in examples]
        batch = _joined(rows, part, self.pad_token_id, self.pad_to_multiple_of)
        batch |= _numbers(examples, ("ref_chosen_logps", "ref_rejected_logps"))
        return as_kind(return_tensors or self.return_tensors, batch)


@dataclass
class DataCollatorForUnpairedPreference:
    """Rows with `prompt_ids`, `completion_ids`, `label` and maybe `KL_completion_ids` to padded arrays: TRL's collator
    of KTOTrainer.

    A call gives `input_ids`, `attention_mask` and `completion_mask`, int64 `[B, T]`; the same of the prompts with their
    `KL_completion_ids` as `KL_input_ids` and so on, with a T of their own; float32 `ref_logps` and `ref_KL_logps` `[B]`
    where rows have them; and `label` `[B]`.

    Args:
        pad_token_id: fills rows on the right.
        max_length: longest prompt with its completion, in tokens; the end is cut off. None cuts nothing.
        pad_to_multiple_of: T is rounded up to a multiple of it.
        return_tensors: "pt", torch's tensors, or "np", NumPy's arrays; None is "pt" where torch is installed.

    Raises:
        ValueError: another `return_tensors`.
    """

    pad_token_id: int
    max_length: int | None = None
    pad_to_multiple_of: int | None = None
    return_tensors: str | None = None

    def __post_init__(self):
        check_kind(self.return_tensors)

    def __call__(self, examples: list[dict[str, Any]], return_tensors: str | None = None) -> dict[str, Any]:
        batch: dict[str, Any] = {}
        for prefix in ("", "KL_"):
            column = f"{prefix}completion_ids"
            if column in examples[0]:
                rows = [(row["prompt_ids"], row[column]) for row in examples]
                joined = _joined(rows, slice(self.max_length), self.pad_token_id, self.pad_to_multiple_of)
                batch |= {f"{prefix}{name}": values for name, values in joined.items()}
        batch |= _numbers(examples, ("ref_logps", "ref_KL_logps"))
        batch["label"] = np.asarray([row["label"] for row in examples])
        return as_kind(return_tensors or self.return_tensors, batch)


def _joined(
    rows: list[tuple[Sequence[int], Sequence[int]]], part: slice, pad_token_id: int, multiple: int | None
) -> dict[str, np.ndarray]:
    """The part of each prompt with its completion that is kept, and which of its tokens are the completion's."""
    ids = [np.concatenate([prompt, answer])[part] for prompt, answer in rows]
    answers = [np.repeat([0, 1], [len(prompt), len(answer)])[part] for prompt, answer in rows]
    return {
        "input_ids": padded(ids, pad_token_id, multiple),
        "attention_mask": padded([np.ones(len(row)) for row in ids], 0, multiple),
        "completion_mask": padded(answers, 0, multiple),
    }


def _numbers(examples: list[dict[str, Any]], columns: tuple[str, ...]) -> dict[str, np.ndarray]:
    """Those of the columns that the rows have, float32 `[B]`."""
    return {
        name: np.asarray([row[name] for row in examples], np.float32) for name in columns if name in examples[0]
    }
