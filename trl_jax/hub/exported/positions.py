"""The length of the longest text that an exported model has positions for, read from its table of them."""

from __future__ import annotations

import re
from typing import Any

from trl_jax.hub.heads import HeadName
from trl_jax.hub.torch.bridge import unloaded

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
