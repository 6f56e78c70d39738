"""TRL's collators, for scripts that make batches of their own."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np

from trl_jax.data.example import IGNORED
from trl_jax.hub.torch import bridge


@dataclass
class DataCollatorForPreference:
    """Rows with `chosen_ids`, `rejected_ids` and maybe `margin` to padded arrays, TRL's collator.

    A call gives `input_ids` and `attention_mask`, int64 `[2P, T]`, the chosen answers above the rejected ones, and
    float32 `margin` `[P]`.

    Args:
        pad_token_id: fills rows on the right.
        pad_to_multiple_of: T is rounded up to a multiple of it.
        return_tensors: "pt", torch's tensors, or "np", NumPy's arrays; None is "pt" where torch is installed.

    Raises:
        ValueError: another `return_tensors`.
    """

    pad_token_id: int
    pad_to_multiple_of: int | None = None
    return_tensors: str | None = None

    def __post_init__(self):
        check_kind(self.return_tensors)

    def __call__(self, examples: list[dict[str, Any]], return_tensors: str | None = None) -> dict[str, Any]:
        rows = [example[f"{side}_ids"] for side in ("chosen", "rejected") for example in examples]
        batch = {
            "input_ids": padded(rows, self.pad_token_id, self.pad_to_multiple_of),
            "attention_mask": padded([np.ones(len(ids)) for ids in rows], 0, self.pad_to_multiple_of),
        }
        if "margin" in examples[0]:
            batch["margin"] = np.asarray([example["margin"] for example in examples], np.float32)
        return as_kind(return_tensors or self.return_tensors, batch)


@dataclass
class DataCollatorForLanguageModeling:
    """Rows with `input_ids`, and maybe `labels` and `seq_lengths`, to padded arrays: TRL's collator of SFTTrainer.

    A call gives `input_ids`, `labels` (the ids where a row has none, -100 as padding) and `attention_mask`, int64
    `[B, T]`. The `seq_lengths` of packed rows are the tokens of their documents.

    Args:
        pad_token_id: fills rows on the right.
        padding_free: lay all rows end to end, B = 1, and give instead of the mask `position_ids`, which begin again in
            each document; int32 `cu_seq_lens_q` and `cu_seq_lens_k`, where documents begin and end; `max_length_q` and
            `max_length_k`, the longest one's length; and int32 `seq_idx` `[1, T]`, the number of a token's document.
            The first token of a document has the label -100.
        return_position_ids: give `position_ids` beside the mask, too.
        pad_to_multiple_of: T is rounded up to a multiple of it.
        return_tensors: "pt", torch's tensors, or "np", NumPy's arrays; None is "pt" where torch is installed.

    Raises:
        ValueError: another `return_tensors`.
    """

    pad_token_id: int
    padding_free: bool = False
    return_position_ids: bool = False
    pad_to_multiple_of: int | None = None
    return_tensors: str | None = None

    def __post_init__(self):
        check_kind(self.return_tensors)

    def __call__(self, examples: list[dict[str, Any]], return_tensors: str | None = None) -> dict[str, Any]:
        ids = [example["input_ids"] for example in examples]
        labels = [example.get("labels", example["input_ids"]) for example in examples]
        packed = "seq_lengths" in examples[0]
        places = [_positions(example["seq_lengths"] if packed else [len(example["input_ids"])]) for example in examples]
        if self.padding_free:
            ids, labels, places = ([np.concatenate(rows)] for rows in (ids, labels, places))
        multiple = self.pad_to_multiple_of
        batch = {"input_ids": padded(ids, self.pad_token_id, multiple), "labels": padded(labels, IGNORED, multiple)}
        if self.padding_free or self.return_position_ids:
            batch["position_ids"] = padded(places, 0, multiple)
        if self.padding_free:
            batch["labels"][batch["position_ids"] == 0] = IGNORED
            batch |= _documents(batch["position_ids"][0])
        else:
            batch["attention_mask"] = padded([np.ones(len(row)) for row in ids], 0, multiple)
        return as_kind(return_tensors or self.return_tensors, batch)

    @staticmethod
    def get_position_ids_from_packed_seq_lengths(batch_seq_lengths: list[list[int]]) -> list[Any]:
        """Places of tokens in their documents, `[T]` a row; tensors where torch is installed."""
        return as_kind(None, [_positions(lengths) for lengths in batch_seq_lengths])


def check_kind(return_tensors: str | None) -> None:
    if return_tensors not in ("np", "pt", None):
        raise ValueError(f"return_tensors={return_tensors!r}: wanted 'np', or 'pt' where torch is installed.")


def as_kind(return_tensors: str | None, batch: Any) -> Any:
    """Arrays, or tensors of them where asked for or, unless told, where torch is installed."""
    tensors = bridge.available() if return_tensors is None else return_tensors == "pt"
    return bridge.as_tensors(batch) if tensors else batch


def padded(rows: list[Sequence[int]], value: int, multiple: int | None) -> np.ndarray:
    """Rows as one array `[B, T]`, int64, filled with `value` on the right."""
    length = -(-max(map(len, rows)) // (multiple or 1)) * (multiple or 1)
    array = np.full((len(rows), length), value, np.int64)
    for row, values in zip(array, rows, strict=True):
        row[: len(values)] = values
    return array


def _positions(lengths: Sequence[int]) -> np.ndarray:
    """Places of tokens in their documents, which have these lengths: `[T]`."""
    return np.concatenate([np.arange(length) for length in lengths])


def _documents(position_ids: np.ndarray) -> dict[str, Any]:
    """The documents of a row of tokens with these positions `[T]`: a token of padding counts as one, as in TRL."""
    ends = np.append(np.flatnonzero(position_ids == 0), len(position_ids)).astype(np.int32)
    lengths = np.diff(ends)
    of_tokens = np.repeat(np.arange(len(lengths), dtype=np.int32), lengths)[None]
    longest = int(lengths.max())
    return {
        "cu_seq_lens_q": ends, "cu_seq_lens_k": ends, "max_length_q": longest, "max_length_k": longest,
        "seq_idx": of_tokens,
    }  # fmt: skip
