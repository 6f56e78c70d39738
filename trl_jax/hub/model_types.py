"""Model types without a family: which of them can be exported, and which are refused."""

from __future__ import annotations

import re
from collections.abc import Collection
from pathlib import Path
from typing import Any

from trl_jax.core.text import brief
from trl_jax.hub import torch_bridge
from trl_jax.hub.heads import HeadName
from trl_jax.hub.torch_bridge import unloaded

# ----------------------------------------------------------------------------------------------------
# Model types that are no family here: those that are exported, and those that are refused, with the reason.


def is_exported(raw: dict[str, Any], native: Collection[str], source: Path, head: HeadName = "score") -> bool:
    """Whether a checkpoint of this config.json is computed by exporting it; `native` types are not.

    Raises:
        ImportError: it is, but torch is not installed.
    """
    kind = raw.get("model_type")
    if not isinstance(kind, str) or kind in native or kind in REFUSED or kind not in _types(head):
        return False
    if not torch_bridge.available():
        raise ImportError(
            f"{source}: model_type {kind!r} is computed by exporting transformers' own model, which takes torch. "
            f"Install it: pip install 'trl_jax[torch]'. Without torch there are {', '.join(sorted(native))}."
        )
    return True


def objection(raw: dict[str, Any], native: Collection[str], source: Path) -> ValueError:
    """The error of a config.json that is not supported: the type, the reason, the nearest that works."""
    kind = raw.get("model_type")
    if isinstance(kind, str) and kind in REFUSED:
        reason, nearest = REFUSED[kind]
        return ValueError(
            f"{source}: model_type {kind!r} is not supported: {reason}. The nearest that works: {nearest}."
        )
    others = set(_types("score")) - set(REFUSED) - set(native)
    custom = " Its custom code (auto_map) is never run." if raw.get("auto_map") else ""
    return ValueError(
        f"{source}: model_type {brief(kind)} is not supported by this release of trl_jax.{custom} "
        f"Supported: {', '.join(sorted(native))}. Where torch is installed, {len(others)} other types that "
        "transformers has a sequence classifier for: bloom, gpt_neo, albert and so on."
    )


def _types(head: HeadName) -> Collection[str]:
    """The types that transformers has a model with this head for."""
    from transformers.models.auto import modeling_auto

    if head == "lm":
        return modeling_auto.MODEL_FOR_CAUSAL_LM_MAPPING_NAMES
    return modeling_auto.MODEL_FOR_SEQUENCE_CLASSIFICATION_MAPPING_NAMES


# ----------------------------------------------------------------------------------------------------
# The length of the longest text that an exported model has positions for, read from its table of them.


_POSITIONS = re.compile(r"(embed_positions|position_embeddings|positions_embed|wpe)$")
# Types whose table begins with rows of no position, for a pad token that older versions had.
OFFSETS = {"biogpt": 2, "opt": 2}


def max_positions(config: Any, head: HeadName = "score") -> int | None:
    """The length of the longest text that a model of this config has positions for; None where any has."""
    return max_positions_of(unloaded(config, head))


def max_positions_of(module: Any) -> int | None:
    """As `max_positions`: a table of positions has a row for each, and some unused ones before them."""
    facts = module.config.get_text_config().to_dict()
    names = "max_position_embeddings", "n_positions", "max_seq_len", "max_sequence_length"
    stated = next((facts[name] for name in names if isinstance(facts.get(name), int)), None)
    offset = OFFSETS.get(module.config.model_type, 0)

    def first(table):
        return offset if table.padding_idx is None else table.padding_idx + 1

    tables = [part for name, part in module.named_modules() if _POSITIONS.search(name) and "weight" in part._parameters]
    lengths = {len(table.weight) - first(table): len(table.weight) for table in tables}
    return min((length for length, rows in lengths.items() if stated in (length, rows)), default=None)


# ----------------------------------------------------------------------------------------------------
# Models of transformers that no backend takes: why, and the nearest model_type that works.


_EOS = "it finds the EOS by looking at the data, which a compiled program cannot"
_DATA = "its code decides by the data it sees, which a compiled program cannot"
_IMAGES = "it reads images or layouts beside the text, and a text alone has none"

REFUSED = {
    "bart": (_EOS, "roberta"),
    "bigbird_pegasus": (_EOS, "big_bird"),
    "canine": ("it hashes characters and has no table of tokens to embed", "bert"),
    "cohere_compass_text": ("torch.export cannot follow its code", "modernbert"),
    "flaubert": (_DATA, "camembert"),
    "funnel": ("it pools the sequence between blocks by operations that trl_jax has no counterpart of", "electra"),
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
    "reformer": ("its attention sorts tokens into buckets for one fixed length", "big_bird"),
    "t5": (_EOS, "modernbert"),
    "t5gemma": ("it is an encoder-decoder, and TRL's rows give it nothing to decode", "gemma2"),
    "t5gemma2": ("it is an encoder-decoder, and TRL's rows give it nothing to decode", "gemma3_text"),
    "tapas": ("it reads tables, and a text alone has none", "bert"),
    "ultravbert": (_IMAGES, "ultrabert"),
    "umt5": (_EOS, "xlm-roberta"),
    "xlm": (_DATA, "xlm-roberta"),
    "xmod": (_DATA, "xlm-roberta"),
    "yoso": ("its attention has a backward pass of its own, which is lost in the export", "nystromformer"),
    "zamba": ("torch.export cannot follow its code", "jamba"),
    "zamba2": ("torch.export cannot follow its code", "jamba"),
}
