"""Prompts as callers have them, as rows without padding, and sequences as callers get them back."""

from __future__ import annotations

import logging
import math
import sys
from collections.abc import Sequence, Sized
from dataclasses import dataclass
from itertools import groupby
from typing import Any

import numpy as np

from trl_jax.hub.generating.settings import Settings
from trl_jax.hub.torch.bridge import as_tensors

logger = logging.getLogger(__name__)


@dataclass(frozen=True)
class Prompts:
    """Rows of token ids.

    ids: int64 `[rows, T]`, as they came. rows: of each, the tokens that are no padding, int32. in_torch: whether they
    came as torch's tensor.
    """

    ids: np.ndarray
    rows: list[np.ndarray]
    in_torch: bool = False

    @property
    def width(self) -> int:
        return self.ids.shape[1]

    def grouped(self, completions: int) -> tuple[list[np.ndarray], int]:
        """Each prompt once where rows that are equal follow each other, and how many completions each then has."""
        runs = [len(list(run)) for _, run in groupby(row.tobytes() for row in self.rows)]
        repeats = math.gcd(*runs)
        return self.rows[::repeats], repeats * completions

    def sequences(self, tokens: np.ndarray, completions: int) -> Any:
        """int64 `[rows x completions, T + new]`, the prompts as they came with their tokens behind them."""
        return self.back(np.concatenate([self.ids.repeat(completions, axis=0), tokens], axis=1))

    def back(self, array: np.ndarray) -> Any:
        """An array, as torch's tensor where the prompts came so."""
        return as_tensors(array) if self.in_torch else array


def is_torch(value: Any) -> bool:
    """Whether it is torch's tensor; torch is not imported to find out."""
    return "torch" in sys.modules and isinstance(value, sys.modules["torch"].Tensor)


def read_prompts(input_ids: Any, attention_mask: Any, settings: Settings, vocabulary: int) -> Prompts:
    """Take lists of ids, NumPy's, JAX's or torch's arrays, padded on the left or not.

    Args:
        input_ids: None is the BOS alone. Lists may be of different lengths.
        attention_mask: 0 where a token is padding; without it, pad ids are where they are no EOS.

    Raises:
        ValueError: no rows of ids of the vocabulary, a row without any, or a mask of another shape.
    """
    in_torch = is_torch(input_ids)
    if _ragged(input_ids):
        visible = [[1] * len(row) for row in input_ids] if attention_mask is None else attention_mask
        input_ids, attention_mask = left_padded(input_ids, settings.pad), left_padded(visible, 0)
    ids = _ids(input_ids, settings)
    if ids.size and not 0 <= ids.min() <= ids.max() < vocabulary:
        outside = ids.max() if ids.max() >= vocabulary else ids.min()
        raise ValueError(
            f"input_ids has the id {outside}, but the model embeds the ids 0 to {vocabulary - 1}. Use the tokenizer "
            "that goes with it."
        )
    mask = _deduced_mask(ids, settings) if attention_mask is None else _mask(attention_mask, ids)
    for row, visible in enumerate(mask):
        if not visible.any():
            raise ValueError(
                f"Row {row} of input_ids has no token but padding. Give each prompt at least one, such as the BOS."
            )
    if len(ids) > 1 and _padded_right(ids, mask, attention_mask is not None, settings.pad):
        logger.warning(
            "A decoder-only architecture is being used, but right-padding was detected! For correct generation "
            "results, please set `padding_side='left'` when initializing the tokenizer."
        )
    rows = [row[visible].astype(np.int32) for row, visible in zip(ids, mask, strict=True)]
    return Prompts(ids, rows, in_torch)


def left_padded(rows: Sequence[Sequence[int]], fill: int | None) -> np.ndarray:
    """Rows of any lengths side by side, int64 `[rows, T]`."""
    padded = np.full((len(rows), max(map(len, rows))), 0 if fill is None else fill, np.int64)
    for row, own in zip(rows, padded, strict=True):
        own[len(own) - len(row) :] = row
    return padded


def _ragged(input_ids: Any) -> bool:
    """Whether it is a list of rows of different lengths."""
    if not isinstance(input_ids, list | tuple) or not all(isinstance(row, Sized) for row in input_ids):
        return False
    return len({len(row) for row in input_ids}) > 1


def _ids(input_ids: Any, settings: Settings) -> np.ndarray:
    if input_ids is None:
        if settings.config.bos_token_id is None:
            raise ValueError("`bos_token_id` has to be defined when no `input_ids` are provided.")
        input_ids = [[settings.config.bos_token_id]]
    ids = np.asarray(input_ids)
    if ids.ndim != 2 or not ids.size or not np.issubdtype(ids.dtype, np.integer):
        raise ValueError(
            f"input_ids has the shape {ids.shape} and the type {ids.dtype}: wanted whole numbers, [rows, tokens], with "
            "at least one token a row."
        )
    return ids.astype(np.int64)


def _mask(attention_mask: Any, ids: np.ndarray) -> np.ndarray:
    mask = np.asarray(attention_mask)
    if mask.ndim != 2:
        raise ValueError("`attention_mask` passed to `generate` must be 2D.")
    if mask.shape != ids.shape:
        raise ValueError(f"attention_mask has the shape {mask.shape}: wanted that of input_ids, {ids.shape}.")
    return mask != 0


def _deduced_mask(ids: np.ndarray, settings: Settings) -> np.ndarray:
    """True but at pad ids; everywhere where the pad id ends texts, too, and so may be meant."""
    if len(ids) > 1 and settings.pad in settings.eos:
        logger.warning(
            "The attention mask is not set with a batched input, and cannot be inferred from input because pad token "
            "is same as eos token. As a consequence, you may observe unexpected behavior. Please pass your input's "
            "`attention_mask` to obtain reliable results."
        )
    if settings.pad is None or settings.pad in settings.eos:
        return np.ones(ids.shape, bool)
    return ids != settings.pad


def _padded_right(ids: np.ndarray, mask: np.ndarray, given: bool, pad: int | None) -> bool:
    if pad is None:
        return False
    return bool((~mask[:, -1]).any() if given else (ids[:, -1] == pad).any())
