"""A bound on characters beyond which a text is certainly longer than max_length, so that its beginning is enough.

Tokenising ten million characters takes seconds and gigabytes, only for the row to be left out.
"""

from __future__ import annotations

import json
from typing import Any

import numpy as np
import pyarrow as pa
import pyarrow.compute as pc
from datasets import Dataset
from tokenizers import normalizers, pre_tokenizers
from tokenizers.models import BPE
from transformers import PreTrainedTokenizerFast

from trl_jax.data.rows import checks

TEXTS = ("prompt", "chosen", "rejected")
_DECOMPOSED = 4  # characters that Unicode's canonical composition makes one of, at most
_KEEPS_ALL = ("ByteLevel", "Digits", "Split")  # pre-tokenizers that lose no character


def character_bound(tokenizer: Any, max_length: int | None) -> int | None:
    """The number of characters beyond which a text has more than `max_length` tokens; None where there is none.

    It exists for byte-level BPE: every byte is part of a token, and no token has more bytes than the longest one of the
    vocabulary. Other tokenizers may drop characters, or make one token of any number of unknown ones.
    """
    if max_length is None or not _is_byte_level(tokenizer):
        return None
    longest = max(map(len, tokenizer.get_vocab()))
    return max_length * longest * (1 if tokenizer.backend_tokenizer.normalizer is None else _DECOMPOSED)


def _is_byte_level(tokenizer: Any) -> bool:
    if not isinstance(tokenizer, PreTrainedTokenizerFast) or not type(tokenizer).__module__.startswith("transformers."):
        return False
    backend = tokenizer.backend_tokenizer
    if not isinstance(backend.model, BPE) or not isinstance(backend.normalizer, normalizers.NFC | None):
        return False
    if any(token.lstrip or token.rstrip for token in tokenizer.added_tokens_decoder.values()):
        return False  # such tokens swallow any number of spaces
    alphabet = pre_tokenizers.ByteLevel.alphabet()
    return _splits_bytes(backend.pre_tokenizer) and set(alphabet) <= tokenizer.get_vocab().keys()


def _splits_bytes(splitter: pre_tokenizers.PreTokenizer | None) -> bool:
    """Whether texts are split into bytes in the end, and nothing is lost on the way."""
    if splitter is None:
        return False
    state = json.loads(splitter.__getstate__())
    steps = state["pretokenizers"] if state["type"] == "Sequence" else [state]
    lost = any(step["type"] not in _KEEPS_ALL or step.get("behavior") == "Removed" for step in steps)
    return not lost and steps[-1]["type"] == "ByteLevel"


def character_bound_of_table(dataset: Dataset, tokenizer: Any, max_length: int | None) -> int | None:
    """`character_bound`, or None where no row exceeds it, so that the ids are cached once for every max_length."""
    columns = tuple(column for column in TEXTS if column in dataset.column_names)
    if max_length is None:
        return None
    counts = [sum(_characters(block.column(c)) for c in columns).max() for _, block in checks.blocks(dataset, columns)]
    if max(counts) <= max_length:  # no bound is lower
        return None
    max_characters = character_bound(tokenizer, max_length)
    return None if max_characters is None or max(counts) <= max_characters else max_characters


def _characters(values: pa.Array | pa.ChunkedArray) -> np.ndarray:
    """Number of characters of all strings in each value, however nested: `[values]`, int64."""
    if isinstance(values, pa.ChunkedArray):
        values = values.combine_chunks()
    kind = values.type
    if pa.types.is_string(kind) or pa.types.is_large_string(kind):
        return pc.utf8_length(values).fill_null(0).to_numpy(zero_copy_only=False).astype(np.int64)
    if checks.is_list(kind):
        lengths = pc.list_value_length(values).fill_null(0).to_numpy(zero_copy_only=False)
        parents = np.repeat(np.arange(len(values)), lengths)
        return np.bincount(parents, _characters(values.flatten()), len(values)).astype(np.int64)
    if pa.types.is_struct(kind):
        return sum((_characters(part) for part in values.flatten()), np.zeros(len(values), np.int64))
    return np.zeros(len(values), np.int64)


def is_long(value: Any, max_characters: int | None) -> bool:
    """Whether a text, or the messages of a conversation, have more characters than `max_characters`."""
    return max_characters is not None and _count(value) > max_characters


def _count(value: Any) -> int:
    if isinstance(value, str):
        return len(value)
    if isinstance(value, dict):
        value = value.values()
    elif not isinstance(value, list):
        return 0
    return sum(map(_count, value))
