"""Strings that end a text, as transformers' `stop_strings`: looked for where the last token ends or completes them."""

from __future__ import annotations

from functools import lru_cache
from typing import Any

import numpy as np

_PREFIX = "abcdef"  # tokenizers treat the first token of a text differently


class StopStrings:
    """Whether a row's last token completes one of the strings; bytes are compared where tokens are parts of
    characters.

    Args:
        tokenizer: the one that the ids are of.
    """

    def __init__(self, strings: str | list[str], tokenizer: Any):
        if tokenizer is None:
            raise ValueError(
                "There are one or more stop strings, either in the arguments to `generate` or in the model's "
                "generation config, but we could not locate a tokenizer. When generating with stop strings, you must "
                "pass the model's tokenizer to the `tokenizer` argument of `generate`."
            )
        strings = [strings] if isinstance(strings, str) else list(strings)
        self._wanted = [string.encode() for string in strings]
        self._text = lru_cache(None)(_TokenTexts(tokenizer))

    def __call__(self, ids: np.ndarray, scores: Any = None) -> np.ndarray:
        """Of int `[B, T]`, prompts and all: bool `[B]`."""
        return np.array([any(self._completes(row, wanted) for wanted in self._wanted) for row in ids.tolist()])

    def _completes(self, row: list[int], wanted: bytes) -> bool:
        text, missing = self._text(row[-1]), len(wanted) - 1
        for id_ in reversed(row[:-1]):
            if missing <= 0:
                break
            before = self._text(id_)[-missing:]
            text, missing = before + text, missing - len(before)
        return wanted in text


class _TokenTexts:
    """The bytes of a token within a text."""

    def __init__(self, tokenizer: Any):
        self._tokenizer, self._kind = tokenizer, _kind(tokenizer)
        self._begin = tokenizer.convert_ids_to_tokens(tokenizer(_PREFIX, add_special_tokens=False)["input_ids"])
        self._bytes = _bytes_of_characters() if self._kind == "ByteLevel" else {}

    def __call__(self, id_: int) -> bytes:
        token = self._tokenizer.convert_ids_to_tokens(id_)
        if token is None:  # the model has more ids than the tokenizer
            return b"\xff"
        if self._kind == "ByteLevel" and all(character in self._bytes for character in token):
            return bytes(self._bytes[character] for character in token)
        if self._kind == "ByteFallback" and len(token) == 6 and token.startswith("<0x") and token.endswith(">"):
            return bytes([int(token[3:5], 16)])
        text = self._tokenizer.convert_tokens_to_string([*self._begin, token])
        return text[text.index(_PREFIX) + len(_PREFIX) :].encode()


def _kind(tokenizer: Any) -> str | None:
    """The kind of tokens that may be parts of characters, if they are of one."""
    from transformers import PreTrainedTokenizerFast

    if not isinstance(tokenizer, PreTrainedTokenizerFast) or tokenizer.backend_tokenizer.decoder is None:
        return None
    state = tokenizer.backend_tokenizer.decoder.__getstate__()
    return next((kind for kind in ("ByteFallback", "ByteLevel") if f'"{kind}"'.encode() in state), None)


def _bytes_of_characters() -> dict[str, int]:
    from transformers.convert_slow_tokenizer import bytes_to_unicode

    return {character: byte for byte, character in bytes_to_unicode().items()}
