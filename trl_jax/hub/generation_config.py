"""The generation_config.json of a causal language model."""

from __future__ import annotations

import logging
from pathlib import Path
from typing import Any

from trl_jax.core.files.whole_file import write_whole

NAME = "generation_config.json"
logger = logging.getLogger(__name__)


def read_generation_config(folder: Path, config: Any) -> Any:
    """transformers' GenerationConfig of a folder; made of the model's `config` where there is none that can be read."""
    from transformers import GenerationConfig

    if (folder / NAME).is_file():
        try:
            return GenerationConfig.from_pretrained(folder)
        except (OSError, ValueError, TypeError) as error:
            logger.warning("%s cannot be read and is made anew of config.json: %s", folder / NAME, error)
    return GenerationConfig.from_model_config(config)


def write_generation_config(config: Any, folder: Path) -> None:
    """Write it as it is: values that contradict each other are the checkpoint's own."""
    write_whole(folder / NAME, config.to_json_string(use_diff=True))
