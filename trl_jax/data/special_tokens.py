"""EOS, pad and the chat template, settled on the tokenizer before the first row is read."""

from __future__ import annotations

import logging
from functools import cache
from pathlib import Path
from typing import Any

logger = logging.getLogger(__name__)


def settle(tokenizer: Any, *, eos_token: str | None = None, pad_token: str | None = None) -> Any:
    """Set `eos_token` and `pad_token` on the tokenizer itself and return it.

    It writes into what it was given on purpose, as TRL does: scripts read `tokenizer.pad_token` after they built
    the trainer, and the tokenizer saved beside the model must say the same. The pad token is `pad_token`, else the
    tokenizer's own, else its EOS token.
    """
    if eos_token is not None:
        _check_known(tokenizer, "eos_token", eos_token)
    pad = pad_token or tokenizer.pad_token or eos_token or tokenizer.eos_token
    if pad is None:
        raise ValueError(
            f"The tokenizer ({type(tokenizer).__name__}) has neither a pad nor an EOS token, and the score "
            "is read at the last token that is not padding. Name a token of its vocabulary with "
            "RewardConfig(pad_token=...), or with RewardConfig(eos_token=...) to use it for both."
        )
    _check_known(tokenizer, "pad_token", pad)
    if eos_token is not None:
        tokenizer.eos_token = eos_token
    tokenizer.pad_token = pad
    if pad == tokenizer.eos_token:
        _warn_shared(pad)
    return tokenizer


def settle_chat_template(tokenizer: Any, path: str) -> Any:
    """Set `tokenizer.chat_template` to the text of a .jinja or .j2 file (UTF-8) and return the tokenizer."""
    file = Path(path)
    if file.suffix not in (".jinja", ".j2"):
        raise ValueError(
            f"chat_template_path={str(path)!r}: this release takes a .jinja or .j2 file. To use another "
            "tokenizer's template, save it first: Path('template.jinja').write_text(other.chat_template)."
        )
    if not file.is_file():
        raise FileNotFoundError(f"chat_template_path={str(path)!r}: there is no such file.")
    tokenizer.chat_template = file.read_text(encoding="utf-8")
    return tokenizer


def _check_known(tokenizer: Any, argument: str, token: str) -> None:
    vocabulary = tokenizer.get_vocab()
    if token not in vocabulary:
        raise ValueError(
            f"{argument}={token!r} is not in the vocabulary of the tokenizer ({type(tokenizer).__name__}, "
            f"{len(vocabulary):,} tokens). Name a token it has, or first add it to tokenizer and model."
        )


@cache
def _warn_shared(token: str) -> None:
    """Once per process: the cache remembers the token it has warned of."""
    logger.warning(
        "pad_token and eos_token are both %r: the score is read at the last token that is not EOS, as TRL "
        "does. RewardConfig(pad_token=...) with another token lets the score be read at the EOS itself.",
        token,
    )
