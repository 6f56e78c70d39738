"""Checkpoints with a tokenizer, built once per session."""

from __future__ import annotations

import pytest

from compat_tests.exported import configs
from compat_tests.tiny import tiny_tokenizer


@pytest.fixture(scope="session")
def trainable(tmp_path_factory):
    """trainable(model_type, **facts) -> a folder of `configs.build` with a tokenizer; shared, so do not write to it."""
    folders = {}

    def build(model_type: str, **facts):
        key = repr((model_type, sorted(facts.items())))
        if key not in folders:
            folder = tmp_path_factory.mktemp(model_type)
            words = tiny_tokenizer(folder)
            ids = {"pad_token_id": words.pad_token_id, "eos_token_id": words.eos_token_id, "bos_token_id": None}
            folders[key] = configs.build(folder, model_type, **ids, **{"vocab_size": len(words) + 8, **facts})
        return folders[key]

    return build
