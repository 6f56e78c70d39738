"""Tokenizers by folder or Hub name."""

from __future__ import annotations

from pathlib import Path
from typing import Any


def load_tokenizer(place: str | Path, config: Any = None, *, trust_remote_code: bool = False) -> Any:
    """The tokenizer of a folder or a repository, of whose code nothing is run unless the user said so.

    Args:
        config: transformers' config of its model. With `trust_remote_code` it is what tells the tokenizer's class,
            where AutoTokenizer would run a config's own code to find that out.
        trust_remote_code: let the tokenizer's own code run, where `auto_map` in tokenizer_config.json names some.

    Raises:
        ValueError: it needs its own code, and `trust_remote_code` is False.
    """
    from transformers import AutoTokenizer

    if trust_remote_code:
        return AutoTokenizer.from_pretrained(place, config=config, trust_remote_code=True)
    # None would have transformers ask on the terminal, and take what comes from a pipe for the answer.
    return AutoTokenizer.from_pretrained(place, trust_remote_code=False)
