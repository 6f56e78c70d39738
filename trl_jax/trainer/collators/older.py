"""Collators of early TRL that scripts still pass to a trainer."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np

from trl_jax.core.printable import brief
from trl_jax.data.example import IGNORED
from trl_jax.data.rows.sft.answers import AnswerMarks, answer_labels
from trl_jax.trainer.collators.padded import DataCollatorForLanguageModeling, as_kind, padded


class DataCollatorForCompletionOnlyLM:
    """Trains on answers alone, found by the text that they begin behind: TRL's collator up to 0.19, for SFTTrainer.

    A call gives `input_ids`, `labels` and `attention_mask` as DataCollatorForLanguageModeling does. A token that is the
    pad token is no target, wherever it stands, as in TRL.

    Args:
        response_template: a text, or its token ids, behind which an answer begins.
        instruction_template: a text, or its token ids, with which a question begins, at which an answer ends; None: a
            text has one answer, behind the last response_template.
        tokenizer: gives the ids of templates and the pad token.
        pad_to_multiple_of, return_tensors: as in DataCollatorForLanguageModeling.

    Raises:
        ValueError: mlm, another ignore_index than -100, padding_free, or a template without tokens.
    """

    def __init__(
        self,
        response_template: str | Sequence[int],
        instruction_template: str | Sequence[int] | None = None,
        tokenizer: Any = None,
        mlm: bool = False,
        ignore_index: int = IGNORED,
        padding_free: bool = False,
        pad_to_multiple_of: int | None = None,
        return_tensors: str | None = None,
    ):
        refused = {"mlm": mlm, "padding_free": padding_free, "ignore_index": ignore_index != IGNORED}
        if asked := [name for name, given in refused.items() if given]:
            raise ValueError(
                f"DataCollatorForCompletionOnlyLM({asked[0]}=...) is not in this release of trl_jax: leave it out; "
                "texts without padding are SFTConfig(padding_free=True) with rows of 'prompt' and 'completion'."
            )
        if tokenizer is None:
            raise TypeError("DataCollatorForCompletionOnlyLM misses tokenizer=: it gives the ids of response_template.")
        self.response_template, self.instruction_template = response_template, instruction_template
        self.tokenizer, self.pad_to_multiple_of = tokenizer, pad_to_multiple_of
        response = _ids("response_template", response_template, tokenizer)
        asked = instruction_template
        question = None if asked is None else _ids("instruction_template", asked, tokenizer)
        self.marks = AnswerMarks(response, question, tokenizer.pad_token_id)
        self._inner = DataCollatorForLanguageModeling(
            tokenizer.pad_token_id, pad_to_multiple_of=pad_to_multiple_of, return_tensors=return_tensors
        )

    def __call__(self, examples: list[dict[str, Any]]) -> dict[str, Any]:
        return self._inner([row | {"labels": answer_labels(row["input_ids"], self.marks)} for row in examples])


def _ids(name: str, template: str | Sequence[int], tokenizer: Any) -> tuple[int, ...]:
    ids = tokenizer.encode(template, add_special_tokens=False) if isinstance(template, str) else template
    if not len(ids):
        raise ValueError(f"{name}={brief(template)} has no tokens: pass the text that comes before each answer.")
    return tuple(int(token) for token in ids)


@dataclass
class RewardDataCollatorWithPadding:
    """Rows with `input_ids_chosen`, `input_ids_rejected` and maybe `margin` to padded arrays: RewardTrainer's collator
    of TRL up to 0.19.

    A call gives `input_ids_chosen`, `attention_mask_chosen` and the same of `rejected`, int64 `[P, T]` each with a T of
    its own; float32 `margin` `[P]`; and `return_loss`.

    Args:
        tokenizer: gives the pad token.
        padding: True; rows are padded to the longest.
        pad_to_multiple_of, return_tensors: as in DataCollatorForPreference.

    Raises:
        ValueError: another padding.
    """

    tokenizer: Any
    padding: bool | str = True
    max_length: int | None = None
    pad_to_multiple_of: int | None = None
    return_tensors: str | None = None

    def __post_init__(self):
        if self.padding not in (True, "longest"):
            raise ValueError(f"padding={self.padding!r}: rows are padded to the longest. Leave it out.")

    def __call__(self, examples: list[dict[str, Any]]) -> dict[str, Any]:
        batch: dict[str, Any] = {}
        for side in ("chosen", "rejected"):
            rows = [row[f"input_ids_{side}"] for row in examples]
            batch[f"input_ids_{side}"] = padded(rows, self.tokenizer.pad_token_id, self.pad_to_multiple_of)
            given = [row.get(f"attention_mask_{side}") for row in examples]
            masks = [np.ones(len(ids)) if own is None else own for own, ids in zip(given, rows, strict=True)]
            batch[f"attention_mask_{side}"] = padded(masks, 0, self.pad_to_multiple_of)
        if "margin" in examples[0]:
            batch["margin"] = np.asarray([row["margin"] for row in examples], np.float32)
        return as_kind(self.return_tensors, batch) | {"return_loss": True}
