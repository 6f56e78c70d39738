"""TRL's collator of preference rows, for scripts that make batches of their own."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

import numpy as np

from trl_jax.hub.torch.bridge import as_tensors


@dataclass
class DataCollatorForPreference:
    """Rows with `chosen_ids`, `rejected_ids` and maybe `margin` to padded arrays, TRL's collator.

    A call gives `input_ids` and `attention_mask`, int64 `[2P, T]`, the chosen answers above the rejected ones, and
    float32 `margin` `[P]`.

    Args:
        pad_token_id: fills rows on the right.
        pad_to_multiple_of: T is rounded up to a multiple of it.
        return_tensors: "np", or "pt" where torch is installed.

    Raises:
        ValueError: another `return_tensors`.
    """

    pad_token_id: int
    pad_to_multiple_of: int | None = None
    return_tensors: str = "np"

    def __post_init__(self):
        if self.return_tensors not in ("np", "pt"):
            raise ValueError(f"return_tensors={self.return_tensors!r}: wanted 'np', or 'pt' where torch is installed.")

    def __call__(self, examples: list[dict[str, Any]], return_tensors: str | None = None) -> dict[str, Any]:
        rows = [example[f"{side}_ids"] for side in ("chosen", "rejected") for example in examples]
        multiple = self.pad_to_multiple_of or 1
        length = -(-max(map(len, rows)) // multiple) * multiple
        batch = {
            "input_ids": np.full((len(rows), length), self.pad_token_id, np.int64),
            "attention_mask": np.zeros((len(rows), length), np.int64),
        }
        for row, ids in enumerate(rows):
            batch["input_ids"][row, : len(ids)] = ids
            batch["attention_mask"][row, : len(ids)] = 1
        if "margin" in examples[0]:
            batch["margin"] = np.asarray([example["margin"] for example in examples], np.float32)
        return as_tensors(batch) if (return_tensors or self.return_tensors) == "pt" else batch
