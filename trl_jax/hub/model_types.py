"""Model types without a family: which can run as exported programs, and which are refused."""

from __future__ import annotations

import re
from collections.abc import Collection
from importlib import import_module
from pathlib import Path
from typing import Any

from trl_jax.core.text import brief
from trl_jax.hub import torch_bridge
from trl_jax.hub.heads import HeadName
from trl_jax.hub.torch_bridge import unloaded

# Which types can be exported


def is_exported(raw: dict[str, Any], native: Collection[str], source: Path, head: HeadName = "score") -> bool:
    """Whether a checkpoint with this config.json runs as an exported program; `native` types do not.

    Raises:
        ImportError: it does, but torch is not installed.
    """
    kind = raw.get("model_type")
    if not isinstance(kind, str) or kind in native or kind in REFUSED or kind not in _types(head):
        return False
    if not torch_bridge.available():
        raise ImportError(
            f"{source}: model_type {kind!r} runs as a program exported from transformers' own model, which requires "
            f"torch. Install it: pip install 'trl_jax[torch]'. Without torch, these work: {', '.join(sorted(native))}."
        )
    return True


def unsupported_error(raw: dict[str, Any], native: Collection[str], source: Path) -> ValueError:
    """The error for an unsupported config.json: its type, the reason, and the nearest supported type."""
    kind = raw.get("model_type")
    if isinstance(kind, str) and kind in REFUSED:
        reason, nearest = REFUSED[kind]
        return ValueError(
            f"{source}: model_type {kind!r} is not supported: {reason}. The nearest supported type: {nearest}."
        )
    others = set(_types("score")) - set(REFUSED) - set(native)
    custom = " Its custom code (auto_map) is never run." if raw.get("auto_map") else ""
    return ValueError(
        f"{source}: model_type {brief(kind)} is not supported by this release of trl_jax.{custom} "
        f"Supported: {', '.join(sorted(native))}. With torch, {len(others)} other types for which transformers has a "
        "sequence classifier are supported as well, such as bloom, gpt_neo and albert."
    )


def _types(head: HeadName) -> Collection[str]:
    """The types for which transformers has a model with this head."""
    modeling_auto = import_module("transformers.models.auto.modeling_auto")  # `from` needs torch
    if head == "lm":
        return modeling_auto.MODEL_FOR_CAUSAL_LM_MAPPING_NAMES
    return modeling_auto.MODEL_FOR_SEQUENCE_CLASSIFICATION_MAPPING_NAMES


# Maximum text length of an exported model, from its table of positions


_POSITIONS = re.compile(r"(embed_positions|position_embeddings|positions_embed|wpe)$")
# Types whose table starts with unused rows, which older versions used for a pad token.
OFFSETS = {"biogpt": 2, "opt": 2}


def max_positions(config: Any, head: HeadName = "score") -> int | None:
    """Length of the longest text that a model with this config supports; None if there is no limit."""
    return max_positions_of(unloaded(config, head))


def max_positions_of(module: Any) -> int | None:
    """Like `max_positions`, for a module: its position table has a row per position, plus unused rows before them."""
    values = module.config.get_text_config().to_dict()
    names = "max_position_embeddings", "n_positions", "max_seq_len", "max_sequence_length"
    stated = next((values[name] for name in names if isinstance(values.get(name), int)), None)
    offset = OFFSETS.get(module.config.model_type, 0)

    def first(table):
        return offset if table.padding_idx is None else table.padding_idx + 1

    tables = [part for name, part in module.named_modules() if _POSITIONS.search(name) and "weight" in part._parameters]
    lengths = {len(table.weight) - first(table): len(table.weight) for table in tables}
    return min((length for length, rows in lengths.items() if stated in (length, rows)), default=None)


# Unsupported model types: why, and the nearest supported type


_EOS = "it looks for the EOS in the data, which a compiled program cannot do"
_DATA = "its control flow depends on data, which a compiled program does not support"
_IMAGES = "it reads images or layouts along with text, which TRL's text rows do not have"

REFUSED = {
    "bart": (_EOS, "roberta"),
    "bigbird_pegasus": (_EOS, "big_bird"),
    "canine": ("it hashes characters and has no token embedding", "bert"),
    "cohere_compass_text": ("torch.export cannot follow its code", "modernbert"),
    "flaubert": (_DATA, "camembert"),
    "funnel": ("it pools the sequence between blocks with operations that trl_jax does not have", "electra"),
    "jetmoe": (_DATA, "mixtral"),
    "layoutlmv2": (_IMAGES, "layoutlm"),
    "layoutlmv3": (_IMAGES, "layoutlm"),
    "longformer": (_DATA, "big_bird"),
    "mbart": (_EOS, "xlm-roberta"),
    "modernvbert": (_IMAGES, "modernbert"),
    "mt5": (_EOS, "xlm-roberta"),
    "mvp": (_EOS, "roberta"),
    "perceiver": (_IMAGES, "bert"),
    "plbart": (_EOS, "roberta"),
    "reformer": ("its attention sorts tokens into buckets for a fixed length", "big_bird"),
    "t5": (_EOS, "modernbert"),
    "t5gemma": ("it is an encoder-decoder, and TRL's rows have no decoder input", "gemma2"),
    "t5gemma2": ("it is an encoder-decoder, and TRL's rows have no decoder input", "gemma3_text"),
    "tapas": ("it reads tables, which TRL's text rows do not have", "bert"),
    "ultravbert": (_IMAGES, "ultrabert"),
    "umt5": (_EOS, "xlm-roberta"),
    "xlm": (_DATA, "xlm-roberta"),
    "xmod": (_DATA, "xlm-roberta"),
    "yoso": ("its attention has a custom backward pass, which is lost in the export", "nystromformer"),
    "zamba": ("torch.export cannot follow its code", "jamba"),
    "zamba2": ("torch.export cannot follow its code", "jamba"),
}
