"""Prompts that a script has tokenised, as RLOOTrainer wanted them up to TRL 0.21: back to texts."""

from __future__ import annotations

import logging
from collections.abc import Mapping
from typing import Any

from datasets import Dataset, IterableDataset

from trl_jax.core.printable import brief
from trl_jax.data.rows.checks import argument

logger = logging.getLogger(__name__)


def as_prompts(dataset: Any, name: str, tokenizer: Any) -> Any:
    """Rows with `input_ids` and without a `prompt` get the text of these tokens as their prompt; others stay.

    Raises:
        ValueError: a row whose text would be other tokens.
    """
    columns = dataset.column_names if isinstance(dataset, Dataset | IterableDataset) else None
    if columns is None or "prompt" in columns or "input_ids" not in columns:
        return dataset
    logger.warning(
        "%s has prompts as input_ids, as RLOOTrainer took them up to TRL 0.21: they are turned back into texts. Pass "
        "the column 'prompt', of texts or messages.",
        argument(name),
    )
    facts = {"tokenizer": tokenizer, "name": name}
    dropped = [column for column in ("input_ids", "attention_mask") if column in columns]
    return dataset.map(_with_prompt, with_indices=True, fn_kwargs=facts, remove_columns=dropped)


def _with_prompt(row: dict[str, Any], number: int, tokenizer: Any, name: str) -> dict[str, str]:
    given = row["input_ids"]
    if isinstance(given, Mapping):  # what apply_chat_template returns since transformers 5
        given = given["input_ids"]
    ids = _without_pads(list(given), tokenizer.pad_token_id)
    found = tokenizer("")["input_ids"]  # what the tokenizer adds to every text
    begins = found[:1] if found and ids[:1] == found[:1] == [tokenizer.bos_token_id] else []
    text = tokenizer.decode(ids[len(begins) :], skip_special_tokens=False, clean_up_tokenization_spaces=False)
    if tokenizer(text)["input_ids"] != ids:
        raise ValueError(
            f"{argument(name)}: the input_ids of row {number}, {brief(text)}, are not the tokens of this text. Pass "
            "the column 'prompt' in their place, of texts or messages."
        )
    return {"prompt": text}


def _without_pads(ids: list[int], pad: int | None) -> list[int]:
    """The ids without pads at either end."""
    real = [place for place, token in enumerate(ids) if token != pad]
    return ids[real[0] : real[-1] + 1] if real else []
