"""PEFT's `trainable_token_indices`: rows of the table of tokens that train, beside an adapter or alone."""

from __future__ import annotations

import logging
from dataclasses import replace

from trl_jax.hub.heads import HeadName
from trl_jax.hub.peft.heads import is_lm_head
from trl_jax.hub.peft.lora_config import LoraConfig
from trl_jax.hub.peft.modules import Module

_TABLE, _HEAD = "embed_tokens", "lm_head"
logger = logging.getLogger(__name__)
TENSOR = "token_adapter.trainable_tokens_delta"  # the rows, after the name of their module


def with_new_tokens(lora: LoraConfig, ids: list[int], head: HeadName) -> LoraConfig:
    """The config of an adapter that also trains the rows of new tokens, and a language model's head whole, as TRL has
    it.

    Raises:
        ValueError: beside this type of adapter no rows train.
    """
    if not isinstance(lora, LoraConfig):
        raise ValueError(
            f"The chat template brings {len(ids)} new tokens, whose rows would have to train: a {type(lora).__name__} "
            "trains virtual tokens alone. Take a LoraConfig, or a template whose tokens the tokenizer has."
        )
    asked, saved = lora.trainable_token_indices, list(lora.modules_to_save or [])
    named = isinstance(asked, dict)
    asked = asked | {_TABLE: [*asked.get(_TABLE, ()), *ids]} if named else [*(asked or ()), *ids]
    if head == "lm" and _HEAD not in saved:
        saved.append(_HEAD)
        logger.warning(
            "Cloning chat template added new tokens to the tokenizer, but 'lm_head' is not in `modules_to_save` of the "
            "adapter: it is added, as otherwise the model may not learn to write these tokens. "
            "LoraConfig(modules_to_save=['lm_head']) says so."
        )
    return replace(lora, trainable_token_indices=asked, modules_to_save=saved or None)


def token_tables(lora: LoraConfig, modules: list[Module]) -> list[tuple[Module, tuple[int, ...]]]:
    """Each table of which rows train, with their ids.

    Raises:
        ValueError: a name that is no table of tokens, an id beyond it, or a table that trains whole as well.
    """
    asked = lora.trainable_token_indices
    if not asked:
        return []
    tables = [module for module in modules if module.kind == "embedding" or is_lm_head(module)]
    if not isinstance(asked, dict):
        asked = {tables[0].name: asked}
    found = []
    for name, ids in asked.items():
        table = next((one for one in tables if one.name.endswith(name)), None)
        if table is None:
            names = ", ".join(one.name.rpartition(".")[2] for one in tables)
            raise ValueError(f"LoraConfig: trainable_token_indices names {name!r}, no table of tokens: {names}.")
        _check(lora, name, table, ids)
        found.append((table, tuple(ids)))
    return found


def _check(lora: LoraConfig, name: str, table: Module, ids: list[int]) -> None:
    last = name.rpartition(".")[2]
    if last in (lora.modules_to_save or []):
        raise ValueError(
            f"The embedding layer is already marked to be trained fully, either specify `modules_to_save=[..., "
            f"\"{last}\", ...]` or `trainable_tokens={{'{last}': x}}` but not both."
        )
    rows = table.outputs if is_lm_head(table) else table.inputs
    wrong = [token for token in ids if not 0 <= token < rows]
    if wrong or len(set(ids)) < len(ids):
        raise ValueError(
            f"LoraConfig: trainable_token_indices of {name!r} are {list(ids)!r:.80}, wanted ids from 0 to {rows - 1}, "
            "each once."
        )
