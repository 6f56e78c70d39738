"""The config of an adapter, of whichever type: from an object of ours or of peft's, or from a folder."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path
from typing import Any

from trl_jax.core.printable import brief
from trl_jax.hub.peft.lora_config import CONFIG, LoraConfig, config_of, kind_of, read_keys
from trl_jax.hub.peft.virtual.config import (
    PrefixTuningConfig,
    PromptEncoderConfig,
    PromptLearningConfig,
    PromptTuningConfig,
)

AdapterConfig = LoraConfig | PromptLearningConfig
_KINDS = {"LORA": LoraConfig, "PROMPT_TUNING": PromptTuningConfig, "P_TUNING": PromptEncoderConfig,
          "PREFIX_TUNING": PrefixTuningConfig}  # fmt: skip
# PEFT's other types -> the nearest that works.
_NEAREST = {
    "ADALORA": "LoraConfig with rank_pattern", "LOHA": "LoraConfig", "LOKR": "LoraConfig", "IA3": "LoraConfig(r=1)",
    "OFT": "LoraConfig(use_dora=True)", "BOFT": "LoraConfig(use_dora=True)", "HRA": "LoraConfig(use_dora=True)",
    "DELORA": "LoraConfig(use_dora=True)", "LN_TUNING": "LoraConfig(r=1, modules_to_save=['norm'])",
    "CPT": "PromptTuningConfig", "MULTITASK_PROMPT_TUNING": "PromptTuningConfig",
    "TRAINABLE_TOKENS": "LoraConfig(modules_to_save=['embed_tokens'])",
}  # fmt: skip


def as_adapter_config(config: Any) -> AdapterConfig:
    """A new config of ours with the values of ours or of peft's.

    Raises:
        TypeError, ValueError: it is something else, or of another type of PEFT's.
    """
    if isinstance(config, AdapterConfig):
        return replace(config)
    if not type(config).__module__.startswith("peft."):
        names = ", ".join(f"trl_jax.{one.__name__}" for one in _KINDS.values())
        raise TypeError(f"peft_config is a {type(config).__qualname__}: wanted {names}, or peft's.")
    return _from_keys(config.to_dict(), "peft_config")


def read_adapter_config(folder: Path) -> AdapterConfig:
    """The adapter_config.json of a folder.

    Raises:
        FileNotFoundError, ValueError: there is none, it is no JSON, or it is of another kind or of a later PEFT's.
    """
    return _from_keys(read_keys(folder), str(folder / CONFIG))


def _from_keys(keys: dict[str, Any], source: str) -> AdapterConfig:
    kind = kind_of(keys)
    if kind not in _KINDS:
        nearest = _NEAREST.get(str(kind), "LoraConfig")
        kind = brief(kind)
        raise ValueError(f"{source}: peft_type={kind} is not in this release of trl_jax; the nearest is {nearest}.")
    return config_of(_KINDS[kind], keys, source)


def positions_beside(max_positions: int | None, config: AdapterConfig | None) -> int | None:
    """The positions that virtual tokens leave to texts; None without a limit."""
    taken = config.num_virtual_tokens if isinstance(config, PromptLearningConfig) else None
    return max_positions if max_positions is None else max_positions - (taken or 0)
