"""Texts that are certainly longer than max_length, of which a beginning is enough to see it.

To tokenise ten million characters takes seconds and gigabytes, and the row is then left out.
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

TEXTS = ("prompt", *checks.TEXTS)
_DECOMPOSED = 4  # characters that Unicode's canonical composition makes one of, at most
_KEEPS_ALL = ("ByteLevel", "Digits", "Split")  # pre-tokenizers that lose no character


def most_characters(tokenizer: Any, max_length: int | None) -> int | None:
    """A text of more characters has more than `max_length` tokens; None where there is no such number.

    There is one for byte-level BPE: every byte is a token or part of one, and none has more bytes than the longest of
    the vocabulary. Other tokenizers may drop characters, or make one token of any number of unknown ones.
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
        return False  # which take any number of spaces
    alphabet = pre_tokenizers.ByteLevel.alphabet()
    return _splits_bytes(backend.pre_tokenizer) and set(alphabet) <= tokenizer.get_vocab().keys()


def _splits_bytes(splitter: pre_tokenizers.PreTokenizer | None) -> bool:
    """Whether texts are split into bytes in the end, and nothing is lost on the way."""
    if splitter is None:
        return False
    told = json.loads(splitter.__getstate__())
    steps = told["pretokenizers"] if told["type"] == "Sequence" else [told]
    lost = any(step["type"] not in _KEEPS_ALL or step.get("behavior") == "Removed" for step in steps)
    return not lost and steps[-1]["type"] == "ByteLevel"


def most_of_table(dataset: Dataset, tokenizer: Any, max_length: int | None) -> int | None:
    """`most_characters`, or None where no row has as many, so that one cache of the ids serves every max_length."""
    columns = tuple(column for column in TEXTS if column in dataset.column_names)
    if max_length is None:
        return None
    counts = [sum(_characters(block.column(c)) for c in columns).max() for _, block in checks.blocks(dataset, columns)]
    if max(counts) <= max_length:  # the least that it may be
        return None
    most = most_characters(tokenizer, max_length)
    return None if most is None or max(counts) <= most else most


def _characters(values: pa.Array | pa.ChunkedArray) -> np.ndarray:
    """Of all strings in each value: `[values]`."""
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


def is_long(value: Any, most: int | None) -> bool:
    """Whether a text, or the messages of a conversation, have more characters than `most`."""
    return most is not None and _count(value) > most


def _count(value: Any) -> int:
    if isinstance(value, str):
        return len(value)
    if isinstance(value, dict):
        value = value.values()
    elif not isinstance(value, list):
        return 0
    return sum(map(_count, value))
